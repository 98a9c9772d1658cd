"""Compiles kernels for GPUs that are not there, through the wrappers that would launch them.

A driver that only names its target takes the place of Triton's, and launches become compilations;
tensors are of torch's meta device, which have shapes and no memory. What the assembler made of each
kernel is read back from its binary with the tools in triton's wheel.
"""

from __future__ import annotations

import contextlib
import functools
import re
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

SHARED_LIMIT = {80: 163, 86: 99, 89: 99, 90: 227, 100: 227, 120: 99}
"""KiB of shared memory that one program may have."""
NUM_SMS = {80: 108, 86: 84, 89: 128, 90: 132, 100: 148, 120: 170}
_TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
_CP_ASYNC = re.compile(r"\bLDGSTS\.E(?P<rest>[\w.]*)")
_LOAD = re.compile(r"\bLDG\.E(?P<rest>[\w.]*)")
_INSTRUCTION = re.compile(r"^\s+/\*(?P<at>[0-9a-f]{4,})\*/\s+(?P<text>[^;]*);", re.MULTILINE)
_DEPTH = re.compile(r"ttg\.local_alloc\b.*?memdesc<(\d+)x\d+x\d+x")


@dataclass(frozen=True, slots=True)
class Compiled:
    """What one kernel became on one GPU generation."""

    name: str
    registers: int
    stack: int
    """Bytes of local memory; spilled registers are among them."""
    local: int
    """Instructions that read or write local memory."""
    shared: int
    """Bytes of shared memory of a program."""
    instructions: int
    wide_copies: int
    """Asynchronous copies from global memory of 16 bytes a thread."""
    narrow_copies: int
    wide_loads: int
    """Other loads from global memory of 16 bytes a thread."""
    narrow_loads: int
    mma: int
    """Tensor-core instructions, of a warp."""
    warpgroup_mma: int
    """Tensor-core instructions of the large kinds: wgmma of sm_90, tcgen05 of sm_100."""
    stages: int
    """Buffers that the compiler keeps for what is in flight, 0 without a pipelined loop."""
    loop_cost: float
    """Instructions of a thread per byte it copies to shared memory, in the loop with the fewest."""


class TargetDriver:
    """As much of a GPU's driver as compiling asks for."""

    launcher_cls = None

    def __init__(self, capability: int) -> None:
        self._capability = capability
        self.utils = self

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self._capability, 32)

    def get_current_device(self) -> int:
        return self._capability  # kernels are cached by it

    def get_current_stream(self, device: int = 0) -> int:
        return 0

    def get_device_properties(self, device: int) -> dict[str, int]:
        return {
            "max_shared_mem": SHARED_LIMIT[self._capability] * 1024,
            "multiprocessor_count": NUM_SMS[self._capability],
            "warpSize": 32,
        }


@contextlib.contextmanager
def _compiling(capability: int, kernels: list) -> Iterator[None]:
    run = JITFunction.run

    def compile_only(self, *args, grid, warmup, **kwargs):
        kernels.append(run(self, *args, grid=grid, warmup=True, **kwargs))

    driver.set_active(TargetDriver(capability))
    JITFunction.run = compile_only
    try:
        yield
    finally:
        JITFunction.run = run


def compile_for(capability: int, launch: Callable[[], object]) -> list[Compiled]:
    """The kernels that ``launch`` would launch, in order, each once."""
    kernels: list = []
    with _compiling(capability, kernels):
        launch()
    return [_examine(kernel) for kernel in {id(kernel): kernel for kernel in kernels}.values()]


def _examine(kernel) -> Compiled:
    sass = _disassembled(kernel.asm["cubin"])
    copies = [match["rest"] for match in _CP_ASYNC.finditer(sass)]
    loads = [match["rest"] for match in _LOAD.finditer(sass)]
    wide = [copy for copy in copies if copy.endswith(".128")]
    return Compiled(
        name=kernel.metadata.name,
        registers=_number(r"\bREG:(\d+)", sass),
        stack=_number(r"\bSTACK:(\d+)", sass),
        local=len(re.findall(r"\b(?:LDL|STL)\b", sass)),
        shared=kernel.metadata.shared,
        instructions=len(_INSTRUCTION.findall(sass)),
        wide_copies=len(wide) + len(re.findall(r"\bUTMALDG\b", sass)),
        narrow_copies=len(copies) - len(wide),
        wide_loads=sum(".128" in load for load in loads),
        narrow_loads=sum(".128" not in load for load in loads),
        mma=len(re.findall(r"\bHMMA\b", sass)),
        warpgroup_mma=len(re.findall(r"\b(?:HGMMA|UTCHMMA)\b", sass)),
        stages=max((int(depth) for depth in _DEPTH.findall(kernel.asm["ttgir"])), default=0),
        loop_cost=min(_loop_costs(sass), default=0.0),
    )


@functools.cache
def _disassembled(cubin: bytes) -> str:
    """Cached, since configurations share kernels: the tool takes 0.3 s to start."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [str(_TOOLS / "cuobjdump"), "-sass", "-res-usage", file.name]
        return subprocess.check_output(command, text=True)


def _loop_costs(sass: str) -> Iterator[float]:
    code = {int(match["at"], 16): match["text"] for match in _INSTRUCTION.finditer(sass)}
    for end, text in code.items():
        branch = re.search(r"\bBRA\b.* (0x[0-9a-f]+)", text)
        if branch is None or int(branch[1], 16) >= end:
            continue
        loop = [text for at, text in code.items() if int(branch[1], 16) <= at <= end]
        copies = [match["rest"] for text in loop for match in _CP_ASYNC.finditer(text)]
        copied = sum({"128": 16, "64": 8}.get(copy.rpartition(".")[2], 4) for copy in copies)
        if copied and any("MMA" in text for text in loop):
            yield len(loop) / copied


def _number(pattern: str, text: str) -> int:
    found = re.search(pattern, text)
    assert found is not None, f"no {pattern} in:\n{text}"
    return int(found[1])
