"""Linear: a weight, perhaps a bias, and the product; also the fused forms' row bookkeeping.

A fused projection (qkv, gate-up) is one Linear whose rows are filled from several checkpoint
tensors: one large matmul instead of several small ones.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from pagestream_kernels import Int8Weight, int8_linear, quantize_int8


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
        weight: torch.Tensor | None = None,
    ) -> None:
        """``parts``: checkpoint name of each piece -> its rows, in the order they are stacked;
        ``weight``: another's, to share."""
        self.parts = parts
        out_features = sum(parts.values())
        if weight is None:
            weight = torch.empty((out_features, in_features), dtype=dtype, device=device)
        self.weight = weight
        self.bias = torch.empty(out_features, dtype=dtype, device=device) if bias else None
        self._int8: Int8Weight | None = None

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if self._int8 is None:
            return F.linear(x, self.weight, self.bias)
        out = int8_linear(x, self._int8)
        return out if self.bias is None else out + self.bias

    def quantize(self) -> None:
        """Keep 8-bit weights instead; the float ones are given up."""
        self._int8 = quantize_int8(self.weight)
        self.weight = self.weight.new_empty(0)

    def targets(self, prefix: str) -> dict[str, torch.Tensor]:
        """Checkpoint tensor name -> the view it fills."""
        targets, start = {}, 0
        for name, rows in self.parts.items():
            targets[f"{prefix}{name}.weight"] = self.weight[start : start + rows]
            if self.bias is not None:
                targets[f"{prefix}{name}.bias"] = self.bias[start : start + rows]
            start += rows
        return targets
