"""Block accounting: every block is free or owned, never both, never lost."""

import pytest

from pagestream.kvcache.block_pool import Block, BlockPool, FreeBlockQueue
from pagestream.kvcache.kv_cache_manager import KVCacheManager


def test_free_queue_is_fifo_and_removes_from_the_middle():
    blocks = [Block(i) for i in range(4)]
    queue = FreeBlockQueue(blocks)
    queue.remove(blocks[1])
    assert [queue.popleft().block_id for _ in range(3)] == [0, 2, 3]
    assert queue.size == 0
    with pytest.raises(RuntimeError, match="empty"):
        queue.popleft()
    with pytest.raises(RuntimeError, match="not in the free queue"):
        queue.remove(blocks[1])


def test_pool_refuses_overcommit_and_double_free():
    pool = BlockPool(3)
    blocks = pool.allocate(2)
    with pytest.raises(RuntimeError, match="2 blocks wanted, 1 free"):
        pool.allocate(2)
    pool.free(blocks)
    assert pool.num_free_blocks == 3
    with pytest.raises(RuntimeError, match="freed twice"):
        pool.free(blocks[:1])


def test_shared_block_is_free_only_after_its_last_owner():
    pool = BlockPool(1)
    (block,) = pool.allocate(1)
    block.ref_count += 1
    pool.free([block])
    assert pool.num_free_blocks == 0
    pool.free([block])
    assert pool.num_free_blocks == 1


def test_slots_grow_by_whole_blocks():
    kv = KVCacheManager(num_blocks=4, block_size=16)
    assert kv.allocate_slots("a", 1) == [0]
    assert kv.allocate_slots("a", 16) == []
    assert kv.allocate_slots("a", 33) == [1, 2]
    assert kv.block_ids("a") == [0, 1, 2]
    assert kv.num_free_blocks == 1


def test_failed_allocation_changes_nothing():
    kv = KVCacheManager(num_blocks=2, block_size=16)
    kv.allocate_slots("a", 16)
    assert kv.allocate_slots("b", 32) is None
    assert kv.num_free_blocks == 1
    assert kv.block_ids("b") == []
    kv.free("b")
    kv.free("a")
    assert kv.num_free_blocks == 2
