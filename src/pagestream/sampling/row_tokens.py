"""RowTokens: which sequence each logits row continues, and what is in it so far."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class RowTokens:
    state_rows: list[int]
    """State row of each logits row."""
    positions: torch.Tensor  # int64 [num_rows], index of the token to be drawn in its sequence
    token_ids: torch.Tensor  # int32 [num_states, max_seq_len], every known token of a state row
