"""SamplingStates: each state row's sampling parameters.

Kept twice: as tensors for the sampler's arithmetic, and as host values to decide, without asking
the device, which processors a batch needs. Rows are assigned by RequestStates.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from pagestream.config import ModelConfig
from pagestream.scheduler.scheduler_output import NewRequest

TOP_K_OFF = 1 << 30
_GREEDY_BELOW = 1e-5
"""At such temperatures the distribution is its maximum, and the division loses meaning."""


@dataclass(slots=True)
class RowParams:
    """One row on the host; resolved, so nothing in it is None."""

    temperature: float
    top_k: int
    top_p: float
    stop_token_ids: list[int]
    min_tokens_left: int
    """Output tokens still to come before a stop token may be drawn."""

    @property
    def greedy(self) -> bool:
        return self.temperature < _GREEDY_BELOW or self.top_p == 0.0 or self.top_k == 1


class SamplingStates:
    def __init__(self, max_num_seqs: int, defaults: ModelConfig, device: torch.device) -> None:
        self._defaults = defaults
        self.temperature = torch.ones(max_num_seqs, device=device)  # float32
        self.top_k = torch.full((max_num_seqs,), TOP_K_OFF, dtype=torch.int64, device=device)
        self.top_p = torch.ones(max_num_seqs, device=device)  # float32
        self.seeds = torch.zeros(max_num_seqs, dtype=torch.int64, device=device)
        self._rows: dict[int, RowParams] = {}

    def add(self, state_idx: int, request: NewRequest) -> None:
        params, defaults = request.sampling_params, self._defaults
        temperature = _first(params.temperature, defaults.temperature, 1.0)
        top_k = _first(params.top_k, defaults.top_k, 0)
        top_p = _first(params.top_p, defaults.top_p, 1.0)
        top_k = int(top_k) if top_k > 0 else TOP_K_OFF
        num_output_tokens = len(request.token_ids) - request.num_prompt_tokens
        self._rows[state_idx] = RowParams(
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            stop_token_ids=sorted(request.stop_token_ids),
            min_tokens_left=params.min_tokens - num_output_tokens,
        )
        self.temperature[state_idx] = temperature
        self.top_k[state_idx] = min(top_k, TOP_K_OFF)
        self.top_p[state_idx] = top_p
        # The same 64 bits, as torch has no unsigned arithmetic on all devices.
        self.seeds[state_idx] = request.seed - (1 << 64) if request.seed >> 63 else request.seed

    def remove(self, state_idx: int) -> None:
        del self._rows[state_idx]

    def rows(self, state_rows: list[int]) -> list[RowParams]:
        return [self._rows[state_idx] for state_idx in state_rows]

    def count_tokens(self, state_rows: list[int]) -> None:
        """One more output token for each row."""
        for state_idx in state_rows:
            self._rows[state_idx].min_tokens_left -= 1


def _first(*values: float | None) -> float:
    return next(value for value in values if value is not None)
