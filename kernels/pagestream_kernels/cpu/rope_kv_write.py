"""Rotary embedding and KV write in one pass over the qkv projection's output, where it is whole."""

from __future__ import annotations

import torch

from pagestream_kernels import reference
from pagestream_kernels.cpu import native


def rope_kv_write(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    rope: torch.Tensor,
    positions: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    q_norm: torch.Tensor | None = None,
    k_norm: torch.Tensor | None = None,
    eps: float = 0.0,
) -> torch.Tensor:
    if q_norm is None and _are_one(q, k, v) and native.takes(rope, k_cache, v_cache):
        num_tokens, num_heads, head_dim = q.shape
        shape = (num_tokens, num_heads + 2 * k.shape[1], head_dim)
        heads = q.as_strided(shape, q.stride())
        return native.rope_kv_write(
            heads, rope, positions, k_cache, v_cache, slot_mapping, num_heads
        )
    return reference.rope_kv_write(
        q, k, v, rope, positions, k_cache, v_cache, slot_mapping, q_norm, k_norm, eps
    )


def _are_one(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> bool:
    """Whether they are float32 views of one tensor's heads, one after the other."""
    size = q.shape[2] * q.element_size()
    return (
        q.dtype is torch.float32
        and q.stride() == k.stride() == v.stride()
        and q.stride()[1:] == (q.shape[2], 1)
        and k.data_ptr() == q.data_ptr() + q.shape[1] * size
        and v.data_ptr() == k.data_ptr() + k.shape[1] * size
    )
