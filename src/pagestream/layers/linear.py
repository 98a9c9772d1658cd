"""Linear: a weight, perhaps a bias, and the product; also the fused forms' row bookkeeping.

A fused projection (qkv, gate-up) is one Linear whose rows are filled from several checkpoint
tensors: one large matmul instead of several small ones.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F


class Linear:
    """``x @ weight.T + bias``; weight is [out_features, in_features], allocated uninitialised."""

    def __init__(
        self,
        in_features: int,
        parts: dict[str, int],
        *,
        bias: bool,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """``parts``: checkpoint name of each piece -> its rows, in the order they are stacked."""
        self.parts = parts
        out_features = sum(parts.values())
        self.weight = torch.empty((out_features, in_features), dtype=dtype, device=device)
        self.bias = torch.empty(out_features, dtype=dtype, device=device) if bias else None

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.weight, self.bias)

    def targets(self, prefix: str) -> dict[str, torch.Tensor]:
        """Checkpoint tensor name -> the view it fills."""
        targets, start = {}, 0
        for name, rows in self.parts.items():
            targets[f"{prefix}{name}.weight"] = self.weight[start : start + rows]
            if self.bias is not None:
                targets[f"{prefix}{name}.bias"] = self.bias[start : start + rows]
            start += rows
        return targets
