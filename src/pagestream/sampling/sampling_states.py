"""SamplingStates: each state row's sampling parameters, and what penalties need to remember.

Kept twice: as tensors for the sampler's kernels, and as host values to decide, without asking the
device, which processors a batch needs. Rows are assigned by RequestStates.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from pagestream.config import ModelConfig
from pagestream.sampling.padded_rows import PaddedRows
from pagestream.scheduler.scheduler_output import NewRequest
from pagestream_kernels import count_tokens
from pagestream_kernels.transfers import to_device, to_device_together

TOP_K_OFF = 1 << 30
_GREEDY_BELOW = 1e-5
"""At such temperatures the distribution is its maximum, and the division loses meaning."""


@dataclass(slots=True)
class RowParams:
    """One row on the host: what it needs."""

    greedy: bool
    filtered: bool
    """By top_k, top_p or min_p."""
    penalties: bool
    allowed: bool
    bad_words: bool
    biased: bool
    stops: bool
    """Whether there are stop tokens, which min_tokens keeps from being drawn."""
    min_tokens_left: int
    """Output tokens still to come before a stop token may be drawn."""
    logprobs: int | None
    prompt_logprobs: int | None
    num_prompt_tokens: int


class SamplingStates:
    """Tensors by state row, off where a row does not need them. What few requests use is made when
    the first of them comes."""

    def __init__(self, max_num_seqs: int, defaults: ModelConfig, device: torch.device) -> None:
        self._defaults = defaults
        self._device = device
        self._num_states = max_num_seqs
        self._floats = torch.zeros((6, max_num_seqs), device=device)
        # Each float32 [num_states]; a temperature of 0 is a greedy row's.
        self.temperature, self.top_p, self.min_p = self._floats[:3].unbind()
        self.repetition, self.presence, self.frequency = self._floats[3:].unbind()
        self._ints = torch.zeros((2, max_num_seqs), dtype=torch.int64, device=device)
        self.top_k, self.seeds = self._ints.unbind()  # each int64 [num_states]
        self.in_prompt = torch.empty(0, dtype=torch.bool, device=device)  # [num_states, vocab_size]
        self.output_counts = torch.empty(0, dtype=torch.int32, device=device)  # the same
        self.allowed = torch.empty(0, dtype=torch.int32, device=device)  # [num_states, words]
        self.stop_ids = PaddedRows(max_num_seqs, 1, torch.int32, -1, device)
        self.bias_ids = PaddedRows(max_num_seqs, 1, torch.int32, -1, device)
        self.bias_values = PaddedRows(max_num_seqs, 1, torch.float32, 0, device)
        self.bad_endings = PaddedRows(max_num_seqs, 2, torch.int32, -1, device)
        self._rows: dict[int, RowParams] = {}

    def add(self, requests: list[tuple[int, NewRequest]]) -> None:
        """Parameters of requests in their state rows, the numbers with two copies to the device."""
        if not requests:
            return
        floats, ints = zip(*(self._add(*request) for request in requests), strict=True)
        rows = [state_idx for state_idx, _ in requests]
        numbers = to_device([rows, *zip(*ints, strict=True)], torch.int64, self._device)
        self._ints[:, numbers[0]] = numbers[1:]
        self._floats[:, numbers[0]] = to_device(
            list(zip(*floats, strict=True)), torch.float32, self._device
        )
        for state_idx, request in requests:
            self._add_lists(state_idx, self._rows[state_idx], request)

    def _add(
        self, state_idx: int, request: NewRequest
    ) -> tuple[tuple[float, ...], tuple[int, int]]:
        """What the row is in ``_floats`` and ``_ints``."""
        params, defaults = request.sampling_params, self._defaults
        temperature = _first(params.temperature, defaults.temperature, 1.0)
        top_k = int(_first(params.top_k, defaults.top_k, 0))
        top_k = min(top_k, TOP_K_OFF) if top_k > 0 else TOP_K_OFF
        top_p = _first(params.top_p, defaults.top_p, 1.0)
        greedy = temperature < _GREEDY_BELOW or top_p == 0.0 or top_k == 1
        num_output_tokens = len(request.token_ids) - request.num_prompt_tokens
        penalties = (
            params.repetition_penalty,
            params.presence_penalty,
            params.frequency_penalty,
        )
        self._rows[state_idx] = RowParams(
            greedy=greedy,
            filtered=(top_k, top_p, params.min_p) != (TOP_K_OFF, 1.0, 0.0),
            penalties=penalties != (1.0, 0.0, 0.0),
            allowed=params.allowed_token_ids is not None,
            bad_words=bool(params.bad_words_token_ids),
            biased=bool(params.logit_bias),
            stops=bool(request.stop_token_ids),
            min_tokens_left=params.min_tokens - num_output_tokens,
            logprobs=params.logprobs,
            prompt_logprobs=None if num_output_tokens else params.prompt_logprobs,
            num_prompt_tokens=request.num_prompt_tokens,
        )
        # The same 64 bits, as torch has no unsigned arithmetic on all devices.
        seed = request.seed - (1 << 64) if request.seed >> 63 else request.seed
        floats = (0.0 if greedy else temperature, top_p, params.min_p, *penalties)
        return floats, (top_k, seed)

    def remove(self, state_idx: int) -> None:
        del self._rows[state_idx]

    def row(self, state_idx: int) -> RowParams:
        return self._rows[state_idx]

    def count_tokens(self, state_rows: list[int], token_ids: torch.Tensor) -> None:
        """One more output token for each row: int64 [num_rows]."""
        penalised = []
        for index, state_idx in enumerate(state_rows):
            row = self._rows[state_idx]
            row.min_tokens_left -= 1
            if row.penalties:
                penalised.append(index)
        if penalised:
            rows, states = to_device_together([penalised, state_rows], torch.int64, self._device)
            count_tokens(self.output_counts, rows, states, token_ids)

    def _add_lists(self, state_idx: int, row: RowParams, request: NewRequest) -> None:
        params = request.sampling_params
        if params.allowed_token_ids is not None:
            num_words = -(-self._defaults.vocab_size // 32)
            if not len(self.allowed):
                shape = (self._num_states, num_words)
                self.allowed = torch.empty(shape, dtype=torch.int32, device=self._device)
            bits = np.zeros(num_words * 32, dtype=np.bool_)
            bits[list(params.allowed_token_ids)] = True
            words = np.packbits(bits, bitorder="little").view(np.int32)
            self.allowed[state_idx] = to_device(words, torch.int32, self._device)
        if row.min_tokens_left > 0 and row.stops:
            self.stop_ids.set(state_idx, sorted(request.stop_token_ids))
        if row.biased:
            self.bias_ids.set(state_idx, list(params.logit_bias))
            self.bias_values.set(state_idx, list(params.logit_bias.values()))
        if row.bad_words:
            longest = max(map(len, params.bad_words_token_ids))
            self.bad_endings.set(
                state_idx,
                [
                    [*reversed(sequence), *[-1] * (longest - len(sequence))]
                    for sequence in params.bad_words_token_ids
                ],
            )
        if row.penalties:
            self._remember(state_idx, request)

    def _remember(self, state_idx: int, request: NewRequest) -> None:
        vocab_size = self._defaults.vocab_size
        if not len(self.output_counts):
            shape = (self._num_states, vocab_size)
            self.in_prompt = torch.zeros(shape, dtype=torch.bool, device=self._device)
            self.output_counts = torch.zeros(shape, dtype=torch.int32, device=self._device)
        ids = to_device(request.token_ids, torch.int64, self._device)
        prompt, output = ids[: request.num_prompt_tokens], ids[request.num_prompt_tokens :]
        self.in_prompt[state_idx] = False
        self.in_prompt[state_idx, prompt] = True
        # Not bincount, which asks the device for the largest id.
        counts = self.output_counts[state_idx].zero_()
        counts.scatter_add_(0, output, torch.ones_like(output, dtype=torch.int32))


def _first(*values: float | None) -> float:
    return next(value for value in values if value is not None)
