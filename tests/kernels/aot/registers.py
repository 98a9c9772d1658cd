"""How many registers each kernel had when last looked at, by Triton's minor version."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import shipped
import triton
from compile_kernels import Compiled

MAX_GROWTH = 1.2
_FILE = Path(__file__).with_name("registers.json")


class Registers:
    """``registers.json``: version -> configuration -> kernel -> registers by capability."""

    def __init__(self, *, rewrite: bool) -> None:
        self._version = ".".join(triton.__version__.split(".")[:2])
        self._rewrite = rewrite
        self._all = json.loads(_FILE.read_text()) if _FILE.exists() else {}
        self._known = self._all.setdefault(self._version, {})

    def known(self, capability: int, name: str, kernel: Compiled) -> int:
        """LookupError for a kernel that is new to a known Triton; no limit with an unknown one."""
        if self._rewrite:
            kernels = self._known.setdefault(name, {})
            kernels.setdefault(kernel.name, {})[f"sm_{capability}"] = kernel.registers
        if not self._known:
            return sys.maxsize
        try:
            return self._known[name][kernel.name][f"sm_{capability}"]
        except KeyError:
            raise LookupError(
                f"{_FILE.name} has no {kernel.name} of {name!r} for sm_{capability} and Triton "
                f"{self._version}: make kernels-aot ARGS=--rewrite-registers"
            ) from None

    def save(self) -> None:
        if self._rewrite:
            self._all[self._version] = {
                name: kernels for name, kernels in self._known.items() if name in shipped.BY_NAME
            }
            _FILE.write_text(json.dumps(self._all, indent=1, sort_keys=True) + "\n")
