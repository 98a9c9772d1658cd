"""Log-probabilities of the prompt tokens that a step computes.

Runs the head over the prompt's hidden states in slices, since logits of a whole prompt would need
gigabytes, and keeps only the prompt's own tokens and the best few of each row.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from pagestream.models.registry import Model
from pagestream.runner.input_batch import InputBatch
from pagestream.runner.request_states import RequestStates
from pagestream.sampling.sampling_states import SamplingStates
from pagestream_kernels import Logprobs, gather_logprobs

_ROWS_PER_SLICE = 128


@dataclass(frozen=True, slots=True)
class PromptLogprobs:
    """Of the prompt tokens at ``position`` and after, in slices; ``count`` best ones of each."""

    position: int
    count: int
    slices: list[Logprobs]


def prompt_logprobs(
    batch: InputBatch,
    hidden: torch.Tensor,  # [num_tokens, hidden_size]
    model: Model,
    states: RequestStates,
    sampling: SamplingStates,
) -> dict[int, PromptLogprobs]:
    """By index of the scheduled request; empty when no request of the batch wants any."""
    results = {}
    start = 0
    for index, (share, state_idx) in enumerate(zip(batch.scheduled, batch.state_rows, strict=True)):
        row = sampling.row(state_idx)
        first = share.num_computed_tokens + 1  # what the first row of hidden predicts
        num_rows = min(share.num_scheduled_tokens, row.num_prompt_tokens - first)
        if row.prompt_logprobs is not None and num_rows > 0:
            slices = []
            for low in range(0, num_rows, _ROWS_PER_SLICE):
                high = min(low + _ROWS_PER_SLICE, num_rows)
                logits = model.logits(hidden[start + low : start + high])
                targets = states.token_ids[state_idx, first + low : first + high].long()
                slices.append(gather_logprobs(logits, targets, row.prompt_logprobs))
            results[index] = PromptLogprobs(first, row.prompt_logprobs, slices)
        start += share.num_scheduled_tokens
    return results
