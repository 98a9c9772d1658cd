"""Paged attention on the GPU: one varlen kernel, launched in two shapes.

A program attends with one KV head for BLOCK_Q query tokens of one request. Its rows are (query
token, query head of the group) pairs, so that any group size fills the matrix units.

- Decode shape, for requests of few query tokens (plain decode, drafts to verify): one block of
  16 to 64 rows per request, the sequence split over programs where there are few, then combined.
- Prefill shape, for the others: blocks of up to 128 rows, found by bisection in query_start_loc.

A batch that mixes both is launched in both, and each skips the other's requests. A tile of keys
lies within one block of the cache. Its block id is loaded an iteration ahead and carried: a table
lookup inside the loop would halve the tiles that the compiler keeps in flight.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl

from pagestream_kernels.triton.attention_settings import (
    MIN_KEYS,
    decode_rows,
    decode_settings,
    fits_decode,
    num_splits,
    prefill_settings,
)
from pagestream_kernels.triton.attention_tiles import MASKED, attend, tile_range
from pagestream_kernels.triton.device import current_device

_MIN_KEYS = tl.constexpr(MIN_KEYS)


@triton.jit
def _request_of(query_start_loc_ptr, block, num_reqs, BLOCK_Q: tl.constexpr):
    """The request of a query block, where request r has the blocks from start_r // BLOCK_Q + r."""
    low, high = 0, num_reqs
    while low < high:
        middle = (low + high) // 2
        if tl.load(query_start_loc_ptr + middle) // BLOCK_Q + middle <= block:
            low = middle + 1
        else:
            high = middle
    return low - 1


