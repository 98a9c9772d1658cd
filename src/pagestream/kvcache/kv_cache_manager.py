"""KVCacheManager: which blocks hold which request's tokens, and which of them can be found again.

Owns the block list and the hash chain of every request; the pool owns the blocks themselves. It
never sees tensors. Called by the scheduler only.

    block hash = H(hash of the block before, the block's token ids)
    chain root = H(adapter, cache_salt): what may not be shared starts from another root
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from hashlib import blake2b

from pagestream.kvcache.block_pool import Block, BlockPool

_HASH_BYTES = 16
NEVER = 1 << 62
"""As a number of tokens: more than there will ever be."""


def chain_root(adapter: str, cache_salt: str) -> bytes:
    """The hash that a request's chain starts from."""
    parts = b"".join(
        len(part).to_bytes(4, "little") + part for part in (adapter.encode(), cache_salt.encode())
    )
    return blake2b(parts, digest_size=_HASH_BYTES).digest()


class _Holding:
    """One request's blocks and the hashes of its full blocks, as far as they were needed."""

    __slots__ = ("blocks", "hashes", "num_cached")

    def __init__(self, root: bytes) -> None:
        self.blocks: list[Block] = []
        self.hashes = [root]  # hashes[i + 1] names block i
        self.num_cached = 0
        """Leading blocks that were offered to the pool's index."""


class KVCacheManager:
    """Grows a request's block list on demand; all lengths in tokens."""

    def __init__(self, num_blocks: int, block_size: int, enable_prefix_caching: bool) -> None:
        self.block_size = block_size
        self._enable_prefix_caching = enable_prefix_caching
        self._pool = BlockPool(num_blocks)
        self._holdings: dict[str, _Holding] = {}

    @property
    def num_blocks(self) -> int:
        return self._pool.num_blocks

    @property
    def num_free_blocks(self) -> int:
        return self._pool.num_free_blocks

    @property
    def num_cached_blocks(self) -> int:
        return self._pool.num_cached_blocks

    @property
    def pool_tokens(self) -> int:
        return self.num_blocks * self.block_size

    def block_ids(self, request_id: str) -> list[int]:
        holding = self._holdings.get(request_id)
        return [] if holding is None else [block.block_id for block in holding.blocks]

    def admit(
        self, request_id: str, token_ids: Sequence[int], root: bytes, read_cache: bool
    ) -> tuple[list[int], int] | None:
        """Blocks for all of a request's tokens, as many as possible of them found in the cache.

        Returns (block ids, tokens whose KV they hold already), or None, with no block taken, when
        the pool has too few. At least one token is left to compute, or there would be no logits.
        The request keeps its hashes until ``free``, however often this is tried.
        """
        holding = self._holdings.setdefault(request_id, _Holding(root))
        found: list[Block] = []
        if read_cache and self._enable_prefix_caching:
            found = self._find(holding, token_ids, (len(token_ids) - 1) // self.block_size)
        wanted = -(-len(token_ids) // self.block_size) - len(found)
        still_free = self._pool.num_free_blocks - sum(block.ref_count == 0 for block in found)
        if wanted > still_free:
            return None
        self._pool.share(found)
        holding.blocks = found + self._pool.allocate(wanted)
        holding.num_cached = len(found)
        return [block.block_id for block in holding.blocks], len(found) * self.block_size

    def allocate_slots(self, request_id: str, num_tokens: int) -> list[int] | None:
        """Make room for an admitted request's first ``num_tokens`` tokens.

        Returns the ids of the blocks added (often none), or None, with nothing changed, when the
        pool has too few.
        """
        blocks = self._holdings[request_id].blocks
        wanted = -(-num_tokens // self.block_size) - len(blocks)
        if wanted <= 0:
            return []
        if wanted > self._pool.num_free_blocks:
            return None
        added = self._pool.allocate(wanted)
        blocks.extend(added)
        return [block.block_id for block in added]

    def next_cached_at(self, num_cached_tokens: int) -> int:
        """Computed tokens at which ``cache_blocks`` has something to do."""
        return num_cached_tokens + self.block_size if self._enable_prefix_caching else NEVER

    def cache_blocks(
        self, request_id: str, token_ids: Sequence[int], num_computed_tokens: int
    ) -> int:
        """Make findable what is full and computed, generated tokens included.

        Returns the number of computed tokens at which to call this again.
        """
        holding = self._holdings[request_id]
        full = min(num_computed_tokens, len(token_ids)) // self.block_size
        self._extend_hashes(holding, token_ids, full)
        for index in range(holding.num_cached, full):
            self._pool.cache(holding.blocks[index], holding.hashes[index + 1])
        holding.num_cached = max(full, holding.num_cached)
        return self.next_cached_at(holding.num_cached * self.block_size)

    def free(self, request_id: str) -> None:
        """Give back all of the request's blocks; nothing happens if it holds none.

        Last blocks first, so that the start of a sequence, which others may share, is evicted
        last.
        """
        holding = self._holdings.pop(request_id, None)
        if holding is not None:
            self._pool.free(reversed(holding.blocks))

    def _find(self, holding: _Holding, token_ids: Sequence[int], most: int) -> list[Block]:
        self._extend_hashes(holding, token_ids, most)
        found = []
        for block_hash in holding.hashes[1 : most + 1]:
            block = self._pool.find(block_hash)
            if block is None:
                break
            found.append(block)
        return found

    def _extend_hashes(self, holding: _Holding, token_ids: Sequence[int], count: int) -> None:
        """Hash the first ``count`` blocks; each is hashed once in a request's life."""
        hashes, size = holding.hashes, self.block_size
        done = len(hashes) - 1
        if count <= done:
            return
        data = array("i", token_ids[done * size : count * size]).tobytes()
        width = len(data) // (count - done)
        parent = hashes[-1]
        for start in range(0, len(data), width):
            digest = blake2b(parent, digest_size=_HASH_BYTES)
            digest.update(data[start : start + width])
            parent = digest.digest()
            hashes.append(parent)
