"""OpenRequest and OpenAnswer: what the sender still owes one client, and when.

Own coalescing: the first tokens of an answer go at once, then at most one response per interval,
which follows from how many stream; silence is filled with heartbeats, so that a cancel is noticed.
Pure time arithmetic, no pb_utils. Used by EngineBridge's sender thread only.
"""

from __future__ import annotations

import json
import math
import time
from dataclasses import dataclass, field
from typing import Any

from pagestream.request import RequestOutput, TokenLogprobs

UNSTREAMED_INTERVAL_S = 0.25
"""Nobody reads the parts of an answer that is not streamed; they only carry cancel checks."""

_SMOOTH_INTERVAL_S = 0.04
_RESPONSES_PER_S_BESIDE_A_GPU = 1500
_RESPONSES_PER_S_AND_CORE = 60
"""A response costs tritonserver, postprocessing and a client on the same machine about a
CPU-millisecond in all: this many take 6 % of the cores that the model computes on."""


@dataclass(frozen=True, slots=True)
class Pace:
    """How long a streamed answer waits after a response, in seconds."""

    responses_per_s: float
    least_s: float = _SMOOTH_INTERVAL_S

    def interval(self, num_streams: int) -> float:
        return max(self.least_s, num_streams / self.responses_per_s)


def pace(stream_interval_ms: int | None, on_gpu: bool, num_cores: int) -> Pace:
    """``stream_interval_ms`` is kept to exactly, where one is given."""
    if stream_interval_ms is not None:
        return Pace(math.inf, stream_interval_ms / 1000)
    on_cpu = _RESPONSES_PER_S_AND_CORE * num_cores
    return Pace(_RESPONSES_PER_S_BESIDE_A_GPU if on_gpu else on_cpu)


@dataclass(slots=True)
class OpenAnswer:
    """One of a request's n answers. Times are time.monotonic() seconds."""

    index: int
    arrival: float
    text_params: str | None
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] | None = None
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    num_cached_tokens: int | None = None
    """text_params to num_cached_tokens: known and not yet sent."""
    queued_s: float | None = None
    num_output_tokens: int = 0
    finish_reason: str | None = None
    stop_reason: str | None = None
    error: str | None = None
    last_sent: float = field(default_factory=time.monotonic)
    first_token: float | None = None
    last_token: float | None = None
    started: bool = False
    """A response with tokens has been sent."""

    def take(self, output: RequestOutput, now: float) -> None:
        self.token_ids += output.token_ids
        self.num_output_tokens += len(output.token_ids)
        if output.logprobs is not None:
            self.logprobs = (self.logprobs or []) + output.logprobs
        if output.prompt_logprobs is not None:
            self.prompt_logprobs = output.prompt_logprobs
        if output.token_ids:
            self.last_token = now
        if self.first_token is None and output.token_ids:
            self.first_token = now
            self.num_cached_tokens, self.queued_s = output.num_cached_tokens, output.queued_s
        if output.finish_reason is not None:
            self.finish_reason = str(output.finish_reason)
            self.stop_reason = None if output.stop_reason is None else str(output.stop_reason)
            self.error = output.error

    def due(self, interval: float, heartbeat: float) -> float:
        """When the next response is owed."""
        if self.finish_reason is not None or (self.token_ids and not self.started):
            return 0.0
        return self.last_sent + (interval if self.token_ids else heartbeat)

    def flush(self, now: float) -> dict[str, Any]:
        """The next response by tensor name; what it carries is no longer owed."""
        chunk = {
            "index": self.index or None,  # 0 where it is left out: every tensor costs
            "token_ids": self.token_ids,
            "finish_reason": self.finish_reason,
            "stop_reason": self.stop_reason,
            "error": self.error,
            "num_cached_tokens": self.num_cached_tokens,
            "logprobs": _logprobs_json(self.logprobs),
            "prompt_logprobs": _logprobs_json(self.prompt_logprobs),
            "timing": None if self.finish_reason is None else self._times(),
            "text_params": self.text_params,
        }
        self.started = self.started or bool(self.token_ids)
        self.token_ids, self.text_params, self.last_sent = [], None, now
        self.logprobs = self.prompt_logprobs = self.num_cached_tokens = None
        return chunk

    def _times(self) -> str:
        """Nanoseconds of time.monotonic; null for what did not happen."""
        scheduled = None if self.queued_s is None else self.arrival + self.queued_s
        seconds = {
            "arrival": self.arrival,
            "first_scheduled": scheduled,
            "first_token": self.first_token,
            "last_token": self.last_token,
        }
        return json.dumps(
            {f"{key}_time_ns": None if s is None else round(s * 1e9) for key, s in seconds.items()}
        )


@dataclass(slots=True)
class OpenRequest:
    """``answers`` holds those that have not ended, by index."""

    request_key: str
    response_sender: Any
    num_prompt_tokens: int
    stream: bool
    answers: dict[int, OpenAnswer]
    last_cancel_check: float = field(default_factory=time.monotonic)

    def summary(self, answer: OpenAnswer, now: float) -> str:
        first = answer.first_token
        ttft = "none" if first is None else f"{first - answer.arrival:.3f} s"
        return (
            f"{self.request_key}/{answer.index}: {self.num_prompt_tokens} tokens in, "
            f"{answer.num_output_tokens} out, {answer.finish_reason}, first token after {ttft}, "
            f"{now - answer.arrival:.3f} s in all"
        )


def _logprobs_json(rows: list[TokenLogprobs] | list[TokenLogprobs | None] | None) -> str | None:
    """[[token id, logprob, rank, [id, ...], [logprob, ...]] or null, ...]"""
    if rows is None:
        return None
    plain = [
        None
        if row is None
        else [row.token_id, row.logprob, row.rank, row.top_ids, row.top_logprobs]
        for row in rows
    ]
    return json.dumps(plain, allow_nan=False)
