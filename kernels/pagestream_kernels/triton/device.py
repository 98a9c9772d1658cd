"""What launch settings depend on: the GPU's generation and its number of multiprocessors."""

from __future__ import annotations

import functools
import os
from dataclasses import dataclass
from typing import Any

import triton
from triton.runtime import driver

# Multiply-adds in one instruction, as kernels were tested: Triton 3.10 changes the default, and 3.9
# warns of it.
os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")

INTERPRETED: bool = triton.knobs.runtime.interpret
"""Whether kernels defined from here on run in Triton's interpreter, on CPU tensors."""


@dataclass(frozen=True, slots=True)
class Device:
    capability: int
    """Compute capability as one number: 90 is sm_90."""
    num_sms: int


def current_device() -> Device:
    """The GPU that a launch would go to; an H200 under the interpreter."""
    if INTERPRETED:
        return Device(90, 132)
    return _describe(driver.active, driver.active.get_current_device())


@functools.cache
def _describe(active: Any, index: int) -> Device:
    properties = active.utils.get_device_properties(index)
    return Device(active.get_current_target().arch, properties["multiprocessor_count"])
