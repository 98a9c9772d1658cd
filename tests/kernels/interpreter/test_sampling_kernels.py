"""Draws, filters and log-probabilities in the interpreter, against their twins."""

import pytest
import torch
from accuracy import relative_error

from pagestream_kernels import (
    argmax_tokens,
    filter_thresholds,
    gather_logprobs,
    gumbel_argmax,
    reference,
)
from pagestream_kernels.dispatch import kernels

if kernels is not None:
    import triton
    import triton.language as tl

    uniform = kernels.sampling._uniform

    @triton.jit
    def store_uniforms(out_ptr, seeds_ptr, positions_ptr, COUNT: tl.constexpr):
        row, tokens = tl.program_id(0), tl.arange(0, COUNT)
        u = uniform(tl.load(seeds_ptr + row), tl.load(positions_ptr + row), tokens)
        tl.store(out_ptr + row * COUNT + tokens, u)


OFF = 1 << 30
VOCABS = [1, 37, 512, 600]
"""With chunks of 256: one that is not full, full ones, and a last one that is not."""


@pytest.fixture(autouse=True)
def _small_chunks(monkeypatch):
    """So that a row has several chunks, and a pass several blocks."""
    monkeypatch.setattr(kernels.vocabulary, "CHUNK", 256)
    monkeypatch.setattr(kernels.filter_thresholds, "BLOCK", 256)