@triton.jit
def _query_block(query_start_loc_ptr, num_reqs, BLOCK_Q: tl.constexpr, PREFILL: tl.constexpr):
    """What this program works on: the request, its start and length, the block's first query."""
    block, first = tl.program_id(0), 0
    request = block
    if PREFILL:
        # From the end: the last blocks of a prompt see most keys and should not start last.
        block = tl.num_programs(0) - 1 - block
        request = _request_of(query_start_loc_ptr, block, num_reqs, BLOCK_Q)
    start = tl.load(query_start_loc_ptr + request)
    query_len = tl.load(query_start_loc_ptr + request + 1) - start
    if PREFILL:
        first = (block - start // BLOCK_Q - request) * BLOCK_Q
    return request, start, query_len, first


@triton.jit
def _tiles_per_split(num_tiles, splits, TILE: tl.constexpr):
    return tl.maximum(tl.cdiv(num_tiles, splits), _MIN_KEYS // TILE)


@triton.jit
def _store(
    state,
    token,  # int64 [ROWS]
    head,  # [ROWS]
    real,  # [ROWS], rows that stand for a query
    num_heads,
    out_ptr,
    partial_ptr,
    lse_ptr,
    block,  # int64, this program's number among all that store partial results
    HEAD_DIM: tl.constexpr,
):
    """The result of each row, or what one split knows of it with its log2-sum-exp."""
    acc, top, total = state
    ROWS: tl.constexpr = acc.shape[0]
    dims = tl.arange(0, acc.shape[1])
    inside = real[:, None] & (dims < HEAD_DIM)[None, :]
    result = acc / tl.maximum(total, 1e-30)[:, None]
    if partial_ptr is None:
        at = out_ptr + (token * num_heads + head)[:, None] * HEAD_DIM + dims[None, :]
        tl.store(at, result.to(out_ptr.dtype.element_ty), mask=inside)
    else:
        row = block * ROWS + tl.arange(0, ROWS)
        tl.store(partial_ptr + row[:, None] * HEAD_DIM + dims[None, :], result, mask=inside)
        tl.store(lse_ptr + row, top + tl.log2(total), mask=real)


@triton.jit(do_not_specialize=["num_reqs", "shortest"])
def _attend(
    q_ptr,
    k_ptr,
    v_ptr,
    out_ptr,
    partial_ptr,  # float32 [num_reqs, kv_heads, splits, ROWS, head_dim]; None: not split
    lse_ptr,  # float32 [num_reqs, kv_heads, splits, ROWS]
    lengths,  # query_start_loc_ptr, seq_lens_ptr, block_tables_ptr, idx_mapping_ptr or None
    num_reqs,
    shortest,  # queries per request: those with fewer are another launch's
    scoring,
    strides,  # of a token of q, a row of block_tables, a block of the cache
    SLOT_STRIDE: tl.constexpr,
    HEAD_STRIDE: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PAGE: tl.constexpr,
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
    DIM: tl.constexpr,
    PREFILL: tl.constexpr,
):
    BLOCK_Q: tl.constexpr = ROWS // GROUP
    kv_head, split = tl.program_id(1), tl.program_id(2)
    kv_heads, splits = tl.num_programs(1), tl.num_programs(2)
    query_start_loc_ptr, seq_lens_ptr, table_ptr, idx_mapping_ptr = lengths
    request, start, query_len, first = _query_block(query_start_loc_ptr, num_reqs, BLOCK_Q, PREFILL)
    if (first >= query_len) | (query_len < shortest) | (query_len > BLOCK_Q and not PREFILL):
        return
    seq_len = tl.load(seq_lens_ptr + request)
    first_position = seq_len - query_len + first
    last_position = tl.minimum(first_position + BLOCK_Q, seq_len) - 1
    low, high = tile_range(first_position, last_position, scoring[2], TILE)
    if partial_ptr is not None:
        share = _tiles_per_split(high - low, splits, TILE)
        low += split * share
        high = tl.minimum(low + share, high)
        if low >= high:
            return
    row, dims = tl.arange(0, ROWS), tl.arange(0, DIM)
    query, head = first + row // GROUP, kv_head * GROUP + row % GROUP
    real = (row < BLOCK_Q * GROUP) & (query < query_len)
    token = (start + query).to(tl.int64)
    q_at = q_ptr + token[:, None] * strides[0] + head[:, None] * HEAD_DIM + dims[None, :]
    q = tl.load(q_at, mask=real[:, None] & (dims < HEAD_DIM)[None, :], other=0.0)
    table_row = request if idx_mapping_ptr is None else tl.load(idx_mapping_ptr + request)
    table_ptr += table_row.to(tl.int64) * strides[1]
    k_ptr, v_ptr = k_ptr + kv_head * HEAD_STRIDE, v_ptr + kv_head * HEAD_STRIDE
    state = attend(
        *(q, first_position + row // GROUP, first_position, last_position, low, high),
        *((k_ptr, v_ptr, table_ptr, strides[2]), scoring),
        *(SLOT_STRIDE, HEAD_DIM, PAGE, TILE, PREFILL),
    )
    program = (request.to(tl.int64) * kv_heads + kv_head) * splits + split
    pointers = (out_ptr, partial_ptr, lse_ptr)
    _store(state, token, head, real, kv_heads * GROUP, *pointers, program, HEAD_DIM)


@triton.jit
def _combine(
    partial_ptr,
    lse_ptr,
    out_ptr,
    query_start_loc_ptr,
    seq_lens_ptr,
    window,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    SPLITS: tl.constexpr,
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
    DIM: tl.constexpr,
):
    """One row's splits, weighted by their sums of exponentials."""
    request, query, head = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    num_heads = tl.num_programs(2)
    start = tl.load(query_start_loc_ptr + request)
    query_len = tl.load(query_start_loc_ptr + request + 1) - start
    if (query >= query_len) | (query_len > ROWS // GROUP):
        return
    seq_len = tl.load(seq_lens_ptr + request)
    low, high = tile_range(seq_len - query_len, seq_len - 1, window, TILE)
    splits, dims = tl.arange(0, SPLITS), tl.arange(0, DIM)
    used = splits < tl.cdiv(high - low, _tiles_per_split(high - low, SPLITS, TILE))
    program = (request.to(tl.int64) * (num_heads // GROUP) + head // GROUP) * SPLITS + splits
    row = program * ROWS + query * GROUP + head % GROUP  # [SPLITS]
    lse = tl.load(lse_ptr + row, mask=used, other=MASKED)
    weights = tl.exp2(lse - tl.max(lse, axis=0))
    in_head = dims < HEAD_DIM
    at = partial_ptr + row[:, None] * HEAD_DIM + dims[None, :]
    partial = tl.load(at, mask=used[:, None] & in_head[None, :], other=0.0)
    result = tl.sum(partial * weights[:, None], axis=0) / tl.maximum(tl.sum(weights, axis=0), 1e-30)
    to = out_ptr + ((start + query).to(tl.int64) * num_heads + head) * HEAD_DIM + dims
    tl.store(to, result.to(out_ptr.dtype.element_ty), mask=in_head)


def paged_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    block_tables: torch.Tensor,
    idx_mapping: torch.Tensor | None,
    max_query_len: int,
    scale: float,
    window: int | None,
    soft_cap: float | None,
) -> torch.Tensor:
    """As the public op; ``max_query_len`` bounds the query tokens of one request."""
    page, kv_heads, head_dim = k_cache.shape[1:]
    group, num_reqs, device = q.shape[1] // kv_heads, len(seq_lens), current_device()
    key = (device.capability, head_dim, q.element_size(), page)
    out = q.new_empty(q.shape)
    lengths = (query_start_loc, seq_lens, block_tables, idx_mapping)
    scoring = (scale if soft_cap else scale * math.log2(math.e), soft_cap or None, window)
    if not fits_decode(group, max_query_len, q.element_size()):
        settings = prefill_settings(*key, group)
        grid = (len(q) // (settings["ROWS"] // group) + num_reqs, kv_heads, 1)
        max_query_len = decode_rows(group, 1) // group  # of those left to a decode launch
        shortest = max_query_len + 1 if num_reqs > 1 else 1
        _launch(grid, q, k_cache, v_cache, (out, None, None), lengths, shortest, scoring, settings)
        if num_reqs == 1:
            return out
    settings = decode_settings(*key, decode_rows(group, max_query_len))
    splits = num_splits(num_reqs * kv_heads, device.num_sms, block_tables.shape[1] * page)
    grid = (num_reqs, kv_heads, splits)
    partial, lse = _partial_results((*grid, settings["ROWS"]), q) if splits > 1 else (None, None)
    _launch(grid, q, k_cache, v_cache, (out, partial, lse), lengths, 1, scoring, settings)
    if splits > 1:
        _combine[(num_reqs, max_query_len, q.shape[1])](
            *(partial, lse, out, query_start_loc, seq_lens, window),
            *(group, head_dim, splits, settings["ROWS"], settings["TILE"]),
            triton.next_power_of_2(head_dim),
        )
    return out


def _partial_results(shape: tuple[int, ...], q: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """For each of ``shape`` = (num_reqs, kv_heads, splits, rows): a result, its log2-sum-exp."""
    return (
        q.new_empty((*shape, q.shape[2]), dtype=torch.float32),
        q.new_empty(shape, dtype=torch.float32),
    )


def _launch(
    grid: tuple[int, int, int],
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    outputs: tuple[torch.Tensor | None, ...],
    lengths: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None],
    shortest: int,
    scoring: tuple[float, float | None, int | None],
    settings: dict[str, int],
) -> None:
    _, seq_lens, block_tables, _ = lengths
    page, kv_heads, head_dim = k_cache.shape[1:]
    if q.stride()[1:] != (head_dim, 1):
        raise ValueError("the heads of a token must lie side by side in q")
    if k_cache.stride() != v_cache.stride() or k_cache.stride(3) != 1:
        raise ValueError("k_cache and v_cache must be laid out alike, head_dim innermost")
    _attend[grid](
        *(q, k_cache, v_cache, *outputs, lengths, len(seq_lens), shortest, scoring),
        (q.stride(0), block_tables.stride(0), k_cache.stride(0)),
        SLOT_STRIDE=k_cache.stride(1),
        HEAD_STRIDE=k_cache.stride(2),
        GROUP=q.shape[1] // kv_heads,
        HEAD_DIM=head_dim,
        PAGE=page,
        DIM=triton.next_power_of_2(head_dim),
        **settings,
    )
