"""Postprocessor: the engine's chunks -> what the client reads.

Owns one AnswerState per (request_key, index) from its first chunk to its final one. An error is
answered only on the engine's final chunk, because an error on an earlier one leaks the ensemble's
request in tritonserver; until then a failed request's chunks are swallowed. It never sees pb_utils
(PostprocessingModel does); it asks for a stop through ``relay_stop``.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from pagestream.text.stream_decoder import StreamDecoder
from pagestream.text.token_bytes import TokenBytes

logger = logging.getLogger(__name__)

CANCEL_CHECK_INTERVAL_S = 0.1
_SWEEP_INTERVAL_S = 10.0
_MISSED_HEARTBEATS = 60


@dataclass(frozen=True, slots=True)
class Chunk:
    """One engine response. ``finish_reason`` is set on the final one."""

    request_key: str
    index: int
    token_ids: list[int]
    finish_reason: str | None = None
    stop_reason: str | None = None
    error: str | None = None
    text_params: str | None = None


@dataclass(frozen=True, slots=True)
class Answer:
    """One response to the client: outputs by tensor name, or an error."""

    outputs: dict[str, Any] = field(default_factory=dict)
    error: str | None = None


@dataclass(slots=True)
class AnswerState:
    decoder: StreamDecoder
    params: dict[str, Any]
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    num_output_tokens: int = 0
    """text, token_ids, num_output_tokens: produced and not yet sent."""
    stop: str | None = None
    failure: str | None = None
    cancelled: bool = False
    last_cancel_check: float = 0.0
    last_chunk: float = 0.0
    answered: bool = False
    """A response has been sent."""


class Postprocessor:
    """``relay_stop(request_key, index)`` asks the engine to end a request."""

    def __init__(
        self,
        token_bytes: TokenBytes,
        heartbeat_interval_s: float,
        relay_stop: Callable[[str, int], None],
    ) -> None:
        self._token_bytes = token_bytes
        self._relay_stop = relay_stop
        self._states: dict[tuple[str, int], AnswerState] = {}
        self._silence_limit_s = heartbeat_interval_s * _MISSED_HEARTBEATS
        self._last_sweep = time.monotonic()

    def handle(self, chunk: Chunk, is_cancelled: Callable[[], bool]) -> Answer | None:
        """The answer to this chunk, or None to send nothing for it."""
        now = time.monotonic()
        self._sweep(now)
        key = (chunk.request_key, chunk.index)
        state = self._states.get(key)
        if state is None:
            state = self._open(key, chunk, now)
        if state is not None:
            state.last_chunk = now
            self._check_cancelled(key, state, is_cancelled, now)
            try:
                self._take(key, state, chunk)
            except Exception:
                logger.exception("request %s: its text could not be made", chunk.request_key)
                self._fail(key, state, "the text of the answer could not be made")
        if chunk.finish_reason is None:
            return self._partial(state)
        self._states.pop(key, None)
        return self._final(state, chunk)

    def _open(self, key: tuple[str, int], chunk: Chunk, now: float) -> AnswerState | None:
        """State for a request's first chunk; None, and the request stopped, if it has none."""
        if chunk.text_params is None:
            return None
        try:
            params = json.loads(chunk.text_params)
            decoder = StreamDecoder(
                self._token_bytes,
                params["prompt_tail"],
                stop=tuple(params["stop"]),
                skip_special_tokens=params["skip_special_tokens"],
                include_stop_str_in_output=params["include_stop_str_in_output"],
                min_tokens=params["min_tokens"],
            )
        except Exception:
            logger.exception("request %s: unusable text_params", chunk.request_key)
            params, decoder = {}, StreamDecoder(self._token_bytes, [])
            state = AnswerState(decoder, params, last_chunk=now)
            self._fail(key, state, "text_params is not what preprocessing makes")
        else:
            state = AnswerState(decoder, params, last_chunk=now)
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
            self._relay_stop(*key)

    def _take(self, key: tuple[str, int], state: AnswerState, chunk: Chunk) -> None:
        if state.failure is not None or state.stop is not None:
            return
        ended_by_token = chunk.finish_reason == "stop"
        delta = state.decoder.append(chunk.token_ids, last_is_stop=ended_by_token)
        state.text += delta.text
        state.token_ids += chunk.token_ids[: delta.num_tokens]
        state.num_output_tokens += delta.num_tokens
        if delta.stop is not None:
            state.stop = delta.stop
            if chunk.finish_reason is None:
                self._relay_stop(*key)
        elif chunk.finish_reason is not None:
            state.text += state.decoder.finish()

    def _fail(self, key: tuple[str, int], state: AnswerState, message: str) -> None:
        state.failure = message
        self._relay_stop(*key)

    def _partial(self, state: AnswerState | None) -> Answer | None:
        if state is None or state.failure is not None or state.stop is not None:
            return None
        # A silent HTTP stream gets one empty response, or its client's going would stay unseen
        # for as long as the request waits.
        opening = state.params["http_stream"] and not (state.answered or state.num_output_tokens)
        if not state.params["stream"] or not (state.text or opening):
            return None
        return self._flush(state, None)

    def _final(self, state: AnswerState | None, chunk: Chunk) -> Answer:
        if chunk.finish_reason == "error":
            return Answer(error=chunk.error or "the engine failed")
        if state is None:
            return Answer(error=f"request_key {chunk.request_key!r} is unknown here")
        if state.failure is not None:
            return Answer(error=state.failure)
        return self._flush(state, "stop" if state.stop is not None else chunk.finish_reason)

    def _flush(self, state: AnswerState, finish_reason: str | None) -> Answer:
        params = state.params
        # vLLM's backend spells "not finished" as the text None.
        unfinished = "None" if params["convention"] == "vllm" else ""
        answer = Answer(
            {
                "text_output": state.text,
                "finish_reason": finish_reason or unfinished,
                "num_input_tokens": params["num_input_tokens"],
                "num_output_tokens": state.num_output_tokens,
                "output_token_ids": state.token_ids if params["return_token_ids"] else [],
            }
        )
        state.text, state.token_ids, state.num_output_tokens = "", [], 0
        state.answered = True
        return answer

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
