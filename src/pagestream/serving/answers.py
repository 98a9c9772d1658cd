"""AnswerState: one answer on its way from token ids to responses; Chunk in, Answer out.

Owns what has been made and not yet sent: text, ids, log-probabilities and counts, which always end
at the same token. It knows neither other answers nor when a request is over (Postprocessor does).
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

from pagestream.text.stream_decoder import StreamDecoder
from pagestream.text.token_bytes import TokenBytes


@dataclass(frozen=True, slots=True)
class Chunk:
    """One engine response. ``finish_reason`` is set on the last one of an answer."""

    request_key: str
    index: int
    token_ids: list[int]
    finish_reason: str | None = None
    stop_reason: str | None = None
    error: str | None = None
    num_cached_tokens: int | None = None
    logprobs: str | None = None
    prompt_logprobs: str | None = None
    timing: str | None = None
    text_params: str | None = None


@dataclass(frozen=True, slots=True)
class Answer:
    """One response to the client: outputs by tensor name, or an error."""

    outputs: dict[str, Any] = field(default_factory=dict)
    error: str | None = None


@dataclass(slots=True)
class AnswerState:
    decoder: StreamDecoder
    token_bytes: TokenBytes
    params: dict[str, Any]
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[Any] = field(default_factory=list)
    """text, token_ids, logprobs: produced and not yet sent."""
    index: int = 0
    num_cached_tokens: int = 0
    prompt_logprobs: str = "null"
    timing: str = "null"
    stop: str | None = None
    stop_reason: str | None = None
    failure: str | None = None
    answered: bool = False
    """A response has been sent."""
    cancelled: bool = False
    last_cancel_check: float = 0.0
    last_chunk: float = 0.0

    @classmethod
    def open(cls, token_bytes: TokenBytes, params: dict[str, Any], now: float) -> AnswerState:
        """From preprocessing's text_params; KeyError or TypeError if it is not that."""
        decoder = StreamDecoder(
            token_bytes,
            params["prompt_tail"],
            stop=tuple(params["stop"]),
            skip_special_tokens=params["skip_special_tokens"],
            include_stop_str_in_output=params["include_stop_str_in_output"],
            min_tokens=params["min_tokens"],
        )
        return cls(decoder, token_bytes, params, last_chunk=now)

    @classmethod
    def failed(cls, token_bytes: TokenBytes, message: str, now: float) -> AnswerState:
        return cls(StreamDecoder(token_bytes, []), token_bytes, {}, failure=message, last_chunk=now)

    def take(self, chunk: Chunk) -> bool:
        """Absorb a chunk; whether the engine must be told to stop, because a stop string came."""
        self.index = chunk.index
        if chunk.timing is not None:
            self.timing = chunk.timing
        if self.failure is not None or self.stop is not None:
            return False
        if chunk.num_cached_tokens is not None:
            self.num_cached_tokens = chunk.num_cached_tokens
        if chunk.prompt_logprobs is not None:
            self.prompt_logprobs = json.dumps(self._named(json.loads(chunk.prompt_logprobs)))
        ended_by_token = chunk.finish_reason == "stop"
        delta = self.decoder.append(chunk.token_ids, last_is_stop=ended_by_token)
        token_ids = chunk.token_ids[: delta.num_tokens]
        self.text += delta.text
        self.token_ids += token_ids
        if chunk.logprobs is not None:
            self.logprobs += self._named(json.loads(chunk.logprobs)[: delta.num_tokens])
        self.stop_reason = chunk.stop_reason
        if delta.stop is not None:
            self.stop = self.stop_reason = delta.stop
            return chunk.finish_reason is None
        if chunk.finish_reason is not None:
            self.text += self.decoder.finish()
        return False

    def partial(self) -> Answer | None:
        """What a chunk in the middle of the answer makes known, if anything."""
        if self.failure is not None or self.stop is not None or not self.params["stream"]:
            return None
        # A silent HTTP stream gets one empty response, or its client's going would stay unseen
        # for as long as the request waits.
        opening = self.params["http_stream"] and not (self.answered or self.token_ids)
        return self.flush(None) if self.text or opening else None

    def flush(self, finish_reason: str | None) -> Answer:
        """All that is not yet sent; with the reason, if this is the last of it."""
        params = self.params
        if finish_reason is not None and self.stop is not None:
            finish_reason = "stop"
        # vLLM's backend spells "not finished" as the text None.
        unfinished = "None" if params["convention"] == "vllm" else ""
        answer = Answer(
            {
                "text_output": [self.text],
                "finish_reason": [finish_reason or unfinished],
                "stop_reason": [self.stop_reason or ""],
                "index": [self.index],
                "num_input_tokens": params["num_input_tokens"],
                "num_output_tokens": [len(self.token_ids)],
                "num_cached_tokens": [self.num_cached_tokens],
                "output_token_ids": self.token_ids if params["return_token_ids"] else [],
                "output_logprobs": [json.dumps(self.logprobs) if self.logprobs else "null"],
                "prompt_token_logprobs": self.prompt_logprobs,
                "timing": [self.timing],
            }
        )
        self.text, self.token_ids, self.logprobs = "", [], []
        self.prompt_logprobs = "null"
        self.answered = True
        return answer

    def _named(self, rows: list[Any]) -> list[Any]:
        """Rows as vLLM writes them: {token id: {logprob, rank, decoded_token}}."""
        named: list[Any] = []
        for row in rows:
            if row is None:
                named.append(None)
                continue
            own_id, own_logprob, own_rank, top_ids, top_logprobs = row
            ranked = zip(top_ids, top_logprobs, range(1, len(top_ids) + 1), strict=True)
            entries = {token_id: (logprob, rank) for token_id, logprob, rank in ranked}
            entries[own_id] = own_logprob, own_rank
            named.append(
                {
                    str(token_id): {
                        "logprob": logprob,
                        "rank": rank,
                        "decoded_token": self.token_bytes.text(token_id),
                    }
                    for token_id, (logprob, rank) in entries.items()
                }
            )
        return named


def joined(answers: dict[int, Answer]) -> Answer:
    """The n answers of a request that is not streamed, as one response, in order."""
    outputs: dict[str, Any] = {}
    for _, answer in sorted(answers.items()):
        for name, value in answer.outputs.items():
            if not isinstance(value, list):
                outputs.setdefault(name, value)
            else:
                outputs[name] = outputs.get(name, []) + value
    return Answer(outputs)
