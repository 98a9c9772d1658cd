"""What a shipped configuration is, and what is asked of its kernels. Lists of them: ``shipped``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from compile_kernels import Compiled

SERVERS = (80, 90, 100)
"""Compute capabilities that everything is compiled for: A100, H100 and H200, B200."""
CONSUMER = (89, 120)
"""Those with less shared memory, for what uses much of it."""

Check = Callable[[Compiled, int], None]
"""Raises AssertionError for what is wrong with a kernel on a compute capability."""


@dataclass(frozen=True, slots=True)
class Configuration:
    name: str
    launch: Callable[[], object]
    """Calls a launch wrapper with tensors from ``tensor``."""
    kernels: Mapping[str, Check]
    """What the call launches, and what is asked of it besides what is asked of every kernel."""
    quick: bool = False
    """Whether `make test` compiles it, for sm_90."""
    capabilities: tuple[int, ...] = SERVERS


def tensor(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """Of no memory; its address counts as aligned."""
    return torch.empty(shape, dtype=dtype, device="meta")


def nothing_more(kernel: Compiled, capability: int) -> None:
    """Whatever is asked of every kernel is enough."""


def loads_16_bytes(kernel: Compiled, capability: int) -> None:
    assert kernel.wide_loads > 0
    assert kernel.narrow_loads == 0, "loads of less than 16 bytes a thread"
