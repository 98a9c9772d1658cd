"""Device code of paged attention: a block of query rows against tiles of cached keys and values.

Owns the online softmax, its masks and the soft cap. Knows neither requests nor launches: it is told
where a KV head's cache begins, its block table, and which positions the rows have. Used by
``triton.paged_attention`` alone.
"""

from __future__ import annotations

import triton
import triton.language as tl

MASKED = tl.constexpr(-1e30)
"""Finite, so that a row that sees nothing of a tile cannot make a NaN; what it adds is wiped by the
factor exp2(MASKED - maximum) = 0 as soon as it sees a key, and every real row sees itself."""
_LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def tile_range(first, last, window, TILE: tl.constexpr):
    """Tiles of keys that queries at the positions first..last see any of: from, to (exclusive)."""
    low = 0
    if window is not None:
        low = tl.maximum(first - window + 1, 0) // TILE
    return low, (last + TILE) // TILE


@triton.jit
def _load_tile(
    base_ptr,
    seen,  # [TILE], keys that some row sees
    SLOT_STRIDE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM: tl.constexpr,
    MASK: tl.constexpr,
):
    """[TILE, DIM]; slots that no request owns are never read, since 0 * NaN is NaN."""
    dims = tl.arange(0, DIM)
    at = base_ptr + tl.arange(0, seen.shape[0])[:, None] * SLOT_STRIDE + dims[None, :]
    if MASK and DIM == HEAD_DIM:
        tile = tl.load(at, mask=seen[:, None], other=0.0)
    elif MASK:
        tile = tl.load(at, mask=seen[:, None] & (dims < HEAD_DIM)[None, :], other=0.0)
    elif DIM == HEAD_DIM:
        tile = tl.load(at)
    else:
        tile = tl.load(at, mask=(dims < HEAD_DIM)[None, :], other=0.0)
    return tile


@triton.jit
def _capped(scores, soft_cap):
    """soft_cap * tanh(scores / soft_cap), for any size of score."""
    x = scores / soft_cap
    small = tl.abs(x) < 0.2
    square = tl.where(small, x * x, 0.0)
    series = 1.0 + square * (-1.0 / 3 + square * (2.0 / 15 + square * (-17.0 / 315)))
    tanh = tl.where(small, x * series, 1.0 - 2.0 / (tl.exp(2.0 * x) + 1.0))
    return soft_cap * tanh


@triton.jit
def _attend_tiles(
    q,  # [ROWS, DIM]
    state,  # acc float32 [ROWS, DIM]; float32 [ROWS]: maximum of the scores, sum of the weights
    positions,  # [ROWS]
    last_position,
    low,
    high,
    cache,
    scoring,
    SLOT_STRIDE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PAGE: tl.constexpr,
    TILE: tl.constexpr,
    MASK: tl.constexpr,
):
    """The softmax's state after the tiles low..high (Milakov and Gimelshein, 2018; Dao, 2022)."""
    DIM: tl.constexpr = q.shape[1]
    acc, top, total = state
    k_ptr, v_ptr, table_ptr, block_stride = cache
    scale, soft_cap, window = scoring
    last = tl.maximum(high - 1, 0)
    block = tl.load(table_ptr + tl.minimum(low, last) * TILE // PAGE)
    for tile in range(low, high):
        keys = tile * TILE + tl.arange(0, TILE)
        base = block.to(tl.int64) * block_stride + tile * TILE % PAGE * SLOT_STRIDE
        block = tl.load(table_ptr + tl.minimum(tile + 1, last) * TILE // PAGE)
        seen = keys <= last_position
        k = _load_tile(k_ptr + base, seen, SLOT_STRIDE, HEAD_DIM, DIM, MASK)
        v = _load_tile(v_ptr + base, seen, SLOT_STRIDE, HEAD_DIM, DIM, MASK)
        scores = tl.dot(q, k.T, input_precision="ieee") * scale
        if soft_cap is not None:
            scores = _capped(scores, soft_cap) * _LOG2E
        if MASK:
            visible = keys[None, :] <= positions[:, None]
            if window is not None:
                visible &= keys[None, :] > positions[:, None] - window
            scores = tl.where(visible, scores, MASKED)
        new_top = tl.maximum(top, tl.max(scores, axis=1))
        weights = tl.exp2(scores - new_top[:, None])
        shrink = tl.exp2(top - new_top)
        total = total * shrink + tl.sum(weights, axis=1)
        acc = tl.dot(weights.to(v.dtype), v, acc * shrink[:, None], input_precision="ieee")
        top = new_top
    return acc, top, total


@triton.jit
def attend(
    q,  # [ROWS, DIM]
    positions,  # [ROWS], from first_position on; those after last_position stand for no query
    first_position,
    last_position,
    low,
    high,
    cache,  # k_ptr and v_ptr of the KV head, table_ptr of the request, block_stride
    scoring,  # scale (times log2(e) without a cap), soft_cap or None, window or None
    SLOT_STRIDE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PAGE: tl.constexpr,
    TILE: tl.constexpr,
    PREFILL: tl.constexpr,
):
    """acc float32 [ROWS, DIM] and, float32 [ROWS], the log2 of each row's largest and total weight,
    over the tiles low..high.

    Prefill takes the tiles that all rows see whole without masks. A decode program has few tiles,
    and starting a second pipeline costs more than the masks.
    """
    acc = tl.zeros([q.shape[0], q.shape[1]], tl.float32)
    state = acc, tl.full([q.shape[0]], MASKED, tl.float32), tl.zeros([q.shape[0]], tl.float32)
    if PREFILL:
        window = scoring[2]
        if window is not None:
            full = tl.cdiv(tl.maximum(last_position - window + 1, 0), TILE)
            full = tl.minimum(tl.maximum(full, low), high)
            state = _attend_tiles(
                *(q, state, positions, last_position, low, full, cache, scoring),
                *(SLOT_STRIDE, HEAD_DIM, PAGE, TILE, True),
            )
            low = full
        full = tl.minimum(tl.maximum((first_position + 1) // TILE, low), high)
        state = _attend_tiles(
            *(q, state, positions, last_position, low, full, cache, scoring),
            *(SLOT_STRIDE, HEAD_DIM, PAGE, TILE, False),
        )
        low = full
    return _attend_tiles(
        *(q, state, positions, last_position, low, high, cache, scoring),
        *(SLOT_STRIDE, HEAD_DIM, PAGE, TILE, True),
    )
