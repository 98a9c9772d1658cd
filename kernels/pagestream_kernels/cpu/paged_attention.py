"""Paged attention on CPU: torch's fused attention over gathered keys and values, and native.cpp.

Each prefill is one call of torch's. Requests of one query token are native.cpp's, which reads their
blocks where they lie; without it, those of similar length share one call of torch's. Positions past
a request's end are then filled from its own first slot, which is always written, and masked: an
unowned slot is never read, so whatever it holds cannot leak (0 * NaN is NaN).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
import torch.nn.functional as F

from pagestream_kernels.cpu import native

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


@dataclass(frozen=True)
class Decodes:
    """All requests with one query token each."""

    rows: torch.Tensor  # int64 [num_decodes], flat token rows
    seq_lens: torch.Tensor  # int64 [num_decodes]
    block_tables: torch.Tensor  # int32 [num_decodes, width]
    block_size: int

    @cached_property
    def groups(self) -> list[DecodeGroup]:
        """By similar length."""
        lengths, rows = self.seq_lens.tolist(), self.rows.tolist()
        order = sorted(range(len(rows)), key=lengths.__getitem__)
        groups = []
        while order:
            shortest = lengths[order[0]]
            size = sum(lengths[index] <= shortest * _PADDING_LIMIT for index in order)
            groups.append(self._group(order[:size], rows, lengths))
            order = order[size:]
        return groups

    def _group(self, chosen: list[int], rows: list[int], lengths: list[int]) -> DecodeGroup:
        seq_lens = self.seq_lens[chosen][:, None]
        positions = torch.arange(lengths[chosen[-1]])[None, :]
        mask = positions < seq_lens  # [group_size, max_seq_len]
        positions = positions * mask
        blocks = self.block_tables[chosen].gather(1, positions // self.block_size).long()
        slots = blocks * self.block_size + positions % self.block_size
        flat_rows = torch.tensor([rows[index] for index in chosen])
        return DecodeGroup(flat_rows, slots.flatten(), mask[:, None, None, :])


@dataclass(frozen=True, slots=True)
class Plan:
    prefills: list[Prefill]
    decodes: Decodes | None


def make_plan(
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    block_tables: torch.Tensor,
    block_size: int,
) -> Plan:
    starts, lengths = query_start_loc.tolist(), seq_lens.tolist()
    prefills, decodes = [], []
    for row, seq_len in enumerate(lengths):
        query_len = starts[row + 1] - starts[row]
        if query_len == 1:
            decodes.append(row)
        elif query_len > 1:
            prefills.append(
                _prefill(starts[row], query_len, seq_len, block_tables[row], block_size)
            )
    if not decodes:
        return Plan(prefills, None)
    rows = torch.tensor([starts[row] for row in decodes])
    if len(decodes) < len(lengths):
        seq_lens, block_tables = seq_lens[decodes], block_tables[decodes]
    return Plan(prefills, Decodes(rows, seq_lens.long(), block_tables, block_size))


def _prefill(
    start: int, query_len: int, seq_len: int, block_table: torch.Tensor, block_size: int
) -> Prefill:
    positions = torch.arange(seq_len)
    slots = block_table[positions // block_size].long() * block_size + positions % block_size
    mask = None
    if query_len < seq_len:
        mask = positions[None, :] <= positions[seq_len - query_len :, None]
    return Prefill(start, start + query_len, slots, mask)


def paged_attention(
    q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, plan: Plan, scale: float
) -> torch.Tensor:
    keys, values = k_cache.flatten(0, 1), v_cache.flatten(0, 1)  # [num_slots, kv_heads, head_dim]
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    for prefill in plan.prefills:
        out[prefill.start : prefill.end] = _attend_prefill(q, keys, values, prefill, scale)
    decodes = plan.decodes
    if decodes is None:
        return out
    if native.takes(q, k_cache, v_cache):
        native.decode_attention(
            *(q, k_cache, v_cache, out, decodes.rows, decodes.seq_lens, decodes.block_tables),
            scale,
        )
        return out
    for group in decodes.groups:
        out[group.rows] = _attend_decode(q, keys, values, group, scale)
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
