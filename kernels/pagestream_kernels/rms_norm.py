"""RMSNorm, alone and fused with the residual addition that precedes it.

Statistics are taken in float32 whatever the input's dtype, and the weight is applied after the
cast back, in transformers' order: bf16 rounding order decides token parity with it.
"""

from __future__ import annotations

import torch

from pagestream_kernels.cpu import rms_norm as cpu
from pagestream_kernels.dispatch import kernels, runs_kernels


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """``x * rsqrt(mean(x^2) + eps) * weight`` over the last axis.

    Args:
        x: [..., hidden], any float dtype.
        weight: [hidden].

    Returns a new tensor shaped like ``x``. Source: Zhang and Sennrich, 2019, eq. 4.
    """
    if runs_kernels(x):
        return kernels.rms_norm.rms_norm(x, weight, eps)
    return cpu.rms_norm(x, weight, eps)


def fused_add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """``residual += x`` in place, then the norm of the sum: (normed, residual), [..., hidden].

    The sum is rounded to the tensors' dtype before its norm is taken. residual: contiguous.
    """
    if runs_kernels(x):
        return kernels.rms_norm.fused_add_rms_norm(x, residual, weight, eps)
    return cpu.fused_add_rms_norm(x, residual, weight, eps)
