"""Request: one generation job inside the engine, and RequestOutput: what a step says of it.

A Request's mutable fields belong to the scheduler alone. Identity across processes, text and
responses are not known here. Used by scheduler, engine and serving.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

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


@dataclass(slots=True)
class Request:
    """Lengths in tokens; ``arrival_order`` is the scheduler's, and decides who goes first."""

    request_id: str
    prompt_token_ids: list[int]
    sampling_params: SamplingParams
    max_tokens: int
    """Resolved output limit: never None, never beyond what fits."""
    stop_token_ids: frozenset[int]
    """Every id that ends the request, end-of-sequence ids included unless ignored."""
    seed: int
    """Resolved: the user's or a fresh one, 64 bits."""
    arrival_order: int = 0
    output_token_ids: list[int] = field(default_factory=list)
    status: RequestStatus = RequestStatus.WAITING
    num_computed_tokens: int = 0
    """Tokens whose KV is in the cache, or will be when the steps in flight end."""
    num_output_placeholders: int = 0
    """Tokens that steps in flight will append."""
    num_preemptions: int = 0

    @property
    def num_tokens(self) -> int:
        return len(self.prompt_token_ids) + len(self.output_token_ids)

    @property
    def all_token_ids(self) -> list[int]:
        return self.prompt_token_ids + self.output_token_ids


@dataclass(slots=True)
class RequestOutput:
    """What one step added to one request. Plain data: it may cross a process boundary."""

    request_id: str
    token_ids: list[int]
    finish_reason: FinishReason | None = None
    stop_reason: int | None = None
    """The stop_token_id that ended the request; None for an end-of-sequence id or a limit."""
    error: str | None = None
    """With finish_reason error: a message fit for the user."""
