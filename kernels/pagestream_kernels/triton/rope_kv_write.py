"""(QK-norm +) rotary embedding + KV-cache write on the GPU, in one pass over the qkv output.

A program takes one token and a few heads, either of q or of k and v. Values are loaded as the two
halves that rotate into each other, so no lane needs another's.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

_MAX_HEADS = 8
"""Per program: as many 16-byte loads of one token as a program keeps busy."""


@triton.jit
def _normed(low, high, weight_ptr, index, inside, eps, HEAD_DIM: tl.constexpr, dtype):
    """RMSNorm per head, rounded as ``rms_norm`` rounds."""
    half: tl.constexpr = HEAD_DIM // 2
    squares = tl.sum(low * low, axis=1) + tl.sum(high * high, axis=1)
    scale = tl.rsqrt(squares / HEAD_DIM + eps)[:, None]
    low_weight = tl.load(weight_ptr + index, mask=inside, other=0.0).to(tl.float32)
    high_weight = tl.load(weight_ptr + half + index, mask=inside, other=0.0).to(tl.float32)
    low = (low * scale).to(dtype).to(tl.float32) * low_weight[None, :]
    high = (high * scale).to(dtype).to(tl.float32) * high_weight[None, :]
    return low.to(dtype).to(tl.float32), high.to(dtype).to(tl.float32)


@triton.jit
def _load_halves(base_ptr, heads, index, inside, HEAD_DIM: tl.constexpr):
    """[BLOCK_HEADS, HALF] twice, in float32."""
    at = base_ptr + heads[:, None] * HEAD_DIM + index[None, :]
    low = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    high = tl.load(at + HEAD_DIM // 2, mask=inside, other=0.0).to(tl.float32)
    return low, high


@triton.jit
def _rope_kv_write(
    q_ptr,
    k_ptr,
    v_ptr,
    q_out_ptr,
    k_cache_ptr,
    v_cache_ptr,
    rope_ptr,
    positions_ptr,
    slot_mapping_ptr,
    q_norm_ptr,
    k_norm_ptr,
    eps,
    q_stride,
    k_stride,
    v_stride,
    cache_block_stride,
    cache_slot_stride,
    cache_head_stride,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HAS_NORM: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    HALF: tl.constexpr,
):
    half: tl.constexpr = HEAD_DIM // 2
    q_parts: tl.constexpr = (NUM_HEADS + BLOCK_HEADS - 1) // BLOCK_HEADS
    token, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    index = tl.arange(0, HALF)
    in_half = index < half
    angle_at = rope_ptr + tl.load(positions_ptr + token) * HEAD_DIM + index
    cos = tl.load(angle_at, mask=in_half, other=0.0)[None, :]
    sin = tl.load(angle_at + half, mask=in_half, other=0.0)[None, :]
    dtype = q_out_ptr.dtype.element_ty
    if part < q_parts:
        heads = part * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)
        inside = (heads < NUM_HEADS)[:, None] & in_half[None, :]
        low, high = _load_halves(q_ptr + token * q_stride, heads, index, inside, HEAD_DIM)
        if HAS_NORM:
            low, high = _normed(low, high, q_norm_ptr, index, in_half, eps, HEAD_DIM, dtype)
        out = q_out_ptr + (token * NUM_HEADS + heads[:, None]) * HEAD_DIM + index[None, :]
        tl.store(out, (low * cos - high * sin).to(dtype), mask=inside)
        tl.store(out + half, (high * cos + low * sin).to(dtype), mask=inside)
    else:
        slot = tl.load(slot_mapping_ptr + token).to(tl.int64)
        heads = (part - q_parts) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)
        inside = (heads < NUM_KV_HEADS)[:, None] & in_half[None, :]
        owned = (heads < tl.where(slot >= 0, NUM_KV_HEADS, 0))[:, None] & in_half[None, :]
        low, high = _load_halves(k_ptr + token * k_stride, heads, index, inside, HEAD_DIM)
        if HAS_NORM:
            low, high = _normed(low, high, k_norm_ptr, index, in_half, eps, HEAD_DIM, dtype)
        cache = slot // BLOCK_SIZE * cache_block_stride + slot % BLOCK_SIZE * cache_slot_stride
        to = cache + heads[:, None] * cache_head_stride + index[None, :]
        tl.store(k_cache_ptr + to, (low * cos - high * sin).to(dtype), mask=owned)
        tl.store(k_cache_ptr + to + half, (high * cos + low * sin).to(dtype), mask=owned)
        low, high = _load_halves(v_ptr + token * v_stride, heads, index, inside, HEAD_DIM)
        tl.store(v_cache_ptr + to, low.to(dtype), mask=owned)
        tl.store(v_cache_ptr + to + half, high.to(dtype), mask=owned)


def rope_kv_write(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    rope: torch.Tensor,
    positions: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    q_norm: torch.Tensor | None,
    k_norm: torch.Tensor | None,
    eps: float,
) -> torch.Tensor:
    num_tokens, num_heads, head_dim = q.shape
    if any(x.stride(-1) != 1 or x.stride(-2) != head_dim for x in (q, k, v)):
        raise ValueError("the heads of a token must lie side by side in q, k and v")
    if k_cache.stride() != v_cache.stride() or k_cache.stride(-1) != 1:
        raise ValueError("k_cache and v_cache must be laid out alike, head_dim innermost")
    out = q.new_empty(q.shape)
    block_heads = min(_MAX_HEADS, triton.next_power_of_2(num_heads))
    half = triton.next_power_of_2(head_dim // 2)
    parts = triton.cdiv(num_heads, block_heads) + triton.cdiv(k.shape[1], block_heads)
    _rope_kv_write[(num_tokens, parts)](
        q,
        k,
        v,
        out,
        k_cache,
        v_cache,
        rope,
        positions,
        slot_mapping,
        q_norm,
        k_norm,
        eps,
        q.stride(0),
        k.stride(0),
        v.stride(0),
        *k_cache.stride()[:3],
        NUM_HEADS=num_heads,
        NUM_KV_HEADS=k.shape[1],
        HEAD_DIM=head_dim,
        BLOCK_SIZE=k_cache.shape[1],
        HAS_NORM=q_norm is not None,
        BLOCK_HEADS=block_heads,
        HALF=half,
        num_warps=max(1, min(4, block_heads * half // 256)),  # 8 elements of each half a thread
    )
    return out
