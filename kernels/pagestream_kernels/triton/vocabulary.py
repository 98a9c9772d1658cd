"""What kernels over rows of logits share: how a row is cut into chunks, read, and compared.

A row is cut into chunks, a program each, so that few rows keep a GPU busy too; what chunks found is
put together by one small program per row.
"""

from __future__ import annotations

import triton
import triton.language as tl

CHUNK = 2048
"""Logits per program."""
NUM_WARPS = 4


@triton.jit
def load_logits(row_ptr, tokens, VOCAB: tl.constexpr):
    """float32. -inf past the end, and for NaN, which compares with nothing; no inf, of which
    differences would be NaN."""
    x = tl.load(row_ptr + tokens, mask=tokens < VOCAB, other=float("-inf")).to(tl.float32)
    return tl.where(x == x, tl.minimum(x, 3.0e38), float("-inf"))


@triton.jit
def finite(x):
    """0 for -inf: an origin to subtract from where there may be nothing else."""
    return tl.where(x > float("-inf"), x, 0.0)


def chunk_size(vocab_size: int) -> int:
    return min(CHUNK, 1 << (vocab_size - 1).bit_length())
