"""Which implementation of an op runs: Triton kernels on CUDA tensors, torch on CPU ones.

triton is optional: without it everything works on CPU. Under Triton's interpreter
(``TRITON_INTERPRET=1``) the kernels also take CPU tensors, so that they can be tested, and a whole
engine run through them, without a GPU. Imported by each op's file.
"""

from __future__ import annotations

import torch

try:
    from pagestream_kernels import triton as kernels
except ModuleNotFoundError as error:
    if error.name is None or error.name.partition(".")[0] != "triton":
        raise
    kernels = None  # type: ignore[assignment]  # runs_kernels speaks up before anyone uses it

__all__ = ["HAS_TRITON", "INTERPRETED", "kernels", "runs_kernels"]

HAS_TRITON = kernels is not None
INTERPRETED = HAS_TRITON and kernels.INTERPRETED


def runs_kernels(x: torch.Tensor) -> bool:
    """Whether the Triton kernels work on ``x``. RuntimeError if they should and are not there."""
    if not x.is_cuda:
        return INTERPRETED
    if not HAS_TRITON:
        raise RuntimeError("CUDA tensors need triton, which is not installed (pip install triton)")
    return True
