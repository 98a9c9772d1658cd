"""Block accounting: every block is free or owned, never both, never lost."""

import pytest

from pagestream.kvcache.block_pool import Block, BlockPool, FreeBlockQueue
from pagestream.kvcache.kv_cache_manager import KVCacheManager, chain_root


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


ROOT = chain_root("", "")


def manager(num_blocks=4, caching=True):
    return KVCacheManager(num_blocks, block_size=16, enable_prefix_caching=caching)


def admit(kv, name, token_ids, root=ROOT, read_cache=True):
    return kv.admit(name, token_ids, root, read_cache)


def test_slots_grow_by_whole_blocks():
    kv = manager()
    assert admit(kv, "a", [1]) == ([0], 0)
    assert kv.allocate_slots("a", 16) == []
    assert kv.allocate_slots("a", 33) == [1, 2]
    assert kv.block_ids("a") == [0, 1, 2]
    assert kv.num_free_blocks == 1


def test_failed_allocation_changes_nothing():
    kv = manager(num_blocks=2)
    admit(kv, "a", [1] * 16)
    assert admit(kv, "b", [1] * 32) is None
    assert kv.allocate_slots("a", 64) is None
    assert kv.num_free_blocks == 1
    assert kv.block_ids("b") == []
    kv.free("b")
    kv.free("a")
    assert kv.num_free_blocks == 2


def test_a_prefix_is_found_while_held_and_after():
    kv = manager(num_blocks=8)
    prompt = list(range(40))
    admit(kv, "a", prompt)
    kv.cache_blocks("a", prompt, 40)
    assert admit(kv, "b", prompt) == ([0, 1, 3], 32)
    kv.free("a")
    kv.free("b")
    assert (kv.num_free_blocks, kv.num_cached_blocks) == (8, 2)
    blocks, cached = admit(kv, "c", [*prompt[:32], 99])
    assert (blocks[:2], cached) == ([0, 1], 32)
    assert kv.num_cached_blocks == 0


def test_a_full_hit_leaves_one_token_to_compute():
    kv = manager(num_blocks=8)
    prompt = list(range(32))
    admit(kv, "a", prompt)
    kv.cache_blocks("a", prompt, 32)
    assert admit(kv, "b", prompt)[1] == 16
    assert admit(kv, "c", [*prompt, 7])[1] == 32


def test_only_what_is_computed_is_found():
    kv = manager(num_blocks=8)
    prompt = list(range(48))
    admit(kv, "a", prompt)
    assert kv.cache_blocks("a", prompt, 31) == 32
    assert admit(kv, "b", prompt)[1] == 16


@pytest.mark.parametrize(
    ("tokens", "root", "read_cache"),
    [
        ([9, *range(1, 40)], ROOT, True),
        (list(range(40)), chain_root("", "salt"), True),
        (list(range(40)), chain_root("adapter", ""), True),
        (list(range(40)), ROOT, False),
    ],
)
def test_nothing_is_found_for_other_tokens_salts_adapters_or_when_off(tokens, root, read_cache):
    kv = manager(num_blocks=8)
    admit(kv, "a", list(range(40)))
    kv.cache_blocks("a", list(range(40)), 40)
    assert admit(kv, "b", tokens, root, read_cache)[1] == 0


def test_adapter_and_salt_cannot_be_mistaken_for_one_another():
    assert len({chain_root("ab", "c"), chain_root("a", "bc"), chain_root("", "abc")}) == 3


def test_the_same_tokens_after_another_start_are_not_the_same_block():
    kv = manager(num_blocks=8)
    admit(kv, "a", [*range(16), *[5] * 17])
    kv.cache_blocks("a", [*range(16), *[5] * 17], 33)
    assert admit(kv, "b", [*[8] * 16, *[5] * 17])[1] == 0


def test_least_recently_freed_is_evicted_first_and_starts_last():
    kv = manager(num_blocks=4)
    first, second = [1] * 33, [2] * 16
    admit(kv, "a", first)
    kv.cache_blocks("a", first, 33)
    kv.free("a")
    admit(kv, "b", second)
    kv.cache_blocks("b", second, 16)
    kv.free("b")
    admit(kv, "c", [3] * 32)
    kv.free("c")
    assert admit(kv, "d", first)[1] == 16


def test_generated_tokens_are_found_by_the_next_turn():
    kv = manager(num_blocks=8)
    admit(kv, "a", [1] * 10)
    kv.allocate_slots("a", 40)
    conversation = [1] * 10 + list(range(30))
    kv.cache_blocks("a", conversation, 39)
    kv.free("a")
    assert admit(kv, "b", [*conversation, 4, 4])[1] == 32


def test_caching_off_finds_nothing():
    kv = manager(caching=False)
    admit(kv, "a", [1] * 40)
    assert kv.next_cached_at(0) > 10**9
    assert admit(kv, "b", [1] * 16)[1] == 0
