"""Draws and filters on CPU, against transformers and exact distributions."""

import pytest
import torch

from pagestream_kernels import (
    argmax_tokens,
    filter_thresholds,
    gather_logprobs,
    gumbel_argmax,
    reference,
)
from pagestream_kernels.cpu import filter_thresholds as cpu


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


def filtered(logits, top_k=1 << 30, top_p=1.0, min_p=0.0, temperature=1.0):
    """With the same parameters for all rows."""
    state = torch.zeros(len(logits), dtype=torch.int64)
    parameters = (torch.tensor([value]) for value in (temperature, top_k, top_p, min_p))
    thresholds = filter_thresholds(logits, state, *parameters)
    return logits.masked_fill(logits < thresholds[:, None], -torch.inf)


def test_filters_agree_with_transformers():
    from transformers import MinPLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

    logits = torch.randn(32, 500) * 3
    for k in (1, 2, 50, 500, 10**9):
        expected = TopKLogitsWarper(min(k, 500))(None, logits)
        torch.testing.assert_close(filtered(logits, top_k=k), expected)
    for p in (0.01, 0.5, 0.9, 0.999):
        expected = TopPLogitsWarper(p)(None, logits)
        actual = filtered(logits, top_p=p)
        assert ((actual == -torch.inf) != (expected == -torch.inf)).sum() <= 1
    for p in (0.001, 0.3, 1.0):
        expected = MinPLogitsWarper(p)(None, logits / 0.7)
        actual = filtered(logits, min_p=p, temperature=0.7)
        assert (actual == -torch.inf).equal(expected == -torch.inf)
    both = filtered(logits, top_k=20, top_p=0.7)
    expected = TopPLogitsWarper(0.7)(None, TopKLogitsWarper(20)(None, logits))
    torch.testing.assert_close(both, expected)


def test_filters_off_change_nothing_and_zero_keeps_the_best():
    logits = torch.randn(4, 50)
    assert filtered(logits).equal(logits)
    assert filtered(logits, top_k=3, temperature=0.0).equal(logits)
    best = filtered(logits, top_p=0.0)
    assert (best > -torch.inf).sum(-1).tolist() == [1, 1, 1, 1]
    assert best.argmax(-1).tolist() == logits.argmax(-1).tolist()


@pytest.mark.parametrize("scale", [0.0, 0.5, 4.0])
def test_filters_agree_with_their_reference(scale, monkeypatch):
    """Whether a row's best logits are enough or not: flat rows and steep ones, ties, small and
    large k, and rows where little is possible."""
    monkeypatch.setattr(cpu, "_HEAD", 1024)
    count = 300
    logits = (torch.randn(count, 3000) * scale).mul(8).round().div(8)
    logits[::7, 5:] = -torch.inf
    parameters = (
        torch.rand(count) * 2,
        torch.tensor([1, 50, 1023, 1024, 1025, 2999, 1 << 30])[torch.randint(7, (count,))],
        torch.tensor([0.0, 0.3, 0.9, 0.997, 1.0])[torch.randint(5, (count,))],
        torch.tensor([0.0, 1e-4, 0.5])[torch.randint(3, (count,))],
    )
    rows = torch.arange(count)
    thresholds = filter_thresholds(logits, rows, *parameters)
    expected = reference.filter_thresholds(logits, rows, *parameters)
    kept, wanted = logits >= thresholds[:, None], logits >= expected[:, None]
    assert (kept != wanted).any(1).sum() <= (1 if scale else 0)  # sums are rounded differently


def test_tokens_as_likely_as_the_last_one_are_kept():
    logits = torch.tensor([[2.0, 1.0, 1.0, 1.0, 0.0]])
    kept = [[0, 1, 2, 3]]
    for controls in ({"top_k": 2}, {"top_p": 0.5}, {"top_k": 3, "top_p": 0.6}):
        result = filtered(logits, **controls)
        assert [(row > -torch.inf).nonzero()[:, 0].tolist() for row in result] == kept


def test_draws_follow_the_softmax():
    """Chi-square against the exact distribution, 20,000 draws, 0.1 % significance."""
    logits = torch.tensor([1.0, 0.0, -1.0, 2.0, -torch.inf])
    count = 20_000
    state = torch.zeros(count, dtype=torch.int64)
    parameters = (torch.tensor([0.5]), torch.tensor([12345]))
    drawn = gumbel_argmax(logits.expand(count, -1), state, torch.arange(count), *parameters)
    seen = drawn.bincount(minlength=5).double()
    expected = (logits.double() / 0.5).softmax(-1) * count
    assert seen[4] == 0
    statistic = ((seen[:4] - expected[:4]) ** 2 / expected[:4]).sum()
    assert statistic < 16.27


def test_draw_depends_on_its_own_key_only():
    logits = torch.randn(6, 1000)
    seeds, positions = torch.tensor([1, 2, 3, -1, 2, 2]), torch.tensor([5, 5, 5, 5, 5, 6])
    states, temperature = torch.tensor([3, 1, 4, 0, 5, 2]), torch.ones(6)
    of_states = torch.empty_like(seeds)
    of_states[states] = seeds
    together = gumbel_argmax(logits, states, positions, temperature, of_states)
    for row in range(6):
        one = slice(row, row + 1)
        alone = gumbel_argmax(
            logits[one], torch.tensor([0]), positions[one], temperature, seeds[one]
        )
        assert alone.item() == together[row].item()


def test_greedy_rows_are_not_drawn_and_impossible_ones_give_nothing():
    logits = torch.randn(3, 1000)
    logits[2] = -torch.inf
    states = torch.tensor([1, 0, 0])
    parameters = (torch.tensor([100.0, 0.0]), torch.tensor([4, 4]))
    drawn = gumbel_argmax(logits, states, torch.arange(3), *parameters)
    best = argmax_tokens(logits)
    assert drawn[0] == best[0] == logits[0].argmax()
    assert drawn[1] != best[1]
    assert drawn[2] == best[2] == -1


def test_noise_streams_do_not_repeat():
    """Seeds that differ in any of their 64 bits, and positions, give unrelated noise."""
    seeds = torch.tensor([0, 1, 1 << 31, 1 << 32, -1, 0])
    positions = torch.tensor([0, 0, 0, 0, 0, 1])
    noise = reference.uniforms(seeds, positions, 4096)
    assert noise.min() > 0
    assert noise.max() < 1
    correlation = torch.corrcoef(noise)
    off_diagonal = correlation - torch.eye(6)
    assert off_diagonal.abs().max() < 0.08


def test_logprobs_of_rounded_logits():
    """In float32, whatever the logits are in; equal logits have the same rank."""
    logits = torch.tensor([[1.0, 3.0, 3.0, 2.0]], dtype=torch.bfloat16)
    found = gather_logprobs(logits, torch.tensor([3]), 2)
    exact = logits.double().log_softmax(-1)[0].float()
    torch.testing.assert_close(found.logprobs, exact[3:])
    assert found.ranks.tolist() == [3]
    torch.testing.assert_close(found.top_logprobs[0], exact[1:3])
