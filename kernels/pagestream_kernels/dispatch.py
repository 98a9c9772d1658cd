"""Which implementation of an op runs: Triton kernels on CUDA tensors, torch on CPU ones.

triton is optional and slow to import: it is loaded only where there is a GPU. Under Triton's
interpreter (``TRITON_INTERPRET=1``) the kernels also take CPU tensors, so that they can be tested,
and a whole engine run through them, without a GPU. Imported by each op's file.
"""

from __future__ import annotations

import os
from importlib.util import find_spec

import torch

__all__ = ["HAS_TRITON", "INTERPRETED", "kernels", "runs_kernels", "warn_of_compiles"]

HAS_TRITON = find_spec("triton") is not None

if HAS_TRITON and (torch.cuda.is_available() or "TRITON_INTERPRET" in os.environ):
    from pagestream_kernels import triton as kernels

    INTERPRETED = kernels.INTERPRETED
else:
    kernels = None  # type: ignore[assignment]  # runs_kernels speaks up before anyone uses it
    INTERPRETED = False


def runs_kernels(x: torch.Tensor) -> bool:
    """Whether the Triton kernels work on ``x``. RuntimeError if they should and are not there."""
    if not x.is_cuda:
        return INTERPRETED
    if not HAS_TRITON:
        raise RuntimeError("CUDA tensors need triton, which is not installed (pip install triton)")
    return True


def warn_of_compiles() -> None:
    """From now on, log a warning for each kernel that compiles. Called when the engine is warm."""
    if kernels is not None:
        kernels.compile_watch.install()
