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
from pagestream_kernels.dispatch import kernels, runs_kernels


@dataclass(frozen=True, slots=True)
class AttentionMetadata:
    """What attention needs to know about one step's flat batch."""

    query_start_loc: torch.Tensor  # int32 [num_reqs + 1], prefix sum of query_len
    seq_lens: torch.Tensor  # int32 [num_reqs], context_len + query_len
    block_tables: torch.Tensor  # int32 [num_rows, >= blocks of the longest]; rest is undefined
    idx_mapping: torch.Tensor | None  # int64 [num_reqs], the request's row of block_tables
    max_query_len: int | None  # no request has more, known to the host; None: unknown
    plan: Any  # the implementation's own, made by plan_attention; None for the kernels


def plan_attention(
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    block_tables: torch.Tensor,
    block_size: int,
    *,
    idx_mapping: torch.Tensor | None = None,
    max_query_len: int | None = None,
) -> AttentionMetadata:
    """Build the step's metadata; fields as in ``AttentionMetadata``, all on one device.

    idx_mapping: None where request i has row i. max_query_len: on a GPU, chooses the launch without
    asking the device. Padding requests have query_len 0, or query_len 1 and seq_len 0.
    """
    plan = None
    if not runs_kernels(seq_lens):
        if idx_mapping is not None:
            block_tables, idx_mapping = block_tables[idx_mapping], None
        plan = cpu.make_plan(query_start_loc, seq_lens, block_tables, block_size)
    return AttentionMetadata(
        query_start_loc, seq_lens, block_tables, idx_mapping, max_query_len, plan
    )


def paged_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    metadata: AttentionMetadata,
    scale: float,
    *,
    window: int | None = None,
    soft_cap: float | None = None,
) -> torch.Tensor:
    """softmax(scale * q k^T, causal) v for every token of the flat batch.

    Args:
        q: [num_tokens, num_heads, head_dim], rotated; num_heads a multiple of num_kv_heads.
        k_cache, v_cache: [num_blocks, block_size, num_kv_heads, head_dim], already holding this
            step's keys and values. Slots that no request owns may hold anything, NaN included.
        window: a token sees at most its last ``window`` tokens, itself included.
        soft_cap: scores become ``soft_cap * tanh(score / soft_cap)`` (Gemma 2).

    Returns [num_tokens, num_heads, head_dim]; rows of no request are undefined. On a GPU,
    block_size is a multiple of 16, and fastest from 64. Sources: Kwon et al., 2023, PagedAttention;
    Dao et al., 2022, FlashAttention.
    """
    lengths = (metadata.query_start_loc, metadata.seq_lens, metadata.block_tables)
    if runs_kernels(q):
        return kernels.paged_attention.paged_attention(
            q,
            k_cache,
            v_cache,
            *lengths,
            metadata.idx_mapping,
            len(q) if metadata.max_query_len is None else metadata.max_query_len,
            scale,
            window,
            soft_cap,
        )
    if window is None and soft_cap is None:
        return cpu.paged_attention(q, k_cache, v_cache, metadata.plan, scale)
    return reference.paged_attention(q, k_cache, v_cache, *lengths, scale, window, soft_cap)
