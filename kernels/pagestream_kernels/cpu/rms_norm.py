"""RMSNorm through native.cpp, or torch's fused CPU op."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from pagestream_kernels.cpu import native


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    if native.takes(x, weight):
        return native.add_rms_norm(None, x, weight, eps)
    return F.rms_norm(x, (x.shape[-1],), weight, eps)


def fused_add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    if native.takes(x, residual, weight):
        return native.add_rms_norm(x, residual, weight, eps), residual
    residual.add_(x)
    return F.rms_norm(residual, (x.shape[-1],), weight, eps), residual
