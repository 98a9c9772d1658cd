"""Paged attention in the interpreter, against its twin and float64."""

import pytest
import torch
from accuracy import DTYPES, check
from attention_cases import Batch, random_batch
from cases import huge_cache

from pagestream_kernels import paged_attention, plan_attention
from pagestream_kernels.triton import attention_settings

LONG = pytest.mark.long
NOISE = 2.5e-7
"""Which of two sums of head_dim products in float32 is nearer than this is chance."""
QUICK_SEEDS, SEEDS = range(3), range(3, 24)


def assert_right(batch, **options):
    actual, real = batch.run(**options), batch.real
    check(actual[real], batch.twin()[real], batch.exact()[real], negligible=NOISE)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "seed", [*QUICK_SEEDS, *(pytest.param(seed, marks=LONG) for seed in SEEDS)]
)
def test_random_batches(seed, dtype):
    torch.manual_seed(seed)
    assert_right(random_batch(seed, dtype))


@LONG
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("group", range(1, 9))
def test_group_sizes(group, dtype):
    """Decode, verify and prefill of each; groups of 3, 5, 6 and 7 leave rows of a block unused."""
    assert_right(Batch([1, 3], [40, 20], group, dtype=dtype))
    assert_right(Batch([1, 70], [20, 9], group, kv_heads=2, dtype=dtype))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "head_dim", [80, *(pytest.param(size, marks=LONG) for size in (64, 96, 128, 256))]
)
def test_head_sizes(head_dim, dtype):
    assert_right(Batch([1, 4], [70, 20], 3, head_dim=head_dim, page=32, dtype=dtype))
    assert_right(Batch([1, 66], [30, 5], 3, head_dim=head_dim, page=32, dtype=dtype))


@pytest.mark.parametrize("page", [16, 48, pytest.param(64, marks=LONG)])
def test_around_page_boundaries(page):
    """A page of 48 has tiles of 16."""
    lengths = [1, page - 1, page, page + 1, 2 * page - 1, 2 * page, 2 * page + 1]
    assert_right(Batch([1] * 7, [length - 1 for length in lengths], page=page))
    for query_len, context_len in zip(lengths[1:4], lengths[1:4], strict=True):
        assert_right(Batch([query_len, 33], [page + 1, context_len - 1], page=page))


@pytest.mark.parametrize("query_len", [1, pytest.param(2, marks=LONG), 5])
@pytest.mark.parametrize("group", [3, *(pytest.param(group, marks=LONG) for group in (1, 8))])
def test_draft_tokens_to_verify(query_len, group):
    """Split over programs, most of which have nothing to do for the short ones."""
    batch = Batch([query_len, 1, query_len], [0, 33, 200], group, spare_blocks=20)
    assert_right(batch, max_query_len=5)


@pytest.mark.parametrize("tiles", [8, 9, 11, 13, 23])
def test_splits_of_unequal_size(tiles):
    assert_right(Batch([1, 2], [16 * tiles - 3, 9], spare_blocks=0))


def test_splits_without_a_key_in_their_window():
    assert_right(Batch([1, 3], [400, 300], window=20, spare_blocks=30))
    assert_right(Batch([4, 4], [1, 100], window=1, spare_blocks=30))


@pytest.mark.parametrize("window", [1, 15, 16, 17, 40, 1000])
def test_windows(window):
    assert_right(Batch([1, 50, 5], [60, 20, 0], window=window))


@pytest.mark.parametrize("window", [62, 63, 64])
def test_windows_that_begin_at_a_tile(window):
    """Blocks of a prompt whose last query just sees, or does not, a tile's first key."""
    assert_right(Batch([96], [0], window=window))


