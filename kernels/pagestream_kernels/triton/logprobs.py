"""Log-probabilities on the GPU: the normaliser of each row in one pass, and its token's rank.

No log-softmax of the vocabulary is ever stored: the best tokens are torch's top-k of the logits
themselves, less the normaliser.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from pagestream_kernels.triton.vocabulary import NUM_WARPS, chunk_size, finite, load_logits


@triton.jit
def _sums_of_chunk(
    logits_ptr,
    token_ids_ptr,
    tops_ptr,
    sums_ptr,
    counts_ptr,
    row_stride,
    VOCAB: tl.constexpr,
    CHUNK: tl.constexpr,
):
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    row_ptr = logits_ptr + row * row_stride
    x = load_logits(row_ptr, chunk * CHUNK + tl.arange(0, CHUNK), VOCAB)
    chosen = tl.load(row_ptr + tl.load(token_ids_ptr + row)).to(tl.float32)
    top = tl.max(x, axis=0)
    at = row * tl.num_programs(1) + chunk
    tl.store(tops_ptr + at, top)
    tl.store(sums_ptr + at, tl.sum(tl.exp(x - finite(top)), axis=0))
    tl.store(counts_ptr + at, tl.sum((x > chosen).to(tl.int32), axis=0))


@triton.jit
def _sums_of_row(
    logits_ptr,
    token_ids_ptr,
    tops_ptr,
    sums_ptr,
    counts_ptr,
    normalisers_ptr,
    logprobs_ptr,
    ranks_ptr,
    row_stride,
    NUM_CHUNKS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.arange(0, BLOCK)
    at, inside = row * NUM_CHUNKS + chunk, chunk < NUM_CHUNKS
    tops = tl.load(tops_ptr + at, mask=inside, other=float("-inf"))
    sums = tl.load(sums_ptr + at, mask=inside, other=0.0)
    counts = tl.load(counts_ptr + at, mask=inside, other=0)
    top = tl.max(tops, axis=0)
    normaliser = top + tl.log(tl.sum(sums * tl.exp(tops - finite(top)), axis=0))
    chosen = tl.load(logits_ptr + row * row_stride + tl.load(token_ids_ptr + row)).to(tl.float32)
    tl.store(normalisers_ptr + row, normaliser)
    tl.store(logprobs_ptr + row, chosen - normaliser)
    tl.store(ranks_ptr + row, tl.sum(counts, axis=0).to(tl.int64) + 1)


def gather_logprobs(
    logits: torch.Tensor, token_ids: torch.Tensor, k: int
) -> tuple[torch.Tensor, ...]:
    num_rows, vocab_size = logits.shape
    chunk = chunk_size(vocab_size)
    num_chunks = triton.cdiv(vocab_size, chunk)
    tops = logits.new_empty((num_rows, num_chunks), dtype=torch.float32)
    sums = logits.new_empty((num_rows, num_chunks), dtype=torch.float32)
    counts = logits.new_empty((num_rows, num_chunks), dtype=torch.int32)
    normalisers = logits.new_empty(num_rows, dtype=torch.float32)
    logprobs = logits.new_empty(num_rows, dtype=torch.float32)
    ranks = logits.new_empty(num_rows, dtype=torch.int64)
    _sums_of_chunk[(num_rows, num_chunks)](
        *(logits, token_ids, tops, sums, counts, logits.stride(0)),
        VOCAB=vocab_size,
        CHUNK=chunk,
        num_warps=NUM_WARPS,
    )
    _sums_of_row[(num_rows,)](
        *(logits, token_ids, tops, sums, counts, normalisers, logprobs, ranks, logits.stride(0)),
        NUM_CHUNKS=num_chunks,
        BLOCK=triton.next_power_of_2(num_chunks),
        num_warps=1,
    )
    top_logits, top_ids = logits.topk(k, dim=-1)
    return token_ids, logprobs, ranks, top_ids, top_logits.to(torch.float32) - normalisers[:, None]
