"""Masks, bans, biases and penalties in the interpreter: exact, against their twins."""

import pytest
import torch

from pagestream_kernels import (
    add_bias,
    apply_bitmask,
    apply_penalties,
    ban_endings,
    ban_stop_tokens,
    count_tokens,
    reference,
)
from pagestream_kernels.dispatch import kernels

STATES = 7
ROWS = [4, 0, 3]
IDX_MAPPING = [2, 6, 0, 5, 1]
VOCABS = [1, 33, 600]


@pytest.fixture(autouse=True)
def _small_chunks(monkeypatch):
    """So that a row has several chunks, and a list several blocks."""
    monkeypatch.setattr(kernels.vocabulary, "CHUNK", 256)
    monkeypatch.setattr(kernels.logits_processors, "_IDS", 4)
    monkeypatch.setattr(kernels.logits_processors, "_ENDING", 4)


def mapped():
    """rows and idx_mapping of five logits rows, as tensors of the default device."""
    return torch.tensor(ROWS), torch.tensor(IDX_MAPPING)


def random_logits(vocab_size):
    logits = torch.randn(5, vocab_size) * 4
    return logits.masked_fill_(torch.rand(5, vocab_size) < 0.1, -torch.inf)


def check(op, logits, *arguments):
    """The op changes what its twin changes, and nothing in rows that it is not for."""
    twin, before = logits.clone(), logits.clone()
    op(logits, *arguments)
    getattr(reference, op.__name__)(twin, *arguments)
    torch.testing.assert_close(logits, twin, rtol=3e-7, atol=1e-6)
    others = [1, 2]
    assert logits[others].equal(before[others]) or arguments[1] is None
    return logits


def random_ids(vocab_size, *shape):
    """Distinct in each row, ``shape[-1]`` of them, -1 for a third."""
    order = torch.rand(*shape[:-1], max(vocab_size, shape[-1])).argsort(-1)[..., : shape[-1]]
    return order.masked_fill((torch.rand(shape) < 0.3) | (order >= vocab_size), -1).to(torch.int32)


@pytest.mark.parametrize("vocab_size", VOCABS)
@pytest.mark.parametrize("some", [False, True], ids=["all", "some"])
@pytest.mark.parametrize("of_states", [False, True], ids=["", "mapped"])
def test_bitmask(vocab_size, some, of_states):
    rows, idx_mapping = mapped()
    rows, idx_mapping = rows if some else None, idx_mapping if of_states else None
    shape = (STATES if some or of_states else 5, -(-vocab_size // 32))
    bitmask = torch.randint(-(2**31), 2**31 - 1, shape, dtype=torch.int32)
    bitmask[2], bitmask[4] = -1, 0
    check(apply_bitmask, random_logits(vocab_size), bitmask, rows, idx_mapping)


@pytest.mark.parametrize("length", [1, 2, 5, 9])
def test_endings(length):
    """Sequences that match, but for their last token, or that start before the row does."""
    token_ids = torch.randint(0, 3, (STATES, 40), dtype=torch.int32)
    positions = torch.tensor([0, 20, 5, 1, 39])
    endings = torch.full((STATES, 6, length), -1, dtype=torch.int32)
    for row in range(5):
        state, position = IDX_MAPPING[row], int(positions[row])
        for ending in range(5):
            endings[state, ending, 0] = ending * 7
            count = min(ending * 2, position, length - 1)
            before = token_ids[state, position - count : position]
            endings[state, ending, 1 : 1 + count] = before.flip(0)
        endings[state, 4, -1] = 28 if length == 1 else 1
        if length > 1:
            endings[state, 3, 1] = 9
    logits = torch.zeros(5, 30)
    arguments = (*mapped(), positions, token_ids, endings)
    banned = check(ban_endings, logits, *arguments) == -torch.inf
    assert banned[ROWS].any()
    assert banned[ROWS, 21].tolist() == [length == 1] * 3


@pytest.mark.parametrize("vocab_size", [40, 600])
def test_stop_tokens(vocab_size):
    """Row 3 has nothing but stop tokens at first, then one token more."""
    logits, stop_ids = random_logits(vocab_size), random_ids(vocab_size, STATES, 6)
    ids = [token_id for token_id in stop_ids[IDX_MAPPING[3]].tolist() if token_id >= 0]
    other = next(token_id for token_id in reversed(range(vocab_size)) if token_id not in ids)
    logits[3] = -torch.inf
    logits[3, ids] = 1.0
    found = check(ban_stop_tokens, logits, *mapped(), stop_ids)
    assert (found[3, ids] == 1.0).all()
    logits[3, other] = -9.0
    found = check(ban_stop_tokens, logits, *mapped(), stop_ids)
    assert (found[3] > -torch.inf).nonzero().tolist() == [[other]]


@pytest.mark.parametrize("width", [1, 4, 10])
def test_bias(width):
    bias_ids = random_ids(50, STATES, width)
    values = torch.randn(STATES, width).masked_fill(bias_ids < 0, torch.nan)
    check(add_bias, random_logits(50), *mapped(), bias_ids, values)


@pytest.mark.parametrize("vocab_size", VOCABS)
def test_penalties(vocab_size):
    check(
        apply_penalties,
        random_logits(vocab_size),
        *mapped(),
        torch.rand(STATES, vocab_size) < 0.3,
        torch.randint(-2, 4, (STATES, vocab_size), dtype=torch.int32).clamp_min(0),
        torch.rand(STATES) * 2 + 0.2,
        torch.randn(STATES),
        torch.randn(STATES),
    )


def test_counts():
    """Rows of one state with the same token, as a verified draft's."""
    idx_mapping = torch.tensor([2, 6, 2, 2, 2])
    counts = torch.randint(0, 3, (STATES, 50), dtype=torch.int32)
    token_ids, twin = torch.tensor([7, 7, 9, 7, -1]), counts.clone()
    rows, _ = mapped()
    count_tokens(counts, rows, idx_mapping, token_ids)
    reference.count_tokens(twin, rows, idx_mapping, token_ids)
    assert counts.equal(twin)
