"""What changes logits before a token is drawn: masks, bans, biases, penalties. All in place.

Parameters are tensors of state rows; ``idx_mapping`` says which state row each logits row belongs
to, and ``rows`` which logits rows an op is for: the host knows who asked for what, so nothing is
read to find out. Arguments that the ops have in common:

    logits: float32 [num_rows, vocab_size], contiguous.
    rows: int64 [n], distinct.
    idx_mapping: int64 [num_rows], logits row -> state row.
"""

from __future__ import annotations

import torch

from pagestream_kernels import reference
from pagestream_kernels.dispatch import kernels, runs_kernels


def apply_bitmask(
    logits: torch.Tensor,
    bitmask: torch.Tensor,
    rows: torch.Tensor | None = None,
    idx_mapping: torch.Tensor | None = None,
) -> None:
    """Set to -inf what a row's bits do not allow.

    Args:
        bitmask: int32 [num_masks, ceil(vocab_size / 32)], 1 = allowed; bit i of word w is token
            32 w + i.
        rows: None = all rows.
        idx_mapping: logits row -> row of the bitmask; None = the same.
    """
    family = kernels.logits_processors if runs_kernels(logits) else reference
    family.apply_bitmask(logits, bitmask, rows, idx_mapping)


def ban_endings(
    logits: torch.Tensor,
    rows: torch.Tensor,
    idx_mapping: torch.Tensor,
    positions: torch.Tensor,
    token_ids: torch.Tensor,
    endings: torch.Tensor,
) -> None:
    """Set to -inf each token that would complete one of its row's endings.

    Args:
        positions: int64 [num_rows], index of the token to be drawn in its sequence.
        token_ids: int32 [num_states, max_model_len], every known token of each state row.
        endings: int32 [num_states, num_endings, length], each from its last token to its first,
            then -1; nothing but -1 = none.
    """
    family = kernels.logits_processors if runs_kernels(logits) else reference
    family.ban_endings(logits, rows, idx_mapping, positions, token_ids, endings)


def ban_stop_tokens(
    logits: torch.Tensor, rows: torch.Tensor, idx_mapping: torch.Tensor, stop_ids: torch.Tensor
) -> None:
    """Set a row's stop tokens to -inf, unless nothing else is possible: a grammar that is complete
    may stop before its time.

    Args:
        stop_ids: int32 [num_states, width], distinct, -1 = none.
    """
    family = kernels.logits_processors if runs_kernels(logits) else reference
    family.ban_stop_tokens(logits, rows, idx_mapping, stop_ids)


def add_bias(
    logits: torch.Tensor,
    rows: torch.Tensor,
    idx_mapping: torch.Tensor,
    bias_ids: torch.Tensor,
    bias_values: torch.Tensor,
) -> None:
    """Add to a row's listed tokens.

    Args:
        bias_ids: int32 [num_states, width], distinct, -1 = none.
        bias_values: float32 [num_states, width].
    """
    family = kernels.logits_processors if runs_kernels(logits) else reference
    family.add_bias(logits, rows, idx_mapping, bias_ids, bias_values)


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
    """Penalise tokens that were there before.

    Args:
        in_prompt: bool [num_states, vocab_size].
        output_counts: int32 [num_states, vocab_size].
        repetition, presence, frequency: float32 [num_states]; 1, 0, 0 = off.

    Repetition divides positive logits and multiplies negative ones, for tokens of prompt and output
    (Keskar et al., 2019, CTRL); then presence and frequency are subtracted, for the output's alone
    (the OpenAI API's definition).
    """
    family = kernels.logits_processors if runs_kernels(logits) else reference
    family.apply_penalties(
        *(logits, rows, idx_mapping, in_prompt, output_counts),
        *(repetition, presence, frequency),
    )


def count_tokens(
    output_counts: torch.Tensor,
    rows: torch.Tensor,
    idx_mapping: torch.Tensor,
    token_ids: torch.Tensor,
) -> None:
    """Count one token more for each of ``rows``, for later penalties.

    Args:
        output_counts: int32 [num_states, vocab_size], updated in place.
        token_ids: int64 [num_rows]; negative (nothing allowed) counts as 0.
    """
    family = kernels.logits_processors if runs_kernels(output_counts) else reference
    family.count_tokens(output_counts, rows, idx_mapping, token_ids)
