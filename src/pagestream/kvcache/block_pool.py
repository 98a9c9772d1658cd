"""BlockPool: the fixed set of KV-cache blocks and the queue of free ones.

Owns every Block and its reference count. It does not know requests or tokens; the KV manager asks
for blocks and gives them back. The free queue is an intrusive doubly linked list, because a block
must be removable from its middle in O(1) once freed blocks can be found again by their content.
"""

from __future__ import annotations

from collections.abc import Iterable


class Block:
    """One KV-cache block; ``prev_free`` and ``next_free`` are the free queue's own."""

    __slots__ = ("block_id", "next_free", "prev_free", "ref_count")

    def __init__(self, block_id: int) -> None:
        self.block_id = block_id
        self.ref_count = 0
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
    """``num_blocks`` blocks, each free or referenced."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._free = FreeBlockQueue(Block(block_id) for block_id in range(num_blocks))

    @property
    def num_free_blocks(self) -> int:
        return self._free.size

    def allocate(self, count: int) -> list[Block]:
        """Take ``count`` free blocks, least recently freed first; RuntimeError if too few."""
        if count > self._free.size:
            raise RuntimeError(f"{count} blocks wanted, {self._free.size} free")
        blocks = [self._free.popleft() for _ in range(count)]
        for block in blocks:
            block.ref_count = 1
        return blocks

    def free(self, blocks: Iterable[Block]) -> None:
        """Drop one reference of each; those without any join the free queue in this order."""
        for block in blocks:
            if block.ref_count < 1:
                raise RuntimeError(f"block {block.block_id} freed twice")
            block.ref_count -= 1
            if block.ref_count == 0:
                self._free.append(block)
