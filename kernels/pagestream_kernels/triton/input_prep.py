"""Input preparation and state updates on the GPU: a program per request (or row, or write).

Where outputs are longer than the batch, as the persistent buffers of a CUDA graph are, one more
program fills the rest with padding. Prefix sums are recomputed by each program: a few hundred
cached integers cost less than another launch.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

_TOKENS = 1024
"""That one program handles at a time."""
_COLUMNS = 1024
"""Of a hidden state that one program copies."""
_SCAN = 1024


@triton.jit
def _sum_before(values_ptr, end, SCAN: tl.constexpr):
    """Sum of the first ``end`` values, int64."""
    total = tl.zeros([SCAN], tl.int64)
    for start in range(0, end, SCAN):
        index = start + tl.arange(0, SCAN)
        total += tl.load(values_ptr + index, mask=index < end, other=0).to(tl.int64)
    return tl.sum(total, axis=0)


@triton.jit(do_not_specialize=["num_reqs", "num_reqs_padded", "num_tokens_padded"])
def _prepare_inputs(
    idx_mapping_ptr,
    query_lens_ptr,
    token_ids_ptr,
    num_computed_tokens_ptr,
    block_tables_ptr,
    input_ids_ptr,
    positions_ptr,
    slot_mapping_ptr,
    query_start_loc_ptr,
    seq_lens_ptr,
    num_reqs,
    num_reqs_padded,
    num_tokens_padded,
    token_ids_stride,
    block_tables_stride,
    BLOCK_SIZE: tl.constexpr,
    ADVANCE: tl.constexpr,
    TOKENS: tl.constexpr,
    SCAN: tl.constexpr,
):
    req = tl.program_id(0)
    first = _sum_before(query_lens_ptr, tl.minimum(req, num_reqs), SCAN)
    tl.store(query_start_loc_ptr + req, first.to(tl.int32))
    if req < num_reqs:
        state = tl.load(idx_mapping_ptr + req).to(tl.int64)
        query_len = tl.load(query_lens_ptr + req).to(tl.int64)
        context_len = tl.load(num_computed_tokens_ptr + state).to(tl.int64)
        tl.store(seq_lens_ptr + req, (context_len + query_len).to(tl.int32))
        if ADVANCE:
            tl.store(num_computed_tokens_ptr + state, context_len + query_len)
        for start in range(0, query_len, TOKENS):
            offset = start + tl.arange(0, TOKENS)
            inside = offset < query_len
            position = context_len + offset
            token = tl.load(token_ids_ptr + state * token_ids_stride + position, mask=inside)
            block_at = state * block_tables_stride + position // BLOCK_SIZE
            block = tl.load(block_tables_ptr + block_at, mask=inside).to(tl.int64)
            slot = block * BLOCK_SIZE + position % BLOCK_SIZE
            tl.store(input_ids_ptr + first + offset, token.to(tl.int64), mask=inside)
            tl.store(positions_ptr + first + offset, position, mask=inside)
            tl.store(slot_mapping_ptr + first + offset, slot, mask=inside)
    elif req < num_reqs_padded:
        tl.store(seq_lens_ptr + req, 0)
    else:
        for start in range(first, num_tokens_padded, TOKENS):
            at = start + tl.arange(0, TOKENS)
            inside = at < num_tokens_padded
            tl.store(input_ids_ptr + at, tl.zeros([TOKENS], tl.int64), mask=inside)
            tl.store(positions_ptr + at, tl.zeros([TOKENS], tl.int64), mask=inside)
            tl.store(slot_mapping_ptr + at, tl.full([TOKENS], -1, tl.int64), mask=inside)


@triton.jit(do_not_specialize=["num_reqs", "num_rows_padded"])
def _gather_logits_rows(
    hidden_ptr,
    query_start_loc_ptr,
    idx_mapping_ptr,
    num_logits_ptr,
    positions_ptr,
    out_ptr,
    states_ptr,
    row_positions_ptr,
    num_reqs,
    num_rows_padded,
    WIDTH: tl.constexpr,
    COLUMNS: tl.constexpr,
    SCAN: tl.constexpr,
):
    req = tl.program_id(0)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = columns < WIDTH
    first = _sum_before(num_logits_ptr, tl.minimum(req, num_reqs), SCAN)
    if req < num_reqs:
        count = tl.load(num_logits_ptr + req).to(tl.int64)
        source = tl.load(query_start_loc_ptr + req + 1).to(tl.int64) - count
        state = tl.load(idx_mapping_ptr + req).to(tl.int64)
        for offset in range(0, count):
            copied = tl.load(hidden_ptr + (source + offset) * WIDTH + columns, mask=inside)
            tl.store(out_ptr + (first + offset) * WIDTH + columns, copied, mask=inside)
            if tl.program_id(1) == 0:
                tl.store(states_ptr + first + offset, state)
                position = tl.load(positions_ptr + source + offset) + 1
                tl.store(row_positions_ptr + first + offset, position)
    else:
        zero = tl.zeros([COLUMNS], out_ptr.dtype.element_ty)
        for row in range(first, num_rows_padded):
            tl.store(out_ptr + row * WIDTH + columns, zero, mask=inside)
            if tl.program_id(1) == 0:
                tl.store(states_ptr + row, -1)
                tl.store(row_positions_ptr + row, 0)


@triton.jit
def _append_tokens(states_ptr, positions_ptr, sampled_ptr, token_ids_ptr, token_ids_stride):
    row = tl.program_id(0)
    state = tl.load(states_ptr + row).to(tl.int64)
    if state >= 0:
        position = tl.load(positions_ptr + row).to(tl.int64)
        token = tl.maximum(tl.load(sampled_ptr + row), 0)
        tl.store(token_ids_ptr + state * token_ids_stride + position, token.to(tl.int32))


@triton.jit
def _staged_write(
    target_ptr,
    rows_ptr,
    starts_ptr,
    value_start_loc_ptr,
    values_ptr,
    target_stride,
    TOKENS: tl.constexpr,
):
    write = tl.program_id(0)
    row = tl.load(rows_ptr + write).to(tl.int64)
    start = tl.load(starts_ptr + write).to(tl.int64)
    first = tl.load(value_start_loc_ptr + write)
    length = tl.load(value_start_loc_ptr + write + 1) - first
    for low in range(0, length, TOKENS):
        offset = low + tl.arange(0, TOKENS)
        value = tl.load(values_ptr + first + offset, mask=offset < length)
        tl.store(target_ptr + row * target_stride + start + offset, value, mask=offset < length)


def prepare_inputs(
    idx_mapping: torch.Tensor,
    query_lens: torch.Tensor,
    token_ids: torch.Tensor,
    num_computed_tokens: torch.Tensor,
    block_tables: torch.Tensor,
    block_size: int,
    advance: bool,
    out: tuple[torch.Tensor, ...],
) -> None:
    """``out``: the fields of PreparedInputs, at least as long as the batch needs."""
    input_ids, seq_lens = out[0], out[4]
    _prepare_inputs[(len(seq_lens) + 1,)](
        idx_mapping,
        query_lens,
        token_ids,
        num_computed_tokens,
        block_tables,
        *out,
        len(idx_mapping),
        len(seq_lens),
        len(input_ids),
        token_ids.stride(0),
        block_tables.stride(0),
        BLOCK_SIZE=block_size,
        ADVANCE=advance,
        TOKENS=_TOKENS,
        SCAN=_SCAN,
    )


def gather_logits_rows(
    hidden: torch.Tensor,
    query_start_loc: torch.Tensor,
    idx_mapping: torch.Tensor,
    num_logits: torch.Tensor,
    positions: torch.Tensor,
    out: tuple[torch.Tensor, ...],
) -> None:
    """``out``: the fields of LogitsRows, at least as long as the batch needs."""
    num_reqs, width = len(idx_mapping), hidden.shape[1]
    columns = min(_COLUMNS, triton.next_power_of_2(width))
    _gather_logits_rows[(num_reqs + 1, triton.cdiv(width, columns))](
        hidden.contiguous(),
        query_start_loc,
        idx_mapping,
        num_logits,
        positions,
        *out,
        num_reqs,
        len(out[0]),
        WIDTH=width,
        COLUMNS=columns,
        SCAN=_SCAN,
    )


def append_tokens(
    states: torch.Tensor, positions: torch.Tensor, sampled: torch.Tensor, token_ids: torch.Tensor
) -> None:
    _append_tokens[(len(states),)](
        *(states, positions, sampled, token_ids, token_ids.stride(0)), num_warps=1
    )


def staged_write(
    target: torch.Tensor,
    rows: torch.Tensor,
    starts: torch.Tensor,
    value_start_loc: torch.Tensor,
    values: torch.Tensor,
) -> None:
    _staged_write[(len(rows),)](
        target,
        rows,
        starts,
        value_start_loc,
        values,
        target.stride(0),
        TOKENS=_TOKENS,
    )
