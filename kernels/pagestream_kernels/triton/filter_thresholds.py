"""Top-k, top-p and min-p on the GPU, as the least logit of each row that they leave: no sort.

One program per row narrows a bracket around the threshold to a quarter with every pass over the
row, by weighing what is above each of three pivots (as a count for top-k, as probability for
top-p). Passes end once a pivot fits exactly or one distinct logit is left in the bracket, usually
after five to ten. Rows without filters read nothing.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from pagestream_kernels.triton.vocabulary import load_logits

BLOCK = 4096
"""Logits that are weighed at a time."""
_NUM_WARPS = 16
_MAX_PASSES = 300
"""Far more than any bracket of float32 takes: a program ends whatever the logits are."""
_STAGES = tl.constexpr(4)
"""Blocks of logits that are read ahead: one program has the memory's latency to hide by itself."""


@triton.jit
def _range(row_ptr, VOCAB: tl.constexpr, BLOCK: tl.constexpr):
    """The greatest logit, the least above -inf, and how many are above -inf."""
    top = tl.full([BLOCK], float("-inf"), tl.float32)
    least = tl.full([BLOCK], float("inf"), tl.float32)
    count = tl.zeros([BLOCK], tl.int32)
    for start in tl.range(0, VOCAB, BLOCK, num_stages=_STAGES):
        x = load_logits(row_ptr, start + tl.arange(0, BLOCK), VOCAB)
        possible = x > float("-inf")
        top = tl.maximum(top, x)
        least = tl.minimum(least, tl.where(possible, x, float("inf")))
        count += possible.to(tl.int32)
    return tl.max(top, axis=0), tl.min(least, axis=0), tl.sum(count, axis=0)


@triton.jit
def _weight(x, top, temperature, BY_MASS: tl.constexpr):
    """1 for each logit, or its probability as a share of the top's."""
    return tl.exp((x - top) / temperature) if BY_MASS else tl.full(x.shape, 1.0, tl.float32)


@triton.jit
def _mass(row_ptr, least, top, temperature, VOCAB: tl.constexpr, BLOCK: tl.constexpr):
    """Of the logits from ``least`` up."""
    mass = tl.zeros([BLOCK], tl.float32)
    for start in tl.range(0, VOCAB, BLOCK, num_stages=_STAGES):
        x = load_logits(row_ptr, start + tl.arange(0, BLOCK), VOCAB)
        mass += tl.where(x >= least, _weight(x, top, temperature, True), 0.0)
    return tl.sum(mass, axis=0)


@triton.jit
def _search(
    row_ptr,
    target,
    low,
    top,
    temperature,
    BY_MASS: tl.constexpr,
    VOCAB: tl.constexpr,
    BLOCK: tl.constexpr,
    MAX_PASSES: tl.constexpr,
):
    """The greatest threshold that leaves a weight of ``target``; ``low`` is known to leave it."""
    high = top + tl.maximum(tl.abs(top), 1.0) * 1e-6  # leaves nothing
    searching, passes = True, 0
    while searching:
        quarter = (high - low) * 0.25
        a, b, c = low + quarter, low + 2.0 * quarter, low + 3.0 * quarter
        above_a = tl.zeros([BLOCK], tl.float32)
        above_b, above_c = above_a, above_a
        first = tl.full([BLOCK], float("inf"), tl.float32)
        last = tl.full([BLOCK], float("-inf"), tl.float32)
        for start in tl.range(0, VOCAB, BLOCK, num_stages=_STAGES):
            x = load_logits(row_ptr, start + tl.arange(0, BLOCK), VOCAB)
            weight = _weight(x, top, temperature, BY_MASS)
            above_a += tl.where(x >= a, weight, 0.0)
            above_b += tl.where(x >= b, weight, 0.0)
            above_c += tl.where(x >= c, weight, 0.0)
            inside = (x >= low) & (x < high)
            first = tl.minimum(first, tl.where(inside, x, float("inf")))
            last = tl.maximum(last, tl.where(inside, x, float("-inf")))
        at_a, at_b, at_c = tl.sum(above_a, axis=0), tl.sum(above_b, axis=0), tl.sum(above_c, axis=0)
        least, most = tl.min(first, axis=0), tl.max(last, axis=0)
        passes += 1
        searching = (least < most) & (passes < MAX_PASSES)
        if not BY_MASS:  # a mass may round to its target without what it lacks
            searching &= (at_a != target) & (at_b != target) & (at_c != target)
        high = tl.where(at_c < target, c, high)
        high = tl.where(at_b < target, b, high)
        high = tl.where(at_a < target, a, high)
        low = tl.maximum(low, least)  # there is nothing between them
        low = tl.maximum(low, tl.where(at_a >= target, a, low))
        low = tl.maximum(low, tl.where(at_b >= target, b, low))
        low = tl.maximum(low, tl.where(at_c >= target, c, low))
    return low


@triton.jit
def _filter_thresholds(
    logits_ptr,
    idx_mapping_ptr,
    temperature_ptr,
    top_k_ptr,
    top_p_ptr,
    min_p_ptr,
    out_ptr,
    row_stride,
    VOCAB: tl.constexpr,
    BLOCK: tl.constexpr,
    MAX_PASSES: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    state = tl.load(idx_mapping_ptr + row)
    temperature = tl.load(temperature_ptr + state)
    top_k, top_p = tl.load(top_k_ptr + state), tl.load(top_p_ptr + state)
    min_p = tl.load(min_p_ptr + state)
    threshold = tl.full([], float("-inf"), tl.float32)
    if (temperature > 0.0) & ((top_k < VOCAB) | (top_p < 1.0) | (min_p > 0.0)):
        row_ptr = logits_ptr + row * row_stride
        top, least, count = _range(row_ptr, VOCAB, BLOCK)
        if count > 0:
            threshold = least
            if min_p > 0.0:
                threshold = tl.maximum(threshold, top + temperature * tl.log(min_p))
            if top_k < count:
                wanted = tl.maximum(top_k, 1).to(tl.float32)
                of_count = _search(
                    row_ptr, wanted, least, top, 1.0, False, VOCAB, BLOCK, MAX_PASSES
                )
                threshold = tl.maximum(threshold, of_count)
            if top_p < 1.0:
                mass = _mass(row_ptr, threshold, top, temperature, VOCAB, BLOCK)
                wanted = tl.maximum(top_p * mass, 1.0)  # the top stays
                threshold = _search(
                    row_ptr, wanted, threshold, top, temperature, True, VOCAB, BLOCK, MAX_PASSES
                )
    tl.store(out_ptr + row, threshold)


def filter_thresholds(
    logits: torch.Tensor,
    idx_mapping: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
) -> torch.Tensor:
    num_rows, vocab_size = logits.shape
    out = logits.new_empty(num_rows, dtype=torch.float32)
    _filter_thresholds[(num_rows,)](
        *(logits, idx_mapping, temperature, top_k, top_p, min_p, out, logits.stride(0)),
        VOCAB=vocab_size,
        BLOCK=min(BLOCK, triton.next_power_of_2(vocab_size)),
        MAX_PASSES=_MAX_PASSES,
        num_warps=_NUM_WARPS,
    )
    return out
