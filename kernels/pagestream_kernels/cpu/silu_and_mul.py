"""Gated products without a float32 copy of the gate."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from pagestream_kernels.cpu import native


def silu_and_mul(gate_up: torch.Tensor) -> torch.Tensor:
    if native.takes(gate_up):
        return native.silu_and_mul(gate_up)
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate).mul_(up)


def gelu_tanh_and_mul(gate_up: torch.Tensor) -> torch.Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    return F.gelu(gate, approximate="tanh").mul_(up)
