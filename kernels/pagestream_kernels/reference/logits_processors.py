"""Processors of logits rows in plain torch; see ``pagestream_kernels.logits_processors``."""

from __future__ import annotations

import torch

_NEVER = float("-inf")


def apply_bitmask(
    logits: torch.Tensor,
    bitmask: torch.Tensor,
    rows: torch.Tensor | None,
    idx_mapping: torch.Tensor | None,
) -> None:
    if rows is not None:
        bitmask = bitmask[rows if idx_mapping is None else idx_mapping[rows]]
    elif idx_mapping is not None:
        bitmask = bitmask[idx_mapping]
    shifts = torch.arange(32, dtype=torch.int32, device=logits.device)
    allowed = (bitmask[:, :, None] >> shifts) & 1  # [num_rows, words, 32]
    forbidden = allowed.flatten(1)[:, : logits.shape[-1]] == 0
    if rows is None:
        logits.masked_fill_(forbidden, _NEVER)
    else:
        logits[rows] = logits[rows].masked_fill_(forbidden, _NEVER)


def ban_endings(
    logits: torch.Tensor,
    rows: torch.Tensor,
    idx_mapping: torch.Tensor,
    positions: torch.Tensor,
    token_ids: torch.Tensor,
    endings: torch.Tensor,
) -> None:
    before = torch.arange(1, endings.shape[2], device=logits.device)
    for row, state in zip(rows.tolist(), idx_mapping[rows].tolist(), strict=True):
        at = positions[row] - before
        last = token_ids[state, at.clamp_min(0)].masked_fill(at < 0, -1)  # [length - 1]
        banned, wanted = endings[state, :, 0], endings[state, :, 1:]
        completed = ((wanted < 0) | (wanted == last)).all(dim=1) & (banned >= 0)
        logits[row, banned[completed].long()] = _NEVER


def ban_stop_tokens(
    logits: torch.Tensor, rows: torch.Tensor, idx_mapping: torch.Tensor, stop_ids: torch.Tensor
) -> None:
    for row, state in zip(rows.tolist(), idx_mapping[rows].tolist(), strict=True):
        ids = stop_ids[state]
        without = logits[row].index_fill(0, ids[ids >= 0].long(), _NEVER)
        if (without > _NEVER).any():
            logits[row] = without


def add_bias(
    logits: torch.Tensor,
    rows: torch.Tensor,
    idx_mapping: torch.Tensor,
    bias_ids: torch.Tensor,
    bias_values: torch.Tensor,
) -> None:
    for row, state in zip(rows.tolist(), idx_mapping[rows].tolist(), strict=True):
        real = bias_ids[state] >= 0
        logits[row, bias_ids[state][real].long()] += bias_values[state][real]


def apply_penalties(
    logits: torch.Tensor,
    rows: torch.Tensor,
    idx_mapping: torch.Tensor,
    in_prompt: torch.Tensor,
    output_counts: torch.Tensor,
    repetition: torch.Tensor,
    presence: torch.Tensor,
    frequency: torch.Tensor,
) -> None:
    states = idx_mapping[rows]
    x, counts = logits[rows], output_counts[states]
    in_output = counts > 0
    factor = torch.where(in_prompt[states] | in_output, repetition[states, None], 1.0)
    x = torch.where(x > 0, x / factor, x * factor)
    logits[rows] = x - presence[states, None] * in_output - frequency[states, None] * counts


def count_tokens(
    output_counts: torch.Tensor,
    rows: torch.Tensor,
    idx_mapping: torch.Tensor,
    token_ids: torch.Tensor,
) -> None:
    one = torch.ones((), dtype=output_counts.dtype, device=output_counts.device)
    where = (idx_mapping[rows], token_ids[rows].clamp_min(0))
    output_counts.index_put_(where, one, accumulate=True)
