"""Postprocessor: the engine's chunks -> what the client reads.

Owns one AnswerState per (request_key, index) from its first chunk to its last. An error is answered
only on the engine's final chunk, because an error on an earlier one leaks the ensemble's request in
tritonserver; until then a failed request's chunks are swallowed. It never sees pb_utils
(PostprocessingModel does); it asks for a stop through ``relay_stop``.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from pagestream.serving.answers import Answer, AnswerState, Chunk, joined
from pagestream.text.token_bytes import TokenBytes

logger = logging.getLogger(__name__)

CANCEL_CHECK_INTERVAL_S = 0.1
_SWEEP_INTERVAL_S = 10.0
_MISSED_HEARTBEATS = 60


@dataclass(slots=True)
class RequestState:
    """What concerns all n answers of a request."""

    num_left: int
    held: dict[int, Answer] = field(default_factory=dict)
    """Whole answers, of a request that is not streamed, until all of them are there."""
    error: str | None = None
    """Of an answer that ended before the last one: to be told on the final chunk."""


class Postprocessor:
    """``relay_stop(request_key, index)`` asks the engine to end a request."""

    def __init__(
        self,
        token_bytes: TokenBytes,
        heartbeat_interval_s: float,
        block_size: int,
        relay_stop: Callable[[str, int], None],
    ) -> None:
        self._token_bytes = token_bytes
        self._block_size = block_size
        self._relay_stop = relay_stop
        self._states: dict[tuple[str, int], AnswerState] = {}
        self._requests: dict[str, RequestState] = {}
        self._silence_limit_s = heartbeat_interval_s * _MISSED_HEARTBEATS
        self._last_sweep = time.monotonic()

    def handle(self, chunk: Chunk, is_cancelled: Callable[[], bool]) -> Answer | None:
        """The answer to this chunk, or None to send nothing for it."""
        now = time.monotonic()
        self._sweep(now)
        key = (chunk.request_key, chunk.index)
        state = self._states.get(key)
        if state is None and chunk.text_params is not None:
            state = self._open(key, chunk.text_params, now)
        if state is not None:
            state.last_chunk = now
            self._check_cancelled(key, state, is_cancelled, now)
            self._take(key, state, chunk)
        if chunk.finish_reason is None:
            return None if state is None else state.partial()
        self._states.pop(key, None)
        return self._end(state, chunk)

    def _open(self, key: tuple[str, int], text_params: str, now: float) -> AnswerState:
        """State for an answer's first chunk; already failed, and stopped, if that is unusable."""
        try:
            params = json.loads(text_params)
            state = AnswerState.open(self._token_bytes, params, self._block_size, now)
            self._requests.setdefault(key[0], RequestState(params["n"]))
        except Exception:
            logger.exception("request %s: unusable text_params", key[0])
            state = AnswerState.failed(
                self._token_bytes, "text_params is not what preprocessing makes", now
            )
            self._relay_stop(*key)
        self._states[key] = state
        return state

    def _check_cancelled(
        self,
        key: tuple[str, int],
        state: AnswerState,
        is_cancelled: Callable[[], bool],
        now: float,
    ) -> None:
        """tritonserver tells only the next step of an ensemble that its client went away, so that
        step passes it on. Asking is a round trip, hence not per token."""
        if state.cancelled or now - state.last_cancel_check < CANCEL_CHECK_INTERVAL_S:
            return
        state.last_cancel_check = now
        if is_cancelled():
            state.cancelled = True
            self._relay_stop(key[0], -1)

    def _take(self, key: tuple[str, int], state: AnswerState, chunk: Chunk) -> None:
        try:
            if state.take(chunk):
                self._relay_stop(*key)
        except Exception:
            logger.exception("request %s: its text could not be made", chunk.request_key)
            state.failure = "the text of the answer could not be made"
            self._relay_stop(key[0], -1)

    def _end(self, state: AnswerState | None, chunk: Chunk) -> Answer | None:
        """What to send when one answer has ended: nothing yet, if others of the same request are
        still to come and this one is to be told with them."""
        answer = _last_answer(state, chunk)
        request = self._requests.setdefault(chunk.request_key, RequestState(1))
        request.num_left -= 1
        if request.num_left == 0:
            del self._requests[chunk.request_key]
        request.error = request.error or answer.error
        if request.error is not None:
            return Answer(error=request.error) if request.num_left == 0 else None
        if state is None or state.params["stream"] or state.params["n"] == 1:
            return answer
        request.held[chunk.index] = answer
        return joined(request.held) if request.num_left == 0 else None

    def _sweep(self, now: float) -> None:
        """Forget requests whose engine responses have ceased: tritonserver drops the rest of a
        cancelled ensemble request without telling this step."""
        if now - self._last_sweep < _SWEEP_INTERVAL_S:
            return
        self._last_sweep = now
        for key, state in list(self._states.items()):
            if now - state.last_chunk > self._silence_limit_s:
                logger.warning("request %s: no chunk for long, forgotten", key[0])
                del self._states[key]
                self._requests.pop(key[0], None)


def _last_answer(state: AnswerState | None, chunk: Chunk) -> Answer:
    if chunk.finish_reason == "error":
        return Answer(error=chunk.error or "the engine failed")
    if state is None:
        return Answer(error=f"request_key {chunk.request_key!r} is unknown here")
    if state.failure is not None:
        return Answer(error=state.failure)
    return state.flush(chunk.finish_reason)
