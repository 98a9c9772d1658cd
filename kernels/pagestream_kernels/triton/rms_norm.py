"""RMSNorm on the GPU: one pass, a row (or a few short ones) per program, statistics in float32.

With a residual, the sum is rounded to the tensors' dtype before its norm is taken, as the twin
does. Bound by memory: each element is read once and written once per tensor.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

_ELEMENTS = 2048
"""Per program at least, so that short rows share one."""


@triton.jit(do_not_specialize=["num_rows"])
def _rms_norm(
    x_ptr,
    residual_ptr,  # updated in place
    weight_ptr,
    out_ptr,
    num_rows,
    eps,
    HIDDEN: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, BLOCK)
    inside = (rows < num_rows)[:, None] & (columns < HIDDEN)[None, :]
    at = rows.to(tl.int64)[:, None] * HIDDEN + columns[None, :]
    x = tl.load(x_ptr + at, mask=inside, other=0.0).to(tl.float32)  # [ROWS, BLOCK]
    dtype = out_ptr.dtype.element_ty
    if HAS_RESIDUAL:
        x += tl.load(residual_ptr + at, mask=inside, other=0.0).to(tl.float32)
        total = x.to(dtype)
        tl.store(residual_ptr + at, total, mask=inside)
        x = total.to(tl.float32)
    weight = tl.load(weight_ptr + columns, mask=columns < HIDDEN, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(x * x, axis=1) / HIDDEN + eps)  # [ROWS]
    normed = (x * scale[:, None]).to(dtype).to(tl.float32)
    tl.store(out_ptr + at, (normed * weight[None, :]).to(dtype), mask=inside)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return _launch(x.contiguous(), None, weight, eps)


def fused_add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    if not residual.is_contiguous():
        raise ValueError("residual is updated in place and must be contiguous")
    return _launch(x.contiguous(), residual, weight, eps), residual


def _launch(
    x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor, eps: float
) -> torch.Tensor:
    hidden = x.shape[-1]
    num_rows = x.numel() // hidden
    block = triton.next_power_of_2(hidden)
    rows = max(1, _ELEMENTS // block)
    out = torch.empty_like(x)
    _rms_norm[(triton.cdiv(num_rows, rows),)](
        x,
        residual,
        weight,
        out,
        num_rows,
        eps,
        HIDDEN=hidden,
        HAS_RESIDUAL=residual is not None,
        ROWS=rows,
        BLOCK=block,
        num_warps=min(16, max(4, rows * block // 512)),  # 16 elements a thread: two 16-byte loads
    )
    return out
