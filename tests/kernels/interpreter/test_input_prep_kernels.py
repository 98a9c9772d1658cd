"""Input preparation and state updates in the interpreter: exact, against their twins."""

import dataclasses

import pytest
import torch

from pagestream_kernels import (
    LogitsRows,
    PreparedInputs,
    append_tokens,
    gather_logits_rows,
    prepare_inputs,
    reference,
    staged_write,
)
from pagestream_kernels.dispatch import kernels


def assert_same(actual, expected):
    for field, value in zip(dataclasses.fields(actual), expected, strict=True):
        found = getattr(actual, field.name)
        assert found.dtype == value.dtype, field.name
        assert found.equal(value), field.name


def random_state(query_lens, block_size, num_states=9, max_len=200):
    """token_ids, num_computed_tokens, block_tables, and where each request's row is."""
    idx_mapping = torch.randperm(num_states)[: len(query_lens)]
    computed = torch.randint(0, max_len - max(query_lens, default=0), (num_states,))
    for edge, state in enumerate(idx_mapping.tolist()):  # contexts that end at a block's edge
        computed[state] = max(0, block_size * (edge % 3) + edge % 3 - 1)
    token_ids = torch.randint(0, 50_000, (num_states, max_len), dtype=torch.int32)
    tables = torch.randint(0, 2**31 - 1, (num_states, -(-max_len // block_size)))
    return idx_mapping, token_ids, computed, tables.to(torch.int32)


@pytest.fixture
def _small_blocks(monkeypatch):
    """So that the loops run more than once."""
    monkeypatch.setattr(kernels.input_prep, "_SCAN", 2)
    monkeypatch.setattr(kernels.input_prep, "_TOKENS", 16)
    monkeypatch.setattr(kernels.input_prep, "_COLUMNS", 16)


@pytest.mark.parametrize("block_size", [16, 64])
@pytest.mark.parametrize("advance", [False, True])
@pytest.mark.parametrize(
    "query_lens", [[1], [0], [], [1, 1, 1, 1, 1], [5, 1, 0, 33, 2], [64, 63, 65]], ids=str
)
@pytest.mark.usefixtures("_small_blocks")
def test_prepare_inputs(query_lens, advance, block_size):
    idx_mapping, token_ids, computed, tables = random_state(query_lens, block_size)
    lengths, num_tokens = torch.tensor(query_lens, dtype=torch.int64), sum(query_lens)
    of_twin = computed.clone()
    expected = reference.prepare_inputs(
        idx_mapping, lengths, num_tokens, token_ids, of_twin, tables, block_size, advance
    )
    arguments = (idx_mapping, lengths, num_tokens, token_ids)
    again = computed.clone()
    actual = prepare_inputs(*arguments, computed, tables, block_size, advance=advance)
    assert_same(actual, expected)
    assert computed.equal(of_twin)

    device = torch.get_default_device()
    out = PreparedInputs.empty(num_tokens + 7, len(query_lens) + 3, device)
    padded = prepare_inputs(*arguments, again, tables, block_size, advance=advance, out=out)
    assert padded is out
    pads = [(0, 7), (0, 7), (-1, 7), (num_tokens, 3), (0, 3)]
    assert_same(
        padded,
        [
            torch.cat((value, torch.full((count,), pad, dtype=value.dtype)))
            for value, (pad, count) in zip(expected, pads, strict=True)
        ],
    )


@pytest.mark.parametrize("num_logits", [[1], [0], [1, 0, 4, 1, 2]], ids=str)
@pytest.mark.parametrize("width", [24, 100])
@pytest.mark.usefixtures("_small_blocks")
def test_gather_logits_rows(num_logits, width):
    query_lens = torch.tensor([count + 3 for count in num_logits])
    starts = torch.cat((torch.zeros(1), query_lens.cumsum(0))).to(torch.int32)
    num_tokens, num_rows = int(query_lens.sum()), sum(num_logits)
    hidden = torch.randn(num_tokens, width).to(torch.bfloat16)
    states = torch.randperm(20)[: len(num_logits)]
    positions = torch.randint(0, 5000, (num_tokens,))
    arguments = (hidden, starts, states, torch.tensor(num_logits), positions)
    expected = reference.gather_logits_rows(*arguments, num_rows)
    assert_same(gather_logits_rows(*arguments, num_rows), expected)

    out = LogitsRows(hidden.new_empty(num_rows + 2, width), *torch.empty(2, num_rows + 2).long())
    padded = gather_logits_rows(*arguments, num_rows, out=out)
    zeros = torch.zeros(2, width, dtype=hidden.dtype)
    pads = [zeros, torch.tensor([-1, -1]), torch.tensor([0, 0])]
    assert_same(padded, [torch.cat(pair) for pair in zip(expected, pads, strict=True)])


def test_append_tokens():
    """Rows of one state lie side by side, as a verified draft's do."""
    states = torch.tensor([3, 3, 3, -1, 0, 2, -1])
    positions = torch.tensor([7, 8, 9, 0, 1, 19, 5])
    sampled = torch.tensor([5, 5, 6, 9, -1, 2, 9])
    token_ids = torch.randint(0, 9, (4, 20), dtype=torch.int32)
    twin = token_ids.clone()
    append_tokens(states, positions, sampled, token_ids)
    reference.append_tokens(states, positions, sampled, twin)
    assert token_ids.equal(twin)
    assert token_ids[3, 7:10].tolist() == [5, 5, 6]


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64, torch.float32], ids=str)
@pytest.mark.usefixtures("_small_blocks")
def test_staged_write(dtype):
    target = torch.zeros(6, 40).to(dtype)
    rows, starts = torch.tensor([5, 0, 5, 2]), torch.tensor([0, 3, 30, 39])
    lengths = torch.tensor([9, 0, 10, 1])
    start_loc = torch.cat((torch.zeros(1), lengths.cumsum(0))).to(torch.int32)
    values = torch.randint(1, 100, (20,)).to(dtype)
    twin = target.clone()
    staged_write(target, rows, starts, start_loc, values)
    reference.staged_write(twin, rows, starts, start_loc, values)
    assert (target != 0).sum() == 20
    assert target.equal(twin)


def test_staged_write_of_one_value_per_row():
    target = torch.zeros(6, dtype=torch.int64)
    zeros = torch.zeros(2, dtype=torch.int64)
    staged_write(
        target,
        torch.tensor([4, 1]),
        zeros,
        torch.arange(3, dtype=torch.int32),
        torch.tensor([7, 8]),
    )
    assert target.tolist() == [0, 8, 0, 0, 7, 0]
