"""RMSNorm, alone and fused with the residual addition that precedes it.

Statistics are taken in float32 whatever the input's dtype, and the weight is applied after the
cast back, in transformers' order: bf16 rounding order decides token parity with it.
"""

from __future__ import annotations

import torch

from pagestream_kernels import reference
from pagestream_kernels.cpu import rms_norm as cpu


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """``x * rsqrt(mean(x^2) + eps) * weight`` over the last axis.

    Args:
        x: [..., hidden], any float dtype.
        weight: [hidden].

    Returns a new tensor shaped like ``x``. Source: Zhang and Sennrich, 2019, eq. 4.
    """
    if x.device.type == "cpu":
        return cpu.rms_norm(x, weight, eps)
    return reference.rms_norm(x, weight, eps)


def fused_add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """``residual += x`` in place, then the norm of the sum: (normed, residual), [..., hidden]."""
    if x.device.type == "cpu":
        return cpu.fused_add_rms_norm(x, residual, weight, eps)
    return reference.fused_add_rms_norm(x, residual, weight, eps)
