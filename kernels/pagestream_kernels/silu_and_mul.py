"""Gated products over a fused gate-up projection.

The activation is rounded to the tensors' dtype before the product, as transformers does.
"""

from __future__ import annotations

import torch

from pagestream_kernels.cpu import silu_and_mul as cpu
from pagestream_kernels.dispatch import kernels, runs_kernels


def silu_and_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """``silu(gate) * up`` of [num_tokens, 2 * intermediate] -> [num_tokens, intermediate].

    The first half of the last axis is the gate. Source: Shazeer, 2020, SwiGLU.
    """
    if runs_kernels(gate_up):
        return kernels.silu_and_mul.silu_and_mul(gate_up)
    return cpu.silu_and_mul(gate_up)


def gelu_tanh_and_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """``gelu(gate) * up``, shapes as ``silu_and_mul``; GELU's tanh approximation.

    Source: Shazeer, 2020, GEGLU; Hendrycks and Gimpel, 2016, for the approximation.
    """
    if runs_kernels(gate_up):
        return kernels.silu_and_mul.gelu_tanh_and_mul(gate_up)
    return cpu.gelu_tanh_and_mul(gate_up)
