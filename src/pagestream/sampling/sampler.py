"""Sampler: from logits rows to one token each.

Order of processors: grammar bitmask, min_tokens, temperature, top-k, top-p, draw. Only those that
some row of the batch needs are run, decided from host values. Holds no state: parameters come from
SamplingStates, and a draw depends only on its row's (seed, position).
"""

from __future__ import annotations

import torch

from pagestream.sampling.sampling_states import TOP_K_OFF, RowParams, SamplingStates
from pagestream_kernels import filter_top_k_top_p, gumbel_argmax


class Sampler:
    def sample(
        self,
        logits: torch.Tensor,
        states: SamplingStates,
        state_rows: list[int],
        positions: torch.Tensor,
        bitmask: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Draw one token per row: int64 [num_rows].

        Args:
            logits: [num_rows, vocab_size], any float dtype; may be overwritten.
            state_rows: state row of each logits row.
            positions: int64 [num_rows], index of the drawn token in its sequence.
            bitmask: int32 [num_rows, ceil(vocab_size / 32)], 1 = allowed.
        """
        logits = logits.to(torch.float32)
        rows = states.rows(state_rows)
        if bitmask is not None:
            _apply_bitmask(logits, bitmask)
        _forbid_early_stops(logits, rows)
        token_ids = logits.argmax(dim=-1)
        drawn = [row for row, params in enumerate(rows) if not params.greedy]
        if drawn:
            index = torch.tensor(drawn, device=logits.device)
            state_index = torch.tensor([state_rows[row] for row in drawn], device=logits.device)
            chosen = [rows[row] for row in drawn]
            scaled = logits[index]
            # From the maximum downwards, so that a low temperature cannot reach +inf.
            scaled = scaled - scaled.amax(dim=-1, keepdim=True)
            scaled /= states.temperature[state_index, None]
            top_k = states.top_k[state_index] if any(r.top_k < TOP_K_OFF for r in chosen) else None
            top_p = states.top_p[state_index] if any(r.top_p < 1.0 for r in chosen) else None
            filtered = filter_top_k_top_p(scaled, top_k, top_p)
            token_ids[index] = gumbel_argmax(filtered, states.seeds[state_index], positions[index])
        return token_ids


def _apply_bitmask(logits: torch.Tensor, bitmask: torch.Tensor) -> None:
    shifts = torch.arange(32, dtype=torch.int32, device=logits.device)
    allowed = (bitmask[:, :, None] >> shifts) & 1  # [num_rows, words, 32]
    allowed = allowed.flatten(1)[:, : logits.shape[-1]].bool()
    logits.masked_fill_(~allowed, float("-inf"))


def _forbid_early_stops(logits: torch.Tensor, rows: list[RowParams]) -> None:
    for row, params in enumerate(rows):
        if params.min_tokens_left > 0 and params.stop_token_ids:
            logits[row, params.stop_token_ids] = float("-inf")
