"""Paged attention in plain torch, one request at a time; see the public op for shapes."""

from __future__ import annotations

import torch


def paged_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    block_tables: torch.Tensor,
    scale: float,
    window: int | None = None,
    soft_cap: float | None = None,
) -> torch.Tensor:
    block_size, num_kv_heads = k_cache.shape[1:3]
    group = q.shape[1] // num_kv_heads
    out = torch.empty_like(q)
    starts = [int(start) for start in query_start_loc]
    for row, seq_len in enumerate(int(length) for length in seq_lens):
        start, end = starts[row], starts[row + 1]
        if end == start or seq_len == 0:  # padding
            out[start:end] = 0
            continue
        blocks = block_tables[row, : -(-seq_len // block_size)].long()
        k, v = (
            cache[blocks].flatten(0, 1)[:seq_len].to(torch.float32).repeat_interleave(group, dim=1)
            for cache in (k_cache, v_cache)
        )  # [seq_len, num_heads, head_dim]
        scores = torch.einsum("qhd,khd->hqk", q[start:end].to(torch.float32), k) * scale
        if soft_cap is not None:
            scores = soft_cap * torch.tanh(scores / soft_cap)
        query_positions = torch.arange(seq_len - (end - start), seq_len, device=q.device)[:, None]
        key_positions = torch.arange(seq_len, device=q.device)[None, :]
        hidden = key_positions > query_positions
        if window is not None:
            hidden |= key_positions <= query_positions - window
        weights = scores.masked_fill(hidden, float("-inf")).softmax(dim=-1)
        out[start:end] = torch.einsum("hqk,khd->qhd", weights, v).to(q.dtype)
    return out
