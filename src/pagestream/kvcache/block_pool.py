"""BlockPool: the fixed set of KV-cache blocks, the queue of free ones, and the index by content.

Owns every Block, its reference count and its hash. It does not know requests; the KV manager asks
for blocks and gives them back. A freed block keeps its content and can be found again by its hash
until it is taken for something else, so the free queue is also the eviction order: an intrusive
doubly linked list, because a found block must leave its middle in O(1).
"""

from __future__ import annotations

from collections.abc import Iterable


class Block:
    """One KV-cache block; ``prev_free`` and ``next_free`` are the free queue's own."""

    __slots__ = ("block_hash", "block_id", "next_free", "prev_free", "ref_count")

    def __init__(self, block_id: int) -> None:
        self.block_id = block_id
        self.ref_count = 0
        self.block_hash: bytes | None = None
        """Names the tokens it holds and all before them; None: not to be found."""
        self.prev_free: Block | None = None
        self.next_free: Block | None = None


class FreeBlockQueue:
    """First in, first out, with O(1) removal from anywhere."""

    def __init__(self, blocks: Iterable[Block]) -> None:
        self._head = Block(-1)
        self._tail = Block(-1)
        self._head.next_free, self._tail.prev_free = self._tail, self._head
        self.size = 0
        for block in blocks:
            self.append(block)

    def append(self, block: Block) -> None:
        last = self._tail.prev_free
        assert last is not None
        last.next_free = self._tail.prev_free = block
        block.prev_free, block.next_free = last, self._tail
        self.size += 1

    def remove(self, block: Block) -> None:
        before, after = block.prev_free, block.next_free
        if before is None or after is None:
            raise RuntimeError(f"block {block.block_id} is not in the free queue")
        before.next_free, after.prev_free = after, before
        block.prev_free = block.next_free = None
        self.size -= 1

    def popleft(self) -> Block:
        block = self._head.next_free
        if block is None or block is self._tail:
            raise RuntimeError("the free queue is empty")
        self.remove(block)
        return block


class BlockPool:
    """``num_blocks`` blocks, each free or referenced; a free one may be cached (have a hash)."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.num_cached_blocks = 0
        """Free blocks that can still be found by their content."""
        self._free = FreeBlockQueue(Block(block_id) for block_id in range(num_blocks))
        self._by_hash: dict[bytes, Block] = {}

    @property
    def num_free_blocks(self) -> int:
        """Blocks that could be taken now, cached ones included."""
        return self._free.size

    def find(self, block_hash: bytes) -> Block | None:
        return self._by_hash.get(block_hash)

    def allocate(self, count: int) -> list[Block]:
        """Take ``count`` free blocks, least recently freed first; RuntimeError if too few."""
        if count > self._free.size:
            raise RuntimeError(f"{count} blocks wanted, {self._free.size} free")
        blocks = [self._free.popleft() for _ in range(count)]
        for block in blocks:
            if block.block_hash is not None:
                del self._by_hash[block.block_hash]
                block.block_hash = None
                self.num_cached_blocks -= 1
            block.ref_count = 1
        return blocks

    def share(self, blocks: Iterable[Block]) -> None:
        """Add a reference to each; free ones leave the queue."""
        for block in blocks:
            if block.ref_count == 0:
                self._free.remove(block)
                self.num_cached_blocks -= 1
            block.ref_count += 1

    def free(self, blocks: Iterable[Block]) -> None:
        """Drop one reference of each; those without any join the free queue in this order."""
        for block in blocks:
            if block.ref_count < 1:
                raise RuntimeError(f"block {block.block_id} freed twice")
            block.ref_count -= 1
            if block.ref_count == 0:
                self._free.append(block)
                self.num_cached_blocks += block.block_hash is not None

    def cache(self, block: Block, block_hash: bytes) -> None:
        """Make a referenced block findable. The first of equal blocks stays the one found."""
        if block.block_hash is None and block_hash not in self._by_hash:
            block.block_hash = block_hash
            self._by_hash[block_hash] = block
