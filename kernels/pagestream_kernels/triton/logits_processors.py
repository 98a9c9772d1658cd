"""Processors of logits rows on the GPU, all in place: masks, bans, biases, penalties.

Of many tokens (a mask, the penalties) in chunks of the row, a program each; of few (listed ids) by
one program per row. Only logits that change are written.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from pagestream_kernels.triton.vocabulary import NUM_WARPS, chunk_size, load_logits

_IDS = 128
"""Of a row's list that are handled at a time."""
_ENDING = 64
"""Tokens of an ending that are compared at a time."""


@triton.jit
def _row_and_state(rows_ptr, idx_mapping_ptr):
    """Of this program: int64 logits row, int64 state row. None: row i is i, state of row i is i."""
    row = tl.program_id(0).to(tl.int64)
    if rows_ptr is not None:
        row = tl.load(rows_ptr + row).to(tl.int64)
    state = row
    if idx_mapping_ptr is not None:
        state = tl.load(idx_mapping_ptr + row).to(tl.int64)
    return row, state


@triton.jit
def _apply_bitmask(
    logits_ptr,
    bitmask_ptr,
    rows_ptr,
    idx_mapping_ptr,
    row_stride,
    bitmask_stride,
    VOCAB: tl.constexpr,
    WORDS: tl.constexpr,
):
    row, state = _row_and_state(rows_ptr, idx_mapping_ptr)
    word = tl.program_id(1) * WORDS + tl.arange(0, WORDS)
    tokens = word[:, None] * 32 + tl.arange(0, 32)[None, :]
    inside = word * 32 < VOCAB
    allowed = tl.load(bitmask_ptr + state * bitmask_stride + word, mask=inside, other=-1)
    forbidden = ((allowed[:, None] >> tl.arange(0, 32)[None, :]) & 1) == 0
    nothing = tl.full([WORDS, 32], float("-inf"), tl.float32)
    at = logits_ptr + row * row_stride + tokens
    tl.store(at, nothing, mask=forbidden & (tokens < VOCAB))


@triton.jit(do_not_specialize=["endings_stride", "length"])
def _ban_endings(
    logits_ptr,
    rows_ptr,
    idx_mapping_ptr,
    positions_ptr,
    token_ids_ptr,
    endings_ptr,
    row_stride,
    token_ids_stride,
    endings_stride,
    length,
    BLOCK: tl.constexpr,
):
    row, state = _row_and_state(rows_ptr, idx_mapping_ptr)
    ending_ptr = endings_ptr + state * endings_stride + tl.program_id(1) * length
    banned = tl.load(ending_ptr)
    if banned >= 0:
        position = tl.load(positions_ptr + row)
        differ = tl.zeros([BLOCK], tl.int32)
        for start in range(1, length, BLOCK):
            before = start + tl.arange(0, BLOCK)
            wanted = tl.load(ending_ptr + before, mask=before < length, other=-1)
            at = position - before
            found_at = token_ids_ptr + state * token_ids_stride + at
            found = tl.load(found_at, mask=(wanted >= 0) & (at >= 0), other=-1)
            differ |= ((wanted >= 0) & (wanted != found)).to(tl.int32)
        if tl.max(differ, axis=0) == 0:
            tl.store(logits_ptr + row * row_stride + banned, float("-inf"))


