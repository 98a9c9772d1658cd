"""KVCacheManager: which blocks hold which request's tokens.

Owns the block list of every request; the pool owns the blocks themselves. It knows token counts,
never token contents on a device. Called by the scheduler only.
"""

from __future__ import annotations

from pagestream.kvcache.block_pool import Block, BlockPool


class KVCacheManager:
    """Grows a request's block list on demand; all lengths in tokens."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.block_size = block_size
        self._pool = BlockPool(num_blocks)
        self._blocks: dict[str, list[Block]] = {}

    @property
    def num_blocks(self) -> int:
        return self._pool.num_blocks

    @property
    def num_free_blocks(self) -> int:
        return self._pool.num_free_blocks

    @property
    def pool_tokens(self) -> int:
        return self.num_blocks * self.block_size

    def block_ids(self, request_id: str) -> list[int]:
        return [block.block_id for block in self._blocks.get(request_id, ())]

    def allocate_slots(self, request_id: str, num_tokens: int) -> list[int] | None:
        """Make room for the request's first ``num_tokens`` tokens.

        Returns the ids of the blocks added (often none), or None, with nothing changed, when the
        pool has too few.
        """
        held = len(self._blocks.get(request_id, ()))
        wanted = -(-num_tokens // self.block_size) - held
        if wanted <= 0:
            return []
        if wanted > self._pool.num_free_blocks:
            return None
        added = self._pool.allocate(wanted)
        self._blocks.setdefault(request_id, []).extend(added)
        return [block.block_id for block in added]

    def free(self, request_id: str) -> None:
        """Give back all of the request's blocks; nothing happens if it holds none.

        Last blocks first: the start of a sequence is what another request may share.
        """
        self._pool.free(reversed(self._blocks.pop(request_id, [])))
