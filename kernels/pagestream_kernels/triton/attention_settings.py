"""Launch settings of paged attention: fixed tables by GPU generation, head size and element size.

Chosen so that nothing spills, that shared memory fits, and that enough keys are in flight to cover
memory's latency; `make kernels-aot` checks all three for every entry.
"""

from __future__ import annotations

MIN_TILES = 2
"""Of keys that a split gets at least, while a sequence has that many."""
_DECODE_ROWS = 64
"""Most rows, (query token, head of the group) pairs, of a decode program."""
_MAX_SPLITS = 64
_WAVES = 3
"""Programs per multiprocessor that splitting aims at, at most."""


def decode_rows(group: int, max_query_len: int) -> int:
    """Rows of a decode program, at least the 16 of a matrix instruction."""
    return max(16, 1 << (group * max_query_len - 1).bit_length())


def fits_decode(group: int, max_query_len: int) -> bool:
    """Whether decode programs, a block of rows per request, take so many query tokens."""
    return max_query_len == 1 or decode_rows(group, max_query_len) <= _DECODE_ROWS


def num_splits(programs: int, num_sms: int, max_tiles: int) -> int:
    """Into how many programs to split each sequence: a power of two, from the batch size and the
    longest possible sequence alone, so that a CUDA graph can hold it."""
    wanted = min(_WAVES * num_sms // max(programs, 1), max_tiles // MIN_TILES, _MAX_SPLITS)
    return 1 << (max(wanted, 1).bit_length() - 1)


def decode_settings(capability: int, head_dim: int, itemsize: int, page: int) -> dict[str, int]:
    """TILE, num_warps and num_stages of a decode launch."""
    return {"TILE": _tile(32, page), "PREFILL": False, "num_warps": 4, "num_stages": 4}


def prefill_settings(capability: int, head_dim: int, itemsize: int, page: int) -> dict[str, int]:
    """ROWS, TILE, num_warps and num_stages of a prefill launch."""
    return {
        "ROWS": 128,
        "TILE": _tile(64, page),
        "PREFILL": True,
        "num_warps": 8,
        "num_stages": 3,
    }


def _tile(most: int, page: int) -> int:
    """A tile of keys lies within one block of the cache, and is a power of two."""
    tile = min(most, page & -page)
    if tile < 16:
        raise ValueError(f"the block size must be a multiple of 16 on a GPU, not {page}")
    return tile
