"""Paged attention on CPU: torch's fused attention over gathered keys and values.

Decode rows of similar length share one call; each prefill is its own. Positions past a request's
end are filled from its own first slot, which is always written, and masked: an unowned slot is
never read, so whatever it holds cannot leak (0 * NaN is NaN).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

_PADDING_LIMIT = 1.5
"""Rows share a call while the longest is at most this many times the shortest."""


@dataclass(frozen=True, slots=True)
class Prefill:
    """One request with several query tokens."""

    start: int
    end: int
    slots: torch.Tensor  # int64 [seq_len]
    mask: torch.Tensor | None  # bool [query_len, seq_len]; None: plain causal


@dataclass(frozen=True, slots=True)
class DecodeGroup:
    """Requests with one query token each, padded to the longest."""

    rows: torch.Tensor  # int64 [group_size], flat token rows
    slots: torch.Tensor  # int64 [group_size * max_seq_len]
    mask: torch.Tensor  # bool [group_size, 1, 1, max_seq_len]


Plan = list[Prefill | DecodeGroup]


def make_plan(
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    block_tables: torch.Tensor,
    block_size: int,
) -> Plan:
    starts, lengths = query_start_loc.tolist(), seq_lens.tolist()
    plan: Plan = []
    decodes: list[int] = []
    for row, seq_len in enumerate(lengths):
        query_len = starts[row + 1] - starts[row]
        if query_len == 1:
            decodes.append(row)
        elif query_len > 1:
            plan.append(_prefill(starts[row], query_len, seq_len, block_tables[row], block_size))
    decodes.sort(key=lengths.__getitem__)
    while decodes:
        shortest = lengths[decodes[0]]
        size = sum(lengths[row] <= shortest * _PADDING_LIMIT for row in decodes)
        plan.append(_decode_group(decodes[:size], starts, lengths, block_tables, block_size))
        decodes = decodes[size:]
    return plan


def _prefill(
    start: int, query_len: int, seq_len: int, block_table: torch.Tensor, block_size: int
) -> Prefill:
    positions = torch.arange(seq_len)
    slots = block_table[positions // block_size].long() * block_size + positions % block_size
    mask = None
    if query_len < seq_len:
        mask = positions[None, :] <= positions[seq_len - query_len :, None]
    return Prefill(start, start + query_len, slots, mask)


def _decode_group(
    rows: list[int],
    starts: list[int],
    lengths: list[int],
    block_tables: torch.Tensor,
    block_size: int,
) -> DecodeGroup:
    seq_lens = torch.tensor([lengths[row] for row in rows])[:, None]
    positions = torch.arange(lengths[rows[-1]])[None, :]
    mask = positions < seq_lens  # [group_size, max_seq_len]
    positions = positions * mask
    blocks = block_tables[rows].gather(1, positions // block_size).long()
    slots = blocks * block_size + positions % block_size
    flat_rows = torch.tensor([starts[row] for row in rows])
    return DecodeGroup(flat_rows, slots.flatten(), mask[:, None, None, :])


def paged_attention(
    q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, plan: Plan, scale: float
) -> torch.Tensor:
    keys, values = k_cache.flatten(0, 1), v_cache.flatten(0, 1)  # [num_slots, kv_heads, head_dim]
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    for part in plan:
        if isinstance(part, Prefill):
            out[part.start : part.end] = _attend_prefill(q, keys, values, part, scale)
        else:
            out[part.rows] = _attend_decode(q, keys, values, part, scale)
    return out


def _attend_prefill(
    q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, part: Prefill, scale: float
) -> torch.Tensor:
    attended = F.scaled_dot_product_attention(
        q[part.start : part.end].transpose(0, 1)[None],  # [1, num_heads, query_len, head_dim]
        keys.index_select(0, part.slots).transpose(0, 1)[None],
        values.index_select(0, part.slots).transpose(0, 1)[None],
        attn_mask=part.mask,
        is_causal=part.mask is None,
        scale=scale,
        enable_gqa=True,
    )
    return attended[0].transpose(0, 1)


def _attend_decode(
    q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, part: DecodeGroup, scale: float
) -> torch.Tensor:
    num_rows, (num_heads, head_dim) = len(part.rows), q.shape[1:]
    kv_heads = keys.shape[1]
    shape = (num_rows, -1, kv_heads, head_dim)
    # The heads of a group become query rows of one KV head: far faster than enable_gqa here.
    attended = F.scaled_dot_product_attention(
        q[part.rows].view(num_rows, kv_heads, num_heads // kv_heads, head_dim),
        keys.index_select(0, part.slots).view(shape).transpose(1, 2),
        values.index_select(0, part.slots).view(shape).transpose(1, 2),
        attn_mask=part.mask,
        scale=scale,
    )
    return attended.reshape(num_rows, num_heads, head_dim)
