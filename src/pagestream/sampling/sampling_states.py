"""SamplingStates: each state row's sampling parameters, and what penalties need to remember.

Kept twice: as tensors for the sampler's arithmetic, and as host values to decide, without asking
the device, which processors a batch needs. Rows are assigned by RequestStates.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from pagestream.config import ModelConfig
from pagestream.scheduler.scheduler_output import NewRequest
from pagestream_kernels.transfers import to_device

TOP_K_OFF = 1 << 30
_GREEDY_BELOW = 1e-5
"""At such temperatures the distribution is its maximum, and the division loses meaning."""


@dataclass(slots=True)
class RowParams:
    """One row on the host; resolved, so that every default is filled in. Tensors on the device."""

    greedy: bool
    top_k: bool
    top_p: bool
    min_p: bool
    penalties: bool
    """greedy, top_k, top_p, min_p, penalties: whether the row needs them."""
    stop_token_ids: torch.Tensor | None  # int64 [num_ids]
    min_tokens_left: int
    """Output tokens still to come before a stop token may be drawn."""
    allowed: torch.Tensor | None  # int64 [num_ids]
    bias: tuple[torch.Tensor, torch.Tensor] | None  # int64 [num_ids], float32 [num_ids]
    bad_token_ids: torch.Tensor | None  # int64 [num_ids], never drawn
    bad_endings: list[tuple[torch.Tensor, int]]
    """(int32 [length], token id): the id is not drawn after these tokens."""
    logprobs: int | None
    prompt_logprobs: int | None
    num_prompt_tokens: int


class SamplingStates:
    def __init__(self, max_num_seqs: int, defaults: ModelConfig, device: torch.device) -> None:
        self._defaults = defaults
        self._device = device
        self._num_states = max_num_seqs
        self._floats = torch.ones((6, max_num_seqs), device=device)
        # Each float32 [num_states].
        self.temperature, self.top_p, self.min_p = self._floats[:3].unbind()
        self.repetition, self.presence, self.frequency = self._floats[3:].unbind()
        self._ints = torch.zeros((2, max_num_seqs), dtype=torch.int64, device=device)
        self.top_k, self.seeds = self._ints.unbind()  # each int64 [num_states]
        # [num_states, vocab_size], made when the first request with penalties comes
        self.in_prompt = torch.empty(0, dtype=torch.bool, device=device)
        self.output_counts = torch.empty(0, dtype=torch.int32, device=device)
        self._rows: dict[int, RowParams] = {}

    def add(self, requests: list[tuple[int, NewRequest]]) -> None:
        """Parameters of requests in their state rows, all with two copies to the device."""
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
            if self._rows[state_idx].penalties:
                self._remember(state_idx, request)

    def _add(
        self, state_idx: int, request: NewRequest
    ) -> tuple[tuple[float, ...], tuple[int, int]]:
        """What the row is in ``_floats`` and ``_ints``."""
        params, defaults = request.sampling_params, self._defaults
        temperature = _first(params.temperature, defaults.temperature, 1.0)
        top_k = int(_first(params.top_k, defaults.top_k, 0))
        top_k = min(top_k, TOP_K_OFF) if top_k > 0 else TOP_K_OFF
        top_p = _first(params.top_p, defaults.top_p, 1.0)
        num_output_tokens = len(request.token_ids) - request.num_prompt_tokens
        bad = params.bad_words_token_ids
        endings = [sequence for sequence in bad if len(sequence) > 1]
        penalties = (
            params.repetition_penalty,
            params.presence_penalty,
            params.frequency_penalty,
        )
        self._rows[state_idx] = RowParams(
            greedy=temperature < _GREEDY_BELOW or top_p == 0.0 or top_k == 1,
            top_k=top_k < TOP_K_OFF,
            top_p=top_p < 1.0,
            min_p=params.min_p > 0.0,
            penalties=penalties != (1.0, 0.0, 0.0),
            stop_token_ids=self._ids(sorted(request.stop_token_ids)),
            min_tokens_left=params.min_tokens - num_output_tokens,
            allowed=self._ids(params.allowed_token_ids or ()),
            bias=self._bias(params.logit_bias),
            bad_token_ids=self._ids([sequence[0] for sequence in bad if len(sequence) == 1]),
            bad_endings=[(self._int32(sequence[:-1]), sequence[-1]) for sequence in endings],
            logprobs=params.logprobs,
            prompt_logprobs=None if num_output_tokens else params.prompt_logprobs,
            num_prompt_tokens=request.num_prompt_tokens,
        )
        # The same 64 bits, as torch has no unsigned arithmetic on all devices.
        seed = request.seed - (1 << 64) if request.seed >> 63 else request.seed
        return (temperature, top_p, params.min_p, *penalties), (top_k, seed)

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
            states_of = [state_rows[index] for index in penalised]
            rows, states = to_device([penalised, states_of], torch.int64, self._device)
            self.output_counts[states, token_ids[rows].clamp_min(0)] += 1

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

    def _ids(self, ids: list[int] | tuple[int, ...]) -> torch.Tensor | None:
        return to_device(ids, torch.int64, self._device) if ids else None

    def _int32(self, ids: tuple[int, ...]) -> torch.Tensor:
        return to_device(ids, torch.int32, self._device)

    def _bias(self, bias: dict[int, float]) -> tuple[torch.Tensor, torch.Tensor] | None:
        if not bias:
            return None
        ids = to_device(list(bias), torch.int64, self._device)
        return ids, to_device(list(bias.values()), torch.float32, self._device)


def _first(*values: float | None) -> float:
    return next(value for value in values if value is not None)
