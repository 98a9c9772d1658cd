"""One token from each row of logits, and log-probabilities.

A draw is ``argmax(logits / temperature + gumbel(seed, position, token))``: exact sampling from the
softmax, with noise from a counter-based generator, so that it depends on nothing but its own row's
key. Filters are one number per row, the least logit that they leave. Parameters are tensors of
state rows, and ``idx_mapping``, int64 [num_rows], says which one each logits row belongs to.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from pagestream_kernels import reference
from pagestream_kernels.cpu import filter_thresholds as cpu
from pagestream_kernels.dispatch import kernels, runs_kernels


@dataclass(frozen=True, slots=True)
class Logprobs:
    """Of the tokens of some logits rows; k is the same for all rows."""

    token_ids: torch.Tensor  # int64 [num_rows]
    logprobs: torch.Tensor  # float32 [num_rows], of the row's token
    ranks: torch.Tensor  # int64 [num_rows], 1 = no token is more likely
    top_ids: torch.Tensor  # int64 [num_rows, k], most likely first
    top_logprobs: torch.Tensor  # float32 [num_rows, k]


def argmax_tokens(logits: torch.Tensor) -> torch.Tensor:
    """The most likely token of each row, of equal ones the first: int64 [num_rows].

    logits: [num_rows, vocab_size], any float dtype; -inf = never, and -1 where nothing is possible.
    """
    if runs_kernels(logits):
        return kernels.sampling.argmax_tokens(logits)
    return reference.argmax_tokens(logits)


def gumbel_argmax(
    logits: torch.Tensor,
    idx_mapping: torch.Tensor,
    positions: torch.Tensor,
    temperature: torch.Tensor,
    seeds: torch.Tensor,
    thresholds: torch.Tensor | None = None,
) -> torch.Tensor:
    """Draw one token per row: int64 [num_rows], -1 where nothing is possible.

    Args:
        logits: [num_rows, vocab_size], any float dtype, -inf = never.
        positions: int64 [num_rows], index of the drawn token in its sequence.
        temperature: float32 [num_states], 0 = the most likely token.
        seeds: int64 [num_states] (the request's 64 bits).
        thresholds: float32 [num_rows] from ``filter_thresholds``; None = nothing is filtered.

    Source: Gumbel-max trick (Gumbel, 1954; Maddison et al., 2014).
    """
    run = kernels.sampling.gumbel_argmax if runs_kernels(logits) else reference.gumbel_argmax
    return run(logits, idx_mapping, positions, temperature, seeds, thresholds)


def filter_thresholds(
    logits: torch.Tensor,
    idx_mapping: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
) -> torch.Tensor:
    """The least logit that a row's filters leave: float32 [num_rows], -inf = all of them.

    Args:
        logits: [num_rows, vocab_size], any float dtype, -inf = never.
        temperature: float32 [num_states], of the probabilities; 0 = the row needs no filters.
        top_k: int64 [num_states], vocab_size or more = off.
        top_p: float32 [num_states], 1 = off. The token that crosses the threshold is kept.
        min_p: float32 [num_states], 0 = off.

    min-p and top-k first, then top-p of what they leave. Tokens as likely as the last one kept are
    kept too, and so is the most likely one. Sources: Holtzman et al., 2020 (nucleus); Nguyen et
    al., 2024 (min-p); the order is transformers' and vLLM's.
    """
    run = cpu.filter_thresholds
    if runs_kernels(logits):
        run = kernels.filter_thresholds.filter_thresholds
    return run(logits, idx_mapping, temperature, top_k, top_p, min_p)


def gather_logprobs(logits: torch.Tensor, token_ids: torch.Tensor, k: int) -> Logprobs:
    """Log-softmax of each row at its token and at its k best.

    Args:
        logits: [num_rows, vocab_size], any float dtype.
        token_ids: int64 [num_rows].
    """
    family = kernels.logprobs if runs_kernels(logits) else reference
    return Logprobs(*family.gather_logprobs(logits, token_ids, k))
