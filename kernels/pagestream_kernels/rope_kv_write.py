"""Rotary embedding of q and k, and the write of k and v to their slots of the paged cache.

One op because a GPU does both, and the per-head norms that some models have before them, in one
pass over the qkv projection's output.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from pagestream_kernels.cpu import rope_kv_write as cpu
from pagestream_kernels.dispatch import kernels, runs_kernels


def rope_table(
    max_position: int,
    head_dim: int,
    theta: float,
    device: torch.device,
    rescale: Callable[[torch.Tensor], torch.Tensor] | None = None,
) -> torch.Tensor:
    """Cosines and sines by position: float32 [max_position, 2, head_dim // 2].

    rescale: what a model makes of the frequencies, float32 [head_dim // 2] in radians per position.

    Source: Su et al., 2021, RoFormer; half-split ("NeoX") layout, angles in float32.
    """
    exponents = torch.arange(0, head_dim, 2, dtype=torch.int64).to(torch.float32) / head_dim
    frequencies = 1.0 / (theta**exponents)  # [head_dim // 2]
    if rescale is not None:
        frequencies = rescale(frequencies)
    angles = torch.outer(torch.arange(max_position, dtype=torch.float32), frequencies)
    return torch.stack((angles.cos(), angles.sin()), dim=1).to(device)


def rope_kv_write(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    rope: torch.Tensor,
    positions: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    *,
    q_norm: torch.Tensor | None = None,
    k_norm: torch.Tensor | None = None,
    eps: float = 0.0,
) -> torch.Tensor:
    """Rotate q and k by their positions, store k and v, return the rotated q.

    Args:
        q: [num_tokens, num_heads, head_dim]; views of the qkv output are fine.
        k, v: [num_tokens, num_kv_heads, head_dim].
        rope: float32 [max_position, 2, head_dim // 2] from ``rope_table``.
        positions: int64 [num_tokens].
        k_cache, v_cache: [num_blocks, block_size, num_kv_heads, head_dim], written in place.
        slot_mapping: int64 [num_tokens]; block_id * block_size + offset, or -1 to store nothing.
        q_norm, k_norm: [head_dim], weights of an RMSNorm of each head before its rotation (Qwen3),
            with ``eps``; both or neither.

    Returns [num_tokens, num_heads, head_dim], a new tensor of q's dtype.
    """
    run = kernels.rope_kv_write.rope_kv_write if runs_kernels(q) else cpu.rope_kv_write
    return run(q, k, v, rope, positions, k_cache, v_cache, slot_mapping, q_norm, k_norm, eps)
