"""Request: one generation job inside the engine, and RequestOutput: what a step says of it.

A Request's mutable fields belong to the scheduler alone. Identity across processes, text and
responses are not known here. Used by scheduler, engine and serving.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

from pagestream.sampling_params import SamplingParams


class RequestStatus(enum.Enum):
    WAITING = "waiting"
    RUNNING = "running"
    PREEMPTED = "preempted"
    FINISHED = "finished"


class FinishReason(enum.StrEnum):
    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


@dataclass(slots=True, eq=False)
class Request:
    """Lengths in tokens. Made by LLMEngine; from then on every field is the scheduler's."""

    request_id: str
    token_ids: list[int]
    """Every known token: the prompt, then the output as it comes."""
    num_prompt_tokens: int
    sampling_params: SamplingParams
    max_tokens: int
    """Resolved output limit: never None, never beyond what fits."""
    stop_token_ids: frozenset[int]
    """Every id that ends the request, end-of-sequence ids included unless ignored."""
    seed: int
    """Resolved: the user's or a fresh one, 64 bits."""
    arrival_time: float = 0.0
    """time.monotonic() seconds, as is deadline."""
    deadline: float | None = None
    cache_root: bytes = b""
    """Where the hash chain of its blocks starts: requests share blocks only with equal roots."""
    order: tuple[float, int] = (0.0, 0)
    """Who goes first: the smaller."""
    status: RequestStatus = RequestStatus.WAITING
    num_computed_tokens: int = 0
    """Tokens whose KV is in the cache, or will be when the steps in flight end."""
    num_slots: int = 0
    """Tokens that its blocks have room for."""
    next_cached_at: int = 0
    """Computed tokens at which a further block is full and can be found by others."""
    num_output_placeholders: int = 0
    """Tokens that steps in flight will append."""
    num_steps_in_flight: int = 0
    num_cached_tokens: int | None = None
    """Prompt tokens found in the prefix cache when it first ran."""
    queued_s: float | None = None
    """From arrival to when it first ran."""

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Of one token, under the model's own distribution; the best ones come most likely first."""

    token_id: int
    logprob: float
    rank: int
    """1: no token is more likely."""
    top_ids: list[int]
    top_logprobs: list[float]


@dataclass(slots=True)
class RequestOutput:
    """What one step added to one request. Plain data: it may cross a process boundary."""

    request_id: str
    token_ids: list[int]
    index: int = 0
    """Which of the request's n answers."""
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    """The stop_token_id that ended the request, or "deadline"; None for an end-of-sequence id, a
    limit or an abort."""
    error: str | None = None
    """With finish_reason error: a message fit for the user."""
    num_cached_tokens: int | None = None
    """Prompt tokens found in the prefix cache; with the first tokens only, as is the next."""
    queued_s: float | None = None
    """From arrival to when it first ran."""
    logprobs: list[TokenLogprobs] | None = None
    """One for each of token_ids, if wanted."""
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    """One for each prompt token, if wanted; None for the first, which nothing precedes. With the
    first tokens only."""
