"""OpenRequest: what the sender still owes one client, and when.

Owns coalescing: the first tokens go at once, then at most one response per interval; silence is
filled with heartbeats, so that a cancel is noticed. Pure time arithmetic, no pb_utils. Used by
EngineBridge's sender thread only.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

from pagestream.request import RequestOutput

UNSTREAMED_INTERVAL_S = 0.25
"""Nobody reads the parts of an answer that is not streamed; they only carry cancel checks."""


@dataclass(slots=True)
class OpenRequest:
    """Times are time.monotonic() seconds."""

    request_key: str
    response_sender: Any
    text_params: str | None
    num_prompt_tokens: int
    interval: float
    arrival: float
    index: int = 0
    token_ids: list[int] = field(default_factory=list)
    """Made and not yet sent."""
    num_output_tokens: int = 0
    finish_reason: str | None = None
    stop_reason: str | None = None
    error: str | None = None
    last_sent: float = field(default_factory=time.monotonic)
    last_cancel_check: float = field(default_factory=time.monotonic)
    first_token: float | None = None
    started: bool = False
    """A response with tokens has been sent."""

    def take(self, output: RequestOutput, now: float) -> None:
        self.token_ids += output.token_ids
        self.num_output_tokens += len(output.token_ids)
        if self.first_token is None and output.token_ids:
            self.first_token = now
        if output.finish_reason is not None:
            self.finish_reason = str(output.finish_reason)
            self.stop_reason = None if output.stop_reason is None else str(output.stop_reason)
            self.error = output.error

    def due(self, heartbeat: float) -> float:
        """When the next response is owed."""
        if self.finish_reason is not None or (self.token_ids and not self.started):
            return 0.0
        if self.token_ids:
            return self.last_sent + self.interval
        return self.last_sent + heartbeat

    def flush(self, now: float) -> dict[str, Any]:
        """The next response by tensor name; what it carries is no longer owed."""
        chunk = {
            "request_key": self.request_key,
            "index": self.index,
            "token_ids": self.token_ids,
            "finish_reason": self.finish_reason,
            "stop_reason": self.stop_reason,
            "error": self.error,
            "text_params": self.text_params,
        }
        self.started = self.started or bool(self.token_ids)
        self.token_ids, self.text_params, self.last_sent = [], None, now
        return chunk

    def summary(self, now: float) -> str:
        ttft = "none" if self.first_token is None else f"{self.first_token - self.arrival:.3f} s"
        return (
            f"{self.request_key}: {self.num_prompt_tokens} tokens in, {self.num_output_tokens} out,"
            f" {self.finish_reason}, first token after {ttft}, {now - self.arrival:.3f} s in all"
        )
