"""Rotary embedding and KV write in plain torch; see ``pagestream_kernels.rope_kv_write``."""

from __future__ import annotations

import torch

from pagestream_kernels.reference.rms_norm import rms_norm


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
    if q_norm is not None and k_norm is not None:
        q, k = rms_norm(q, q_norm, eps), rms_norm(k, k_norm, eps)
    cos, sin = rope[positions].unsqueeze(2).unbind(1)  # each [num_tokens, 1, head_dim // 2]
    rotated_k = _rotate(k, cos, sin)
    slots = slot_mapping
    if bool((slots < 0).any()):
        owned = slots >= 0
        slots, rotated_k, v = slots[owned], rotated_k[owned], v[owned]
    k_cache.view(-1, *k_cache.shape[2:]).index_copy_(0, slots, rotated_k.to(k_cache.dtype))
    v_cache.view(-1, *v_cache.shape[2:]).index_copy_(0, slots, v.to(v_cache.dtype))
    return _rotate(q, cos, sin)


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    low, high = x.to(torch.float32).chunk(2, dim=-1)
    rotated = torch.cat((low * cos - high * sin, high * cos + low * sin), dim=-1)
    return rotated.to(x.dtype)
