"""One token per row on the GPU: the best, or a draw by the Gumbel-max trick, without a softmax.

Each chunk of a row finds its own best from its own maximum downwards, so that the logits are read
once; one program per row then compares the chunks' bests. The noise is that of the twin, bit by
bit up to its two logarithms: a draw depends on its row's key alone, not on the device.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from pagestream_kernels.triton.vocabulary import NUM_WARPS, chunk_size, finite, load_logits


@triton.jit
def _mix(x):
    """The 32-bit finalizer "lowbias32" (Wellons, 2018), on uint32."""
    x = (x ^ (x >> 16)) * 0x7FEB352D
    x = (x ^ (x >> 15)) * 0x846CA68B
    return x ^ (x >> 16)


@triton.jit
def _uniform(seed, position, tokens):
    """float32 in (0, 1), as ``reference.uniforms``."""
    salt = tl.full([], 0x9E3779B9, tl.uint32)
    key = _mix(_mix(seed.to(tl.uint32) + salt) ^ (seed >> 32).to(tl.uint32))
    key = _mix(key ^ _mix(position.to(tl.uint32) + salt))
    bits = _mix(_mix(tokens.to(tl.uint32) ^ key) + key)
    # bits + 0.5 in float32, rounded once: neither half of it needs rounding.
    halves = (bits >> 16).to(tl.float32) * 65536.0 + ((bits & 0xFFFF).to(tl.float32) + 0.5)
    return tl.minimum(halves * (1.0 / 4294967296.0), 1.0 - 1.0 / 16777216.0)


@triton.jit
def _gumbel(u):
    """-log(-log(1 - u)). 1 - u is rounded; the quotient takes that back (Kahan's log1p)."""
    rest = 1.0 - u
    lost = tl.where(rest == 1.0, -1.0, rest - 1.0)
    return -tl.log(tl.where(rest == 1.0, u, tl.log(rest) * (u / lost)))


@triton.jit
def _best_of_chunk(
    logits_ptr,
    idx_mapping_ptr,
    positions_ptr,
    temperature_ptr,
    seeds_ptr,  # None: no row is drawn
    thresholds_ptr,  # None: no row is filtered
    tops_ptr,
    scores_ptr,
    tokens_ptr,
    row_stride,
    VOCAB: tl.constexpr,
    CHUNK: tl.constexpr,
):
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    tokens = chunk * CHUNK + tl.arange(0, CHUNK)
    x = load_logits(logits_ptr + row * row_stride, tokens, VOCAB)
    if thresholds_ptr is not None:
        x = tl.where(x >= tl.load(thresholds_ptr + row), x, float("-inf"))
    top = tl.max(x, axis=0)
    score = x - finite(top)
    if seeds_ptr is not None:
        state = tl.load(idx_mapping_ptr + row)
        temperature = tl.load(temperature_ptr + state)
        if (temperature > 0.0) & (top > float("-inf")):
            u = _uniform(tl.load(seeds_ptr + state), tl.load(positions_ptr + row), tokens)
            score = score / temperature + _gumbel(u)
    best, index = tl.max(score, axis=0, return_indices=True)
    at = row * tl.num_programs(1) + chunk
    tl.store(tops_ptr + at, top)
    tl.store(scores_ptr + at, best)
    tl.store(tokens_ptr + at, chunk * CHUNK + index)


@triton.jit
def _best_of_row(
    tops_ptr,
    scores_ptr,
    tokens_ptr,
    idx_mapping_ptr,
    temperature_ptr,  # None: no row is drawn
    out_ptr,
    NUM_CHUNKS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.arange(0, BLOCK)
    at, inside = row * NUM_CHUNKS + chunk, chunk < NUM_CHUNKS
    tops = tl.load(tops_ptr + at, mask=inside, other=float("-inf"))
    top = tl.max(tops, axis=0)
    score = tops - finite(top)
    if temperature_ptr is not None:
        temperature = tl.load(temperature_ptr + tl.load(idx_mapping_ptr + row))
        if temperature > 0.0:
            within = tl.load(scores_ptr + at, mask=inside, other=0.0)
            score = score / temperature + finite(within)
    _, index = tl.max(score, axis=0, return_indices=True)
    token = tl.load(tokens_ptr + row * NUM_CHUNKS + index)
    tl.store(out_ptr + row, tl.where(top > float("-inf"), token, -1).to(tl.int64))


def argmax_tokens(logits: torch.Tensor) -> torch.Tensor:
    return gumbel_argmax(logits, None, None, None, None, None)


def gumbel_argmax(
    logits: torch.Tensor,
    idx_mapping: torch.Tensor | None,
    positions: torch.Tensor | None,
    temperature: torch.Tensor | None,
    seeds: torch.Tensor | None,
    thresholds: torch.Tensor | None,
) -> torch.Tensor:
    num_rows, vocab_size = logits.shape
    chunk = chunk_size(vocab_size)
    num_chunks = triton.cdiv(vocab_size, chunk)
    tops = logits.new_empty((num_rows, num_chunks), dtype=torch.float32)
    scores = logits.new_empty((num_rows, num_chunks), dtype=torch.float32)
    tokens = logits.new_empty((num_rows, num_chunks), dtype=torch.int32)
    out = logits.new_empty(num_rows, dtype=torch.int64)
    _best_of_chunk[(num_rows, num_chunks)](
        *(logits, idx_mapping, positions, temperature, seeds, thresholds, tops, scores, tokens),
        logits.stride(0),
        VOCAB=vocab_size,
        CHUNK=chunk,
        num_warps=NUM_WARPS,
    )
    _best_of_row[(num_rows,)](
        *(tops, scores, tokens, idx_mapping, temperature, out),
        NUM_CHUNKS=num_chunks,
        BLOCK=triton.next_power_of_2(num_chunks),
        num_warps=1,
    )
    return out
