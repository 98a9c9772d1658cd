"""Launch settings of paged attention: fixed rules by GPU generation, head size and element size.

Chosen so that nothing spills, that shared memory fits, and that enough keys are in flight to cover
memory's latency; `make kernels-aot` checks all three. Used by ``triton.paged_attention``.
"""

from __future__ import annotations

MIN_KEYS = 64
"""That a split gets at least, while a sequence has that many."""
_MAX_SPLITS = 64
_WAVES = 3
"""Programs per multiprocessor that splitting aims at, at most."""


def decode_rows(group: int, max_query_len: int) -> int:
    """Rows, (query token, head of the group) pairs, of a decode program: at least the 16 of a
    matrix instruction."""
    return max(16, 1 << (group * max_query_len - 1).bit_length())


def fits_decode(group: int, max_query_len: int, itemsize: int) -> bool:
    """Whether decode programs, a block of rows per request, take so many query tokens."""
    most = 32 if itemsize == 4 else 64
    return max_query_len == 1 or decode_rows(group, max_query_len) <= most


def num_splits(programs: int, num_sms: int, max_keys: int) -> int:
    """Into how many programs to split each sequence: a power of two, from the batch size and the
    longest possible sequence alone, so that a CUDA graph can hold it."""
    wanted = min(_WAVES * num_sms // max(programs, 1), max_keys // MIN_KEYS, _MAX_SPLITS)
    return 1 << (max(wanted, 1).bit_length() - 1)


def decode_settings(
    capability: int, head_dim: int, itemsize: int, page: int, rows: int
) -> dict[str, int]:
    """ROWS, TILE, num_warps and num_stages of a decode launch."""
    tile, warps, stages = 64, 4, 3
    if itemsize == 4:  # no matrix instruction multiplies float32 exactly
        tile, warps = 16, 8
    elif rows > 16 or head_dim > 128:
        tile = 32
    if rows == 16 and head_dim > 128 and not _is_small(capability):
        stages = 4
    return {
        "ROWS": rows,
        "TILE": _tile(tile, page),
        "PREFILL": False,
        "num_warps": warps,
        "num_stages": stages,
    }


def prefill_settings(
    capability: int, head_dim: int, itemsize: int, page: int, group: int
) -> dict[str, int]:
    """ROWS, TILE, num_warps and num_stages of a prefill launch."""
    if itemsize == 4:
        rows, tile, stages = 32, 16, 3
    elif capability // 10 in (9, 10):  # warp-group instructions, which read from shared memory
        rows, tile, stages = 128, (64 if head_dim <= 128 else 32), 3
    elif head_dim <= 128:
        rows, tile, stages = 128, 32, 4
    else:
        rows, tile, stages = 64, (16 if _is_small(capability) else 32), 3
    tile = _tile(tile, page)
    if tile == 16:
        rows = min(rows, 64)
    return {
        "ROWS": max(rows, decode_rows(group, 1)),
        "TILE": tile,
        "PREFILL": True,
        "num_warps": 8,
        "num_stages": stages,
    }


def _is_small(capability: int) -> bool:
    """Consumer parts give a program 99 KiB of shared memory, others from 163."""
    return capability in (86, 89) or capability >= 120


def _tile(most: int, page: int) -> int:
    """A tile of keys lies within one block of the cache, and is a power of two."""
    tile = min(most, page & -page)
    if tile < 16:
        raise ValueError(f"the block size must be a multiple of 16 on a GPU, not {page}")
    return tile
