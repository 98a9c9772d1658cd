"""Causal attention of a flat batch over the paged KV cache: prefill and decode in one call.

    tokens of request r:   | context_len (already cached) | query_len (this step) |
                           |<------------------- seq_len ------------------------>|

Lengths and tables are the same for every layer of a step, so ``plan_attention`` works out once per
step what an implementation derives from them, and each layer passes the result on unchanged.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from pagestream_kernels import reference
from pagestream_kernels.cpu import paged_attention as cpu


@dataclass(frozen=True, slots=True)
class AttentionMetadata:
    """What attention needs to know about one step's flat batch."""

    query_start_loc: torch.Tensor  # int32 [num_reqs + 1], prefix sum of query_len
    seq_lens: torch.Tensor  # int32 [num_reqs], context_len + query_len
    block_tables: torch.Tensor  # int32 [num_reqs, >= blocks of the longest]; rest is undefined
    plan: Any  # the implementation's own, made by plan_attention; None for the reference


def plan_attention(
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    block_tables: torch.Tensor,
    block_size: int,
) -> AttentionMetadata:
    """Build the step's metadata; fields as in ``AttentionMetadata``, all on one device."""
    plan = None
    if seq_lens.device.type == "cpu":
        plan = cpu.make_plan(query_start_loc, seq_lens, block_tables, block_size)
    return AttentionMetadata(query_start_loc, seq_lens, block_tables, plan)


def paged_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    metadata: AttentionMetadata,
    scale: float,
) -> torch.Tensor:
    """softmax(scale * q k^T, causal) v for every token of the flat batch.

    Args:
        q: [num_tokens, num_heads, head_dim], rotated; num_heads a multiple of num_kv_heads.
        k_cache, v_cache: [num_blocks, block_size, num_kv_heads, head_dim], already holding this
            step's keys and values. Slots that no request owns may hold anything, NaN included.

    Returns [num_tokens, num_heads, head_dim].
    """
    if metadata.plan is not None:
        return cpu.paged_attention(q, k_cache, v_cache, metadata.plan, scale)
    return reference.paged_attention(
        q,
        k_cache,
        v_cache,
        metadata.query_start_loc,
        metadata.seq_lens,
        metadata.block_tables,
        scale,
    )
