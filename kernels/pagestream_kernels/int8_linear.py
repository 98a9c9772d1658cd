"""Products with weights of 8 bits, for CPUs: a quarter of the memory to read, nearly all precision.

Weights have a scale and a minimum for each group of 32 of one output. The grid has 256 levels
between a group's least and largest weight, of which every 17th is one of sixteen evenly spaced: so
weights that were stored in 4 bits (Q4_0, Q4_1) lose nothing. Activations are rounded to 15 bits,
by group too, which costs a second product of bytes and makes outliers harmless.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from pagestream_kernels.cpu import native
from pagestream_kernels.reference import int8_linear as reference


@dataclass(frozen=True, slots=True)
class Int8Weight:
    """A quantized [out_features, in_features]; made by ``quantize_int8``."""

    out_features: int
    packed: torch.Tensor | None
    """uint8 [out / 32 rounded up, in / 32, 32 scales and 32 minima as float16, 8 x 32 x 4 bytes];
    None where the CPU cannot multiply bytes."""
    dequantized: torch.Tensor | None
    """float32 [out_features, in_features], where there is no ``packed``."""


def quantize_int8(weight: torch.Tensor) -> Int8Weight:
    """ValueError if in_features is not a multiple of 32. Keeps no reference to ``weight``."""
    out_features, in_features = weight.shape
    if in_features % reference.GROUP:
        raise ValueError(
            f"quantization int8 needs in_features that are multiples of {reference.GROUP}, "
            f"got {in_features}"
        )
    quantized = reference.quantize(weight)
    if not native.HAS_INT8:
        return Int8Weight(out_features, None, reference.dequantize(*quantized))
    return Int8Weight(out_features, _pack(*quantized), None)


def int8_linear(x: torch.Tensor, weight: Int8Weight) -> torch.Tensor:
    """``x @ weight.T``: float32 [num_tokens, in_features] -> [num_tokens, out_features]."""
    if weight.packed is None:
        assert weight.dequantized is not None
        return F.linear(x, weight.dequantized)
    return native.int8_linear(x.contiguous(), weight.packed)[:, : weight.out_features]


def _pack(levels: torch.Tensor, scales: torch.Tensor, minima: torch.Tensor) -> torch.Tensor:
    padding = -len(levels) % native.TILE
    levels, scales, minima = (
        torch.cat((part, part.new_zeros((padding, *part.shape[1:]))))
        for part in (levels, scales, minima)
    )
    num_groups = scales.shape[1]
    weights = levels.view(-1, native.TILE, num_groups, native.GROUP // 4, 4)
    weights = weights.permute(0, 2, 3, 1, 4).flatten(2)  # [tiles, groups, GROUP * TILE]
    halves = [
        part.view(-1, native.TILE, num_groups).transpose(1, 2).contiguous().view(torch.uint8)
        for part in (scales, minima)
    ]
    return torch.cat((*halves, weights), dim=2).contiguous()
