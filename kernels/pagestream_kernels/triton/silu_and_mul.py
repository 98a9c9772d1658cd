"""Gated products over a fused gate-up projection on the GPU, elementwise, in 16-byte loads.

The activation is rounded to the tensors' dtype before the product, as in the twins.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

_BLOCK = 2048


@triton.jit
def _silu(x):
    return x / (1.0 + tl.exp(-x))


@triton.jit
def _gelu_tanh(x):
    """0.5 x (1 + tanh(y)) is x sigmoid(2 y): no cancellation where tanh is near -1."""
    y = 0.7978845608028654 * (x + 0.044715 * x * x * x)  # sqrt(2 / pi)
    return x / (1.0 + tl.exp(-2.0 * y))


@triton.jit
def _gated_product(
    gate_up_ptr, out_ptr, WIDTH: tl.constexpr, GELU: tl.constexpr, BLOCK: tl.constexpr
):
    blocks_per_row: tl.constexpr = (WIDTH + BLOCK - 1) // BLOCK
    row = (tl.program_id(0) // blocks_per_row).to(tl.int64)
    columns = tl.program_id(0) % blocks_per_row * BLOCK + tl.arange(0, BLOCK)
    inside = columns < WIDTH
    gate_at = gate_up_ptr + row * (2 * WIDTH) + columns
    gate = tl.load(gate_at, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_at + WIDTH, mask=inside, other=0.0).to(tl.float32)
    activated = _gelu_tanh(gate) if GELU else _silu(gate)
    dtype = out_ptr.dtype.element_ty
    product = (activated.to(dtype).to(tl.float32) * up).to(dtype)
    tl.store(out_ptr + row * WIDTH + columns, product, mask=inside)


def silu_and_mul(gate_up: torch.Tensor) -> torch.Tensor:
    return _launch(gate_up.contiguous(), gelu=False)


def gelu_tanh_and_mul(gate_up: torch.Tensor) -> torch.Tensor:
    return _launch(gate_up.contiguous(), gelu=True)


def _launch(gate_up: torch.Tensor, *, gelu: bool) -> torch.Tensor:
    num_rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    out = gate_up.new_empty(num_rows, width)
    block = min(_BLOCK, triton.next_power_of_2(width))
    _gated_product[(num_rows * triton.cdiv(width, block),)](
        gate_up, out, WIDTH=width, GELU=gelu, BLOCK=block, num_warps=4
    )
    return out
