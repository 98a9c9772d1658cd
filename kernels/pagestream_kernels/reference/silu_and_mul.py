"""Gated products in plain torch; see ``pagestream_kernels.silu_and_mul`` for shapes."""

from __future__ import annotations

import torch


def silu_and_mul(gate_up: torch.Tensor) -> torch.Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    gate32 = gate.to(torch.float32)
    return (gate32 * torch.sigmoid(gate32)).to(gate_up.dtype) * up


def gelu_tanh_and_mul(gate_up: torch.Tensor) -> torch.Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    gate32 = gate.to(torch.float32)
    tanh = torch.tanh((2 / torch.pi) ** 0.5 * (gate32 + 0.044715 * gate32**3))
    return (0.5 * gate32 * (1 + tanh)).to(gate_up.dtype) * up