def random_logits(num_rows, vocab_size, dtype=torch.float32):
    """The last row has one possible token, the one before it none, and some are -inf elsewhere."""
    logits = torch.randn(num_rows, vocab_size) * 4
    logits[torch.rand(num_rows, vocab_size) < 0.1] = -torch.inf
    logits[-2:] = -torch.inf
    logits[-1, vocab_size // 2] = -3.0
    return logits.to(dtype)


def random_states(num_rows, num_states=9):
    """(idx_mapping, positions, temperature, seeds); a third of the states are greedy."""
    temperature = torch.rand(num_states) * 2 + 0.1
    temperature[::3] = 0.0
    seeds = torch.randint(-(2**63), 2**63 - 1, (num_states,))
    idx_mapping = torch.randint(0, num_states, (num_rows,))
    return idx_mapping, torch.randint(0, 2**33, (num_rows,)), temperature, seeds


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("vocab_size", VOCABS)
def test_argmax(vocab_size, dtype):
    logits = random_logits(5, vocab_size, dtype)
    assert argmax_tokens(logits).equal(reference.argmax_tokens(logits))


def test_argmax_takes_the_first_of_equal_ones():
    logits = torch.zeros(1, 1000)
    assert argmax_tokens(logits).tolist() == [0]
    logits[0, [300, 301, 700]] = 1.0
    assert argmax_tokens(logits).tolist() == [300]


def test_what_is_not_a_number_is_never_picked():
    logits = torch.full((2, 300), torch.nan)
    logits[0, 200] = -5.0
    idx_mapping, zeros = torch.tensor([0, 0]), torch.zeros(1)
    assert argmax_tokens(logits).tolist() == [200, -1]
    drawn = gumbel_argmax(logits, idx_mapping, idx_mapping, zeros + 1, zeros.long())
    assert drawn.tolist() == [200, -1]


def test_infinite_logits_are_picked():
    logits = torch.zeros(1, 300)
    logits[0, 290] = torch.inf
    zeros = torch.zeros(1)
    assert argmax_tokens(logits).tolist() == [290]
    drawn = gumbel_argmax(logits, zeros.long(), zeros.long(), zeros + 1, zeros.long())
    assert drawn.tolist() == [290]


def test_noise_is_the_twins_bit_by_bit():
    count = 1 << 15
    seeds = torch.tensor([0, -1, 1 << 40, 2**63 - 1, -(2**63)])
    positions = torch.tensor([0, 2**32 - 1, 2**31, 2**33 + 5, 77])
    out = torch.empty(5, count)
    store_uniforms[(5,)](out, seeds, positions, COUNT=count)
    assert out.equal(reference.uniforms(seeds, positions, count))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("filtered", [False, True], ids=["", "filtered"])
@pytest.mark.parametrize("vocab_size", VOCABS)
def test_draws(vocab_size, filtered, dtype):
    logits = random_logits(8, vocab_size, dtype)
    arguments = random_states(8)
    thresholds = torch.randn(8) if filtered else None
    if thresholds is not None:
        best = logits.float().amax(dim=1)
        thresholds = torch.minimum(thresholds, best).nan_to_num(neginf=-torch.inf)
        thresholds[::4] = -torch.inf
    drawn = gumbel_argmax(logits, *arguments, thresholds)
    assert drawn.equal(reference.gumbel_argmax(logits, *arguments, thresholds))
    assert drawn[-2:].tolist() == [-1, vocab_size // 2]


def test_a_draw_depends_on_its_own_key_only():
    """Not on the other rows, the chunks, the width of the rows in memory, or where a row lies."""
    logits = torch.randn(6, 1000)
    idx_mapping, positions, temperature, seeds = random_states(6)
    wide = torch.full((6, 1008), torch.inf)
    wide[:, :1000] = logits
    together = gumbel_argmax(wide[:, :1000], idx_mapping, positions, temperature, seeds)
    kernels.vocabulary.CHUNK = 512
    for row in reversed(range(6)):
        one = slice(row, row + 1)
        alone = gumbel_argmax(logits[one], idx_mapping[one], positions[one], temperature, seeds)
        assert alone.item() == together[row].item()


def test_low_temperatures_and_large_logits_stay_exact():
    logits = torch.tensor([[3e30, -3e30, 2.9e30], [1e4, 1e4 - 0.01, -1e4]])
    state, positions = torch.tensor([0, 0]), torch.arange(2)
    drawn = gumbel_argmax(logits, state, positions, torch.tensor([1e-5]), torch.tensor([3]))
    assert drawn.tolist() == [0, 0]


FILTERS = [
    *({"top_k": k} for k in (1, 2, 5, 50, 599, 600)),
    *({"top_p": p} for p in (0.0, 1e-6, 0.3, 0.9, 0.999)),
    *({"min_p": m} for m in (1e-9, 0.02, 0.5, 1.0)),
    {"top_k": 20, "top_p": 0.8},
    {"top_k": 3, "min_p": 0.2},
    {"top_k": 300, "top_p": 0.95, "min_p": 1e-4},
    {"top_p": 0.9, "min_p": 0.01},
]


def keep_sets(logits, controls, temperature=0.8):
    """(kernel's, twin's) keep-sets, bool like logits, with one state for all rows."""
    state = torch.zeros(len(logits), dtype=torch.int64)
    parameters = (
        torch.tensor([temperature]),
        torch.tensor([controls.get("top_k", OFF)]),
        torch.tensor([controls.get("top_p", 1.0)]),
        torch.tensor([controls.get("min_p", 0.0)]),
    )
    possible = logits > -torch.inf
    return [
        possible & (logits >= op(logits, state, *parameters)[:, None])
        for op in (filter_thresholds, reference.filter_thresholds)
    ]


@pytest.mark.parametrize("controls", FILTERS, ids=str)
def test_filters_keep_what_the_twin_keeps(controls):
    kept, expected = keep_sets(random_logits(5, 600), controls)
    assert kept.equal(expected)


@pytest.mark.long
@pytest.mark.parametrize("vocab_size", [1, 37, 600])
@pytest.mark.parametrize("controls", FILTERS[-4:], ids=str)
def test_filters_of_other_widths_and_temperatures(controls, vocab_size):
    for temperature in (0.05, 3.0):
        kept, expected = keep_sets(random_logits(4, vocab_size), controls, temperature)
        assert kept.equal(expected)


@pytest.mark.parametrize("controls", [{"top_k": 7}, {"top_p": 0.7}, {"top_k": 40, "top_p": 0.5}])
def test_equal_logits_stand_or_fall_together(controls):
    """A few distinct values, as bfloat16 logits have."""
    logits = torch.randn(3, 600).mul(2).round().div(2)
    kept, expected = keep_sets(logits, controls)
    assert kept.equal(expected)
    for row, mask in zip(logits, kept, strict=True):
        assert row[mask].min() > row[~mask].max()
    assert keep_sets(torch.zeros(1, 300), controls)[0].all()


@pytest.mark.long
@pytest.mark.parametrize("controls", [{"top_k": 2}, {"top_p": 0.5}, {"min_p": 0.5}], ids=str)
def test_filters_of_extreme_logits(controls):
    rows = [
        [-1e30, 1e30, 0.0, 1e-30],
        [-1.0, -1.0000001, -1.0000002, -1e4],
        [5.0, 1e-38, 0, -1e-38],
    ]
    kept, expected = keep_sets(torch.tensor(rows), controls)
    assert kept.equal(expected)
    with_nan = torch.tensor([[1.0, torch.nan, 3.0, 2.0], [torch.nan] * 4])
    kept, _ = keep_sets(with_nan, controls)
    assert kept[0, 2]


def test_rows_without_filters_keep_everything():
    logits = random_logits(6, 300)
    idx_mapping = torch.tensor([0, 1, 2, 3, 3, 2])
    thresholds = filter_thresholds(
        logits,
        idx_mapping,
        torch.tensor([1.0, 0.0, 1.0, 0.5]),  # the second is greedy
        torch.tensor([OFF, 3, 300, 4]),
        torch.tensor([1.0, 0.1, 1.0, 1.0]),
        torch.tensor([0.0, 0.9, 0.0, 0.0]),
    )
    assert (thresholds[[0, 1, 2, 5]] == -torch.inf).all()
    assert (logits[3] >= thresholds[3]).sum() == 4


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("vocab_size", VOCABS)
def test_logprobs(vocab_size, dtype):
    logits = random_logits(6, vocab_size, dtype)
    logits[:, vocab_size // 2] = -3.0  # a model's own logits leave something possible
    token_ids = torch.randint(0, vocab_size, (6,))
    token_ids[-1] = vocab_size // 2
    k = min(5, vocab_size)
    found = gather_logprobs(logits, token_ids, k)
    _, logprobs, ranks, _, top_logprobs = reference.gather_logprobs(logits.double(), token_ids, k)
    possible = logprobs > -torch.inf
    assert (found.logprobs > -torch.inf).equal(possible)
    assert relative_error(found.logprobs[possible], logprobs[possible]) < 2e-6
    assert found.ranks.equal(ranks)
    possible = top_logprobs > -torch.inf
    assert relative_error(found.top_logprobs[possible], top_logprobs[possible]) < 2e-6
    assert logits.float().gather(1, found.top_ids).equal(logits.float().topk(k).values)
    assert gather_logprobs(logits, token_ids, 0).top_ids.shape == (6, 0)
