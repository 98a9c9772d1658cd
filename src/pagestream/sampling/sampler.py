"""Sampler: from logits rows to one token each.

Order of processors, as vLLM's: grammar bitmask, allowed_token_ids, bad_words, min_tokens,
logit_bias, penalties, temperature, min_p, top_k, top_p, draw. Only those that some row of the batch
needs are run, for the rows that need them, decided from host values. Log-probabilities are the
model's own, from before any of them. Holds no state: parameters come from SamplingStates, and a
draw depends only on its row's (seed, position).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from pagestream.sampling.row_tokens import RowTokens
from pagestream.sampling.sampling_states import RowParams, SamplingStates
from pagestream_kernels import (
    Logprobs,
    add_bias,
    apply_bitmask,
    apply_penalties,
    argmax_tokens,
    ban_endings,
    ban_stop_tokens,
    filter_thresholds,
    gather_logprobs,
    gumbel_argmax,
)
from pagestream_kernels.transfers import to_device_together

NOTHING_ALLOWED = -1


@dataclass(frozen=True, slots=True)
class SamplerOutput:
    token_ids: torch.Tensor  # int64 [num_rows]
    logprob_rows: list[int]
    """Rows that logprobs are wanted for, each with as many best tokens as next."""
    logprob_counts: list[int]
    logprobs: Logprobs | None  # one entry per logprob row, k = the largest count


class _Needs:
    """What the rows of a batch need."""

    def __init__(self, rows: list[RowParams]) -> None:
        self.draws = any(not row.greedy for row in rows)
        self.filters = any(row.filtered and not row.greedy for row in rows)
        self.logprobs = [index for index, row in enumerate(rows) if row.logprobs is not None]
        self.processors = [
            [index for index, row in enumerate(rows) if row.allowed],
            [index for index, row in enumerate(rows) if row.bad_words],
            [index for index, row in enumerate(rows) if row.min_tokens_left > 0 and row.stops],
            [index for index, row in enumerate(rows) if row.biased],
            [index for index, row in enumerate(rows) if row.penalties],
        ]
        """Rows, in the order of the arguments of ``_process``."""

    @property
    def only_the_best(self) -> bool:
        return not (self.draws or self.logprobs or any(self.processors))


class Sampler:
    def sample(
        self,
        logits: torch.Tensor,
        states: SamplingStates,
        tokens: RowTokens,
        bitmask: torch.Tensor | None = None,
    ) -> SamplerOutput:
        """Draw one token per row; NOTHING_ALLOWED where the controls leave none.

        Args:
            logits: [num_rows, vocab_size], any float dtype.
            bitmask: int32 [num_rows, ceil(vocab_size / 32)], 1 = allowed.
        """
        rows = [states.row(state_idx) for state_idx in tokens.state_rows]
        needs = _Needs(rows)
        if needs.only_the_best and bitmask is None:
            return SamplerOutput(argmax_tokens(logits), [], [], None)
        idx_mapping, wanted, *processed = to_device_together(
            [tokens.state_rows, needs.logprobs, *needs.processors], torch.int64, logits.device
        )
        scores = logits
        if bitmask is not None or any(needs.processors):
            scores = logits.to(torch.float32, copy=True)
            if bitmask is not None:
                apply_bitmask(scores, bitmask)
            _process(scores, states, tokens, idx_mapping, *processed)
        token_ids = _draw(scores, states, tokens, idx_mapping, needs)
        counts = [row.logprobs for row in rows if row.logprobs is not None]
        logprobs = None
        if counts:
            raw = logits if len(counts) == len(rows) else logits[wanted]
            logprobs = gather_logprobs(raw, token_ids[wanted].clamp_min(0), max(counts))
        return SamplerOutput(token_ids, needs.logprobs, counts, logprobs)


def _process(
    scores: torch.Tensor,
    states: SamplingStates,
    tokens: RowTokens,
    idx_mapping: torch.Tensor,
    allowed: torch.Tensor,
    bad_words: torch.Tensor,
    min_tokens: torch.Tensor,
    biased: torch.Tensor,
    penalised: torch.Tensor,
) -> None:
    """Changes ``scores``. Each of the last five: int64, the rows that need it."""
    if len(allowed):
        apply_bitmask(scores, states.allowed, allowed, idx_mapping)
    if len(bad_words):
        endings = states.bad_endings.tensor
        ban_endings(scores, bad_words, idx_mapping, tokens.positions, tokens.token_ids, endings)
    if len(min_tokens):
        ban_stop_tokens(scores, min_tokens, idx_mapping, states.stop_ids.tensor)
    if len(biased):
        ids, values = states.bias_ids.tensor, states.bias_values.tensor
        add_bias(scores, biased, idx_mapping, ids, values)
    if len(penalised):
        apply_penalties(
            *(scores, penalised, idx_mapping, states.in_prompt, states.output_counts),
            *(states.repetition, states.presence, states.frequency),
        )


def _draw(
    scores: torch.Tensor,
    states: SamplingStates,
    tokens: RowTokens,
    idx_mapping: torch.Tensor,
    needs: _Needs,
) -> torch.Tensor:
    """int64 [num_rows]. Greedy rows have temperature 0 on the device."""
    if not needs.draws:
        return argmax_tokens(scores)
    temperature, thresholds = states.temperature, None
    if needs.filters:
        filters = (states.top_k, states.top_p, states.min_p)
        thresholds = filter_thresholds(scores, idx_mapping, temperature, *filters)
    return gumbel_argmax(
        scores, idx_mapping, tokens.positions, temperature, states.seeds, thresholds
    )
