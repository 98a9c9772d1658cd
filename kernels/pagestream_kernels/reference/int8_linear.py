"""Products with 8-bit weights in plain torch; see ``pagestream_kernels.int8_linear``."""

from __future__ import annotations

import torch

GROUP = 32
STEPS_PER_SCALE = 17
_LEVELS = 255
_ACTIVATION_STEPS = 127 * 128


def quantize(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """[out, in] -> bytes uint8 [out, groups, GROUP], scales and minima float16 [out, groups]."""
    grouped = weight.to(torch.float32).view(len(weight), -1, GROUP)
    minima = grouped.amin(2).to(torch.float16)
    above = grouped - minima[..., None].to(torch.float32)
    scales = (above.amax(2) / (_LEVELS / STEPS_PER_SCALE)).to(torch.float16)
    step = scales[..., None].to(torch.float32) / STEPS_PER_SCALE
    levels = torch.where(step > 0, above / step, torch.zeros_like(above))
    return levels.round().clamp(0, _LEVELS).to(torch.uint8), scales, minima


def dequantize(bytes_: torch.Tensor, scales: torch.Tensor, minima: torch.Tensor) -> torch.Tensor:
    """[out, in] float32, exactly what the product uses."""
    steps = scales.to(torch.float32) / STEPS_PER_SCALE
    grouped = steps[..., None] * bytes_ + minima[..., None].to(torch.float32)
    return grouped.flatten(1)


def int8_linear(x: torch.Tensor, dequantized: torch.Tensor) -> torch.Tensor:
    """Activations rounded to 15 bits in groups, as the fast form does."""
    grouped = x.to(torch.float32).reshape(len(x), -1, GROUP)
    step = grouped.abs().amax(2, keepdim=True) / _ACTIVATION_STEPS
    rounded = torch.where(step > 0, (grouped / step).round() * step, torch.zeros_like(grouped))
    return rounded.flatten(1) @ dequantized.T
