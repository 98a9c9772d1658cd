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
    texts: list[str] = field(default_factory=list)
    """Parts, none of them empty: joining an ever longer text per token would be quadratic."""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[Any] = field(default_factory=list)
    """texts, token_ids, logprobs (rows as the engine sends them): produced and not yet sent."""
    index: int = 0
    num_output_tokens: int = 0
    """Of the whole answer, also what has been sent."""
    cum_log_prob: float = 0.0
    num_cached_tokens: int = 0
    prompt_logprobs: str | None = None
    times: dict[str, int | None] | None = None
    """The engine's clock readings, once the answer has ended."""
    stop: str | None = None
    stop_reason: str | None = None
    failure: str | None = None
    answered: bool = False
    """A response has been sent."""
    block_size: int = 1
    cancelled: bool = False
    last_cancel_check: float = 0.0
    last_chunk: float = 0.0

    @classmethod
    def open(
        cls, token_bytes: TokenBytes, params: dict[str, Any], block_size: int, now: float
    ) -> AnswerState:
        """From preprocessing's text_params; KeyError or TypeError if it is not that."""
        decoder = StreamDecoder(
            token_bytes,
            params["prompt_tail"],
            stop=tuple(params["stop"]),
            skip_special_tokens=params["skip_special_tokens"],
            include_stop_str_in_output=params["include_stop_str_in_output"],
            min_tokens=params["min_tokens"],
        )
        state = cls(decoder, token_bytes, params, block_size=block_size, last_chunk=now)
        state._add_text(params["echo"])
        return state

    @classmethod
    def failed(cls, token_bytes: TokenBytes, message: str, now: float) -> AnswerState:
        return cls(StreamDecoder(token_bytes, []), token_bytes, {}, failure=message, last_chunk=now)

    def take(self, chunk: Chunk) -> bool:
        """Absorb a chunk; whether the engine must be told to stop, because a stop string came."""
        self.index = chunk.index
        if chunk.timing is not None:
            self.times = json.loads(chunk.timing)
        if self.failure is not None or self.stop is not None:
            return False
        if chunk.num_cached_tokens is not None:
            self.num_cached_tokens = chunk.num_cached_tokens
        if chunk.prompt_logprobs is not None:
            self.prompt_logprobs = self._named(json.loads(chunk.prompt_logprobs))
        ended_by_token = chunk.finish_reason == "stop"
        delta = self.decoder.append(chunk.token_ids, last_is_stop=ended_by_token)
        token_ids = chunk.token_ids[: delta.num_tokens]
        self._add_text(delta.text)
        self.token_ids += token_ids
        self.num_output_tokens += len(token_ids)
        if chunk.logprobs is not None:
            rows = json.loads(chunk.logprobs)[: delta.num_tokens]
            self.logprobs += rows
            self.cum_log_prob += sum(row[1] for row in rows)
        self.stop_reason = self._special_stop(chunk) or chunk.stop_reason
        if delta.stop is None and chunk.finish_reason is not None:
            delta = self.decoder.finish()
            self._add_text(delta.text)
        if delta.stop is not None:
            self.stop = self.stop_reason = delta.stop
        return delta.stop is not None and chunk.finish_reason is None

    def _special_stop(self, chunk: Chunk) -> str | None:
        """The stop string that is the special token at the end. The engine knows its id only,
        which preprocessing has put among the stop tokens."""
        last = chunk.token_ids[-1] if chunk.finish_reason == "stop" and chunk.token_ids else -1
        text = self.token_bytes.text(last) if last in self.token_bytes.special_ids else ""
        return text if text in self.params["stop"] else None

    def partial(self) -> Answer | None:
        """What a chunk in the middle of the answer makes known, if anything."""
        if self.failure is not None or self.stop is not None or not self.params["stream"]:
            return None
        # A silent HTTP stream gets one empty response, or its client's going would stay unseen
        # for as long as the request waits.
        opening = self.params["http_stream"] and not (self.answered or self.token_ids)
        return self.flush(None) if self.texts or opening else None

    def flush(self, finish_reason: str | None) -> Answer:
        """All that is not yet sent; with the reason, if this is the last of it."""
        params = self.params
        if finish_reason is not None and self.stop is not None:
            finish_reason = "stop"
        made = self._values(finish_reason)
        # A value that is not known, or not for this response, is left out.
        answer = Answer(
            {name: made[name] for name in params["outputs"] if made.get(name) is not None}
        )
        self.texts, self.token_ids, self.logprobs = [], [], []
        self.prompt_logprobs = None
        self.answered = True
        return answer

    def _add_text(self, text: str) -> None:
        if text:
            self.texts.append(text)

    def _values(self, finish_reason: str | None) -> dict[str, Any]:
        """Every output this response could have. Lists have one entry for this answer."""
        params = self.params
        # vLLM's backend spells "not finished" as the text None.
        unfinished = "None" if params["convention"] == "vllm" else ""
        values = {
            "text_output": ["".join(self.texts)],
            "finish_reason": [finish_reason or unfinished],
            "num_input_tokens": params["num_input_tokens"],
            "num_output_tokens": [len(self.token_ids)],
            "output_token_ids": self.token_ids,
            "prompt_token_logprobs": self.prompt_logprobs,
            "cum_log_probs": [self.cum_log_prob],
            "cumulative_logprob": [self.cum_log_prob],
            "output_log_probs": [[row[1] for row in self.logprobs]],
        }
        # Every tensor of a response costs, so what few ask for comes with an answer's end;
        # the vLLM backend repeats it.
        if finish_reason is not None or params["convention"] == "vllm":
            values["stop_reason"] = [self.stop_reason or ""]
            values["num_cached_tokens"] = [self.num_cached_tokens]
        if finish_reason is not None or params["n"] > 1:
            values |= {"index": [self.index], "batch_index": [0], "sequence_index": [self.index]}
        if "output_logprobs" in params["outputs"]:
            values["output_logprobs"] = [self._named(self.logprobs)]
        if finish_reason is not None and self.times is not None:
            values |= self._metrics(self.times)
        return values

    def _metrics(self, times: dict[str, int | None]) -> dict[str, Any]:
        # The last token's keys and values are never computed.
        num_tokens = self.params["num_input_tokens"] + self.num_output_tokens - 1
        total = -(-num_tokens // self.block_size)
        reused = self.num_cached_tokens // self.block_size
        return {
            "timing": [json.dumps(_milliseconds(times))],
            "kv_cache_alloc_total_blocks": [total],
            "kv_cache_reused_blocks": [reused],
            "kv_cache_alloc_new_blocks": [total - reused],
            **{name: [value or 0] for name, value in times.items()},
        }

    def _named(self, rows: list[Any]) -> str:
        """Rows as vLLM writes them, as JSON: {token id: {logprob, rank, decoded_token}}."""
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
        return json.dumps(named, allow_nan=False) if named else "null"


def joined(answers: dict[int, Answer]) -> Answer:
    """The n answers of a request that is not streamed, as one response, in order.

    Rows of log-probabilities are filled up with zeros to the longest answer.
    """
    ordered = [answer.outputs for _, answer in sorted(answers.items())]
    outputs: dict[str, Any] = {}
    for name, value in ordered[0].items():
        outputs[name] = value
        if isinstance(value, list):
            outputs[name] = [item for other in ordered for item in other.get(name, [])]
    if "output_log_probs" in outputs:
        rows = outputs["output_log_probs"]
        longest = max(map(len, rows))
        outputs["output_log_probs"] = [row + [0.0] * (longest - len(row)) for row in rows]
    return Answer(outputs)


def _milliseconds(times: dict[str, int | None]) -> dict[str, float | None]:
    """From the request's arrival, as the client reads them in ``timing``."""
    arrival = times["arrival_time_ns"] or 0
    moments = {
        "queued_ms": times["first_scheduled_time_ns"],
        "ttft_ms": times["first_token_time_ns"],
        "e2e_ms": times["last_token_time_ns"],
    }
    return {
        name: None if moment is None else round((moment - arrival) / 1e6, 3)
        for name, moment in moments.items()
    }
