"""Processors of logits rows, draws from them, and log-probabilities.

A draw is ``argmax(logits + gumbel(seed, position, token))``: exact sampling from the softmax, with
noise from a counter-based generator, so that it depends on nothing but its own row's key.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from pagestream_kernels import reference


@dataclass(frozen=True, slots=True)
class Logprobs:
    """Of the tokens of some logits rows; k is the same for all rows."""

    token_ids: torch.Tensor  # int64 [num_rows]
    logprobs: torch.Tensor  # float32 [num_rows], of the row's token
    ranks: torch.Tensor  # int64 [num_rows], 1 = no token is more likely
    top_ids: torch.Tensor  # int64 [num_rows, k], most likely first
    top_logprobs: torch.Tensor  # float32 [num_rows, k]


def apply_penalties(
    logits: torch.Tensor,
    in_prompt: torch.Tensor,
    output_counts: torch.Tensor,
    repetition: torch.Tensor,
    presence: torch.Tensor,
    frequency: torch.Tensor,
) -> torch.Tensor:
    """Penalise tokens that were there before; returns a new tensor.

    Args:
        logits: float32 [num_rows, vocab_size].
        in_prompt: bool [num_rows, vocab_size].
        output_counts: int32 [num_rows, vocab_size].
        repetition, presence, frequency: float32 [num_rows]; 1, 0, 0 = off.

    Repetition divides positive logits and multiplies negative ones, for tokens of prompt and output
    (Keskar et al., 2019, CTRL); then presence and frequency are subtracted, for the output's alone
    (the OpenAI API's definition).
    """
    return reference.apply_penalties(
        logits, in_prompt, output_counts, repetition, presence, frequency
    )


def filter_min_p(logits: torch.Tensor, min_p: torch.Tensor) -> torch.Tensor:
    """Set to -inf what is less likely than ``min_p`` times the most likely; a new tensor.

    Args:
        logits: float32 [num_rows, vocab_size], temperature already applied.
        min_p: float32 [num_rows], 0 = off.

    Source: Nguyen et al., 2024.
    """
    return reference.filter_min_p(logits, min_p)


def filter_top_k_top_p(
    logits: torch.Tensor, top_k: torch.Tensor | None, top_p: torch.Tensor | None
) -> torch.Tensor:
    """Set what falls outside the top-k, then outside the nucleus, to -inf; returns a new tensor.

    Args:
        logits: float32 [num_rows, vocab_size], temperature already applied.
        top_k: int64 [num_rows], vocab_size or more = off; None = off for all rows.
        top_p: float32 [num_rows], 1 = off; None = off for all rows. The token that crosses the
            threshold is kept, as is at least one token.

    Source: Holtzman et al., 2020 (nucleus); the order is transformers' and vLLM's.
    """
    return reference.filter_top_k_top_p(logits, top_k, top_p)


def gumbel_argmax(
    logits: torch.Tensor, seeds: torch.Tensor, positions: torch.Tensor
) -> torch.Tensor:
    """Draw one token per row: int64 [num_rows].

    Args:
        logits: float32 [num_rows, vocab_size], -inf = never.
        seeds: int64 [num_rows] (the request's 64 bits).
        positions: int64 [num_rows], index of the drawn token in its sequence.

    Source: Gumbel-max trick (Gumbel, 1954; Maddison et al., 2014).
    """
    return reference.gumbel_argmax(logits, seeds, positions)


def gather_logprobs(logits: torch.Tensor, token_ids: torch.Tensor, k: int) -> Logprobs:
    """Log-softmax of each row at its token and at its k best.

    Args:
        logits: float32 [num_rows, vocab_size].
        token_ids: int64 [num_rows].
    """
    return Logprobs(*reference.gather_logprobs(logits, token_ids, k))
