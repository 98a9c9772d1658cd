"""Filters and draws over logits rows.

A draw is ``argmax(logits + gumbel(seed, position, token))``: exact sampling from the softmax, with
noise from a counter-based generator, so that it depends on nothing but its own row's key.
"""

from __future__ import annotations

import torch

from pagestream_kernels import reference


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