@pytest.mark.parametrize("dtype", [DTYPES[0], *(pytest.param(x, marks=LONG) for x in DTYPES[1:])])
@pytest.mark.parametrize("strength", [0.01, 1.0, 100.0, 1e4])
def test_soft_caps(strength, dtype):
    """From scores so small that tanh is the identity to those for which it is 1."""
    assert_right(Batch([1, 20], [40, 3], soft_cap=30.0, strength=strength, dtype=dtype))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_scores_far_apart(dtype):
    """exp() of a score would overflow in any of the dtypes; each query has one key that counts."""
    assert_right(Batch([1, 20], [40, 3], strength=300.0, dtype=dtype))


@pytest.mark.parametrize(
    ("query_lens", "context_lens"),
    [
        ([1, 1, 1, 1], [9, 40, -1, -1]),  # what a CUDA graph of four rows pads two with
        ([1, 1, 0, 0], [9, 40, 0, 0]),
        ([0, 1, 0, 30, 0], [0, 9, 0, 2, 0]),
        ([1, 1], [-1, -1]),
    ],
)
def test_padding(query_lens, context_lens):
    batch = Batch(query_lens, context_lens, spare_tokens=4)
    if batch.real.any():
        assert_right(batch)
    padding = batch.run()[: sum(query_lens)][~batch.real[: sum(query_lens)]]
    assert (padding == 0).all()


def test_without_the_longest_query_known():
    """The host may not know it: then every launch has to find out which requests are its own."""
    batch = Batch([1, 4, 1, 30], [20, 50, 0, 5])
    assert_right(batch, max_query_len=len(batch.q))


def test_other_requests_and_runs_change_no_bit():
    torch.manual_seed(1)
    batch = Batch([1, 5, 40], [70, 30, 0], 3, mapped=True)
    first = batch.run()
    assert batch.run().equal(first)
    middle = slice(1, 6)
    batch.q[0], batch.q[6:] = 9.0, -3.0
    batch.seq_lens[0] -= 20
    assert batch.run()[middle].equal(first[middle])
    assert not batch.run()[:1].equal(first[:1])


@pytest.mark.parametrize("query_len", [1, 20])
def test_blocks_past_2_to_the_31_elements(query_len):
    page, kv_heads, head_dim = 16, 8, 128
    cache = huge_cache(page, kv_heads, head_dim)
    tables = torch.tensor([[len(cache) - 1, len(cache) - 2]], dtype=torch.int32)
    cache[tables[0].long()] = torch.randn(2, page, kv_heads, head_dim).half()
    q = torch.randn(query_len, kv_heads, head_dim).half()
    starts = torch.tensor([0, query_len], dtype=torch.int32)
    metadata = plan_attention(starts, starts[1:], tables, page, max_query_len=query_len)
    out = paged_attention(q, cache, cache, metadata, 1.0)
    near = tables - (len(cache) - 2)
    metadata = plan_attention(starts, starts[1:], near, page, max_query_len=query_len)
    assert out.equal(paged_attention(q, cache[-2:], cache[-2:], metadata, 1.0))


def test_layouts_that_the_kernels_cannot_read_are_refused():
    batch = Batch([1], [3])
    batch.q = batch.q.transpose(1, 2).contiguous().transpose(1, 2)
    with pytest.raises(ValueError, match="heads of a token"):
        batch.run()
    batch = Batch([1], [3], page=24)
    with pytest.raises(ValueError, match="multiple of 16"):
        batch.run()
    batch = Batch([1], [3], kv_heads=2)
    batch.caches = (batch.caches[0], batch.caches[1].transpose(1, 2).contiguous().transpose(1, 2))
    with pytest.raises(ValueError, match="laid out alike"):
        batch.run()


def test_splitting_fills_the_device_and_no_more():
    num_splits = attention_settings.num_splits
    assert num_splits(8, 132, 8192) == 32
    assert num_splits(8 * 256, 132, 8192) == 1
    assert num_splits(1, 132, 8192) == 64
    assert num_splits(1, 132, 300) == 4  # 64 keys each
    assert num_splits(0, 132, 0) == 1
