"""Sampler: from logits rows to one token each.

Order of processors, as vLLM's: grammar bitmask, allowed_token_ids, bad_words, min_tokens,
logit_bias, penalties, temperature, min_p, top_k, top_p, draw. Only those that some row of the batch
needs are run, decided from host values. Log-probabilities are the model's own, from before any of
them. Holds no state: parameters come from SamplingStates, and a draw depends only on its row's
(seed, position).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from pagestream.sampling.row_tokens import RowTokens
from pagestream.sampling.sampling_states import RowParams, SamplingStates
from pagestream_kernels import (
    Logprobs,
    apply_penalties,
    filter_min_p,
    filter_top_k_top_p,
    gather_logprobs,
    gumbel_argmax,
)
from pagestream_kernels.transfers import to_device

_NEVER = float("-inf")
NOTHING_ALLOWED = -1


@dataclass(frozen=True, slots=True)
class SamplerOutput:
    token_ids: torch.Tensor  # int64 [num_rows]
    logprob_rows: list[int]
    """Rows that logprobs are wanted for, each with as many best tokens as next."""
    logprob_counts: list[int]
    logprobs: Logprobs | None  # one entry per logprob row, k = the largest count


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
            logits: [num_rows, vocab_size], any float dtype; may be overwritten.
            bitmask: int32 [num_rows, ceil(vocab_size / 32)], 1 = allowed.
        """
        logits = logits.to(torch.float32)
        rows = [states.row(state_idx) for state_idx in tokens.state_rows]
        logprob_rows = [index for index, row in enumerate(rows) if row.logprobs is not None]
        wanted = to_device(logprob_rows, torch.int64, logits.device) if logprob_rows else None
        raw = None if wanted is None else logits[wanted]  # a copy: the rest is in place
        if bitmask is not None:
            _apply_bitmask(logits, bitmask)
        for index, row in enumerate(rows):
            _apply_row(logits[index], row, tokens, index)
        logits = _penalise(logits, rows, states, tokens.state_rows)
        best, token_ids = logits.max(dim=-1)
        _draw(token_ids, logits, rows, states, tokens)
        # Controls that contradict one another leave nothing: no token may stand in for that.
        token_ids.masked_fill_(best == _NEVER, NOTHING_ALLOWED)
        counts = [row.logprobs or 0 for row in rows if row.logprobs is not None]
        logprobs = None
        if raw is not None:
            chosen = token_ids[wanted].clamp_min(0)
            logprobs = gather_logprobs(raw, chosen, max(counts))
        return SamplerOutput(token_ids, logprob_rows, counts, logprobs)


def _apply_bitmask(logits: torch.Tensor, bitmask: torch.Tensor) -> None:
    shifts = torch.arange(32, dtype=torch.int32, device=logits.device)
    allowed = (bitmask[:, :, None] >> shifts) & 1  # [num_rows, words, 32]
    allowed = allowed.flatten(1)[:, : logits.shape[-1]].bool()
    logits.masked_fill_(~allowed, _NEVER)


def _apply_row(logits: torch.Tensor, row: RowParams, tokens: RowTokens, index: int) -> None:
    """What concerns few ids of one row: ``logits`` is [vocab_size], changed in place."""
    if row.allowed is not None:
        kept = logits[row.allowed]
        logits.fill_(_NEVER)
        logits[row.allowed] = kept
    if row.bad_token_ids is not None:
        logits[row.bad_token_ids] = _NEVER
    for ending, token_id in row.bad_endings:
        completes = (tokens.last(index, len(ending)) == ending).all()
        logits[token_id].masked_fill_(completes, _NEVER)
    if row.min_tokens_left > 0 and row.stop_token_ids is not None:
        without = logits.index_fill(0, row.stop_token_ids, _NEVER)
        # A grammar may be complete before min_tokens: then it may stop.
        logits.copy_(torch.where((without > _NEVER).any(), without, logits))
    if row.bias is not None:
        ids, values = row.bias
        logits[ids] += values


def _penalise(
    logits: torch.Tensor, rows: list[RowParams], states: SamplingStates, state_rows: list[int]
) -> torch.Tensor:
    penalised = [index for index, row in enumerate(rows) if row.penalties]
    if penalised:
        states_of = [state_rows[row] for row in penalised]
        index, state = to_device([penalised, states_of], torch.int64, logits.device)
        logits[index] = apply_penalties(
            logits[index],
            states.in_prompt[state],
            states.output_counts[state],
            states.repetition[state],
            states.presence[state],
            states.frequency[state],
        )
    return logits


def _draw(
    token_ids: torch.Tensor,
    logits: torch.Tensor,
    rows: list[RowParams],
    states: SamplingStates,
    tokens: RowTokens,
) -> None:
    """Overwrite the greedy token of every row that is to be drawn."""
    drawn = [index for index, row in enumerate(rows) if not row.greedy]
    if not drawn:
        return
    states_of = [tokens.state_rows[row] for row in drawn]
    index, state = to_device([drawn, states_of], torch.int64, logits.device)
    chosen = [rows[row] for row in drawn]
    scaled = logits[index]
    # From the maximum downwards, so that a low temperature cannot reach +inf.
    scaled = scaled - scaled.amax(dim=-1, keepdim=True)
    scaled /= states.temperature[state, None]
    if any(row.min_p for row in chosen):
        scaled = filter_min_p(scaled, states.min_p[state])
    top_k = states.top_k[state] if any(row.top_k for row in chosen) else None
    top_p = states.top_p[state] if any(row.top_p for row in chosen) else None
    filtered = filter_top_k_top_p(scaled, top_k, top_p)
    token_ids[index] = gumbel_argmax(filtered, states.seeds[state], tokens.positions[index])