@triton.jit(do_not_specialize=["width"])
def _ban_stop_tokens(
    logits_ptr,
    rows_ptr,
    idx_mapping_ptr,
    stop_ids_ptr,
    row_stride,
    width,
    VOCAB: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row, state = _row_and_state(rows_ptr, idx_mapping_ptr)
    row_ptr, ids_ptr = logits_ptr + row * row_stride, stop_ids_ptr + state * width
    stops = tl.zeros([], tl.int32)  # that are possible
    for start in range(0, width, BLOCK):
        index = start + tl.arange(0, BLOCK)
        ids = tl.load(ids_ptr + index, mask=index < width, other=-1)
        x = tl.load(row_ptr + ids, mask=ids >= 0, other=float("-inf"))
        stops += tl.sum((x > float("-inf")).to(tl.int32), axis=0)
    possible, start = tl.zeros([], tl.int32), tl.zeros([], tl.int32)
    while (start < VOCAB) & (possible <= stops):
        x = load_logits(row_ptr, start + tl.arange(0, CHUNK), VOCAB)
        possible += tl.sum((x > float("-inf")).to(tl.int32), axis=0)
        start += CHUNK
    if possible > stops:
        nothing = tl.full([BLOCK], float("-inf"), tl.float32)
        for start in range(0, width, BLOCK):
            index = start + tl.arange(0, BLOCK)
            ids = tl.load(ids_ptr + index, mask=index < width, other=-1)
            tl.store(row_ptr + ids, nothing, mask=ids >= 0)


@triton.jit(do_not_specialize=["width"])
def _add_bias(
    logits_ptr,
    rows_ptr,
    idx_mapping_ptr,
    bias_ids_ptr,
    bias_values_ptr,
    row_stride,
    width,
    BLOCK: tl.constexpr,
):
    row, state = _row_and_state(rows_ptr, idx_mapping_ptr)
    row_ptr = logits_ptr + row * row_stride
    for start in range(0, width, BLOCK):
        index = start + tl.arange(0, BLOCK)
        ids = tl.load(bias_ids_ptr + state * width + index, mask=index < width, other=-1)
        value = tl.load(bias_values_ptr + state * width + index, mask=ids >= 0, other=0.0)
        x = tl.load(row_ptr + ids, mask=ids >= 0, other=0.0)
        tl.store(row_ptr + ids, x + value, mask=ids >= 0)


@triton.jit
def _apply_penalties(
    logits_ptr,
    rows_ptr,
    idx_mapping_ptr,
    in_prompt_ptr,
    output_counts_ptr,
    repetition_ptr,
    presence_ptr,
    frequency_ptr,
    row_stride,
    VOCAB: tl.constexpr,
    CHUNK: tl.constexpr,
):
    row, state = _row_and_state(rows_ptr, idx_mapping_ptr)
    tokens = tl.program_id(1) * CHUNK + tl.arange(0, CHUNK)
    inside = tokens < VOCAB
    counts = tl.load(output_counts_ptr + state * VOCAB + tokens, mask=inside, other=0)
    in_output = counts > 0
    in_prompt = tl.load(in_prompt_ptr + state * VOCAB + tokens, mask=inside, other=0) != 0
    seen = in_prompt | in_output
    at = logits_ptr + row * row_stride + tokens
    x = tl.load(at, mask=seen, other=0.0)
    repetition = tl.load(repetition_ptr + state)
    x = tl.where(x > 0.0, x / repetition, x * repetition)
    x -= tl.load(presence_ptr + state) * in_output.to(tl.float32)
    x -= tl.load(frequency_ptr + state) * counts.to(tl.float32)
    tl.store(at, x, mask=seen)


@triton.jit
def _count_tokens(output_counts_ptr, rows_ptr, idx_mapping_ptr, token_ids_ptr, counts_stride):
    row, state = _row_and_state(rows_ptr, idx_mapping_ptr)
    token = tl.maximum(tl.load(token_ids_ptr + row), 0)
    tl.atomic_add(output_counts_ptr + state * counts_stride + token, 1, sem="relaxed")


def apply_bitmask(
    logits: torch.Tensor,
    bitmask: torch.Tensor,
    rows: torch.Tensor | None,
    idx_mapping: torch.Tensor | None,
) -> None:
    num_rows, vocab_size = len(logits) if rows is None else len(rows), logits.shape[1]
    words = triton.cdiv(chunk_size(vocab_size), 32)
    _apply_bitmask[(num_rows, triton.cdiv(vocab_size, words * 32))](
        *(logits, bitmask, rows, idx_mapping, logits.stride(0), bitmask.stride(0)),
        VOCAB=vocab_size,
        WORDS=words,
        num_warps=NUM_WARPS,
    )


def ban_endings(
    logits: torch.Tensor,
    rows: torch.Tensor,
    idx_mapping: torch.Tensor,
    positions: torch.Tensor,
    token_ids: torch.Tensor,
    endings: torch.Tensor,
) -> None:
    _, num_endings, length = endings.shape
    _ban_endings[(len(rows), num_endings)](
        *(logits, rows, idx_mapping, positions, token_ids, endings),
        *(logits.stride(0), token_ids.stride(0), endings.stride(0), length),
        BLOCK=_ENDING,
        num_warps=1,
    )


def ban_stop_tokens(
    logits: torch.Tensor, rows: torch.Tensor, idx_mapping: torch.Tensor, stop_ids: torch.Tensor
) -> None:
    vocab_size = logits.shape[1]
    _ban_stop_tokens[(len(rows),)](
        *(logits, rows, idx_mapping, stop_ids, logits.stride(0), stop_ids.shape[1]),
        VOCAB=vocab_size,
        CHUNK=chunk_size(vocab_size),
        BLOCK=_IDS,
        num_warps=NUM_WARPS,
    )


def add_bias(
    logits: torch.Tensor,
    rows: torch.Tensor,
    idx_mapping: torch.Tensor,
    bias_ids: torch.Tensor,
    bias_values: torch.Tensor,
) -> None:
    _add_bias[(len(rows),)](
        *(logits, rows, idx_mapping, bias_ids, bias_values, logits.stride(0), bias_ids.shape[1]),
        BLOCK=_IDS,
        num_warps=NUM_WARPS,
    )


def apply_penalties(
    logits: torch.Tensor,
    rows: torch.Tensor,
    idx_mapping: torch.Tensor,
    in_prompt: torch.Tensor,
    output_counts: torch.Tensor,
    repetition: torch.Tensor,
    presence: torch.Tensor,
    frequency: torch.Tensor,
) -> None:
    vocab_size = logits.shape[1]
    chunk = chunk_size(vocab_size)
    _apply_penalties[(len(rows), triton.cdiv(vocab_size, chunk))](
        *(logits, rows, idx_mapping, in_prompt, output_counts),
        *(repetition, presence, frequency, logits.stride(0)),
        VOCAB=vocab_size,
        CHUNK=chunk,
        num_warps=NUM_WARPS,
    )


def count_tokens(
    output_counts: torch.Tensor,
    rows: torch.Tensor,
    idx_mapping: torch.Tensor,
    token_ids: torch.Tensor,
) -> None:
    _count_tokens[(len(rows),)](
        *(output_counts, rows, idx_mapping, token_ids, output_counts.stride(0)), num_warps=1
    )
