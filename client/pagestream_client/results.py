"""What comes back: StreamChunk (one response) and Completion (a whole answer, with its timings).

Decodes the output tensors of the three ensembles, whatever their integer widths and batch
dimension. Knows nothing of connections; ``client`` makes both kinds of value.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from tritonclient.grpc import InferResult, service_pb2

Logprobs = list[dict[str, dict[str, Any]] | None]
"""Per token: {token id: {logprob, rank, decoded_token}}, of the token and of the best ones."""


@dataclass(frozen=True)
class StreamChunk:
    """The text and the tokens that are new in one response, of one answer."""

    text_output: str
    finish_reason: str
    """Empty until the answer's last chunk, then stop, length or abort."""
    num_input_tokens: int | None
    """Of the whole prompt, the same in every chunk; None where the model does not say."""
    num_output_tokens: int | None
    """Of this chunk; the sum over the chunks is the total."""
    output_token_ids: tuple[int, ...]
    """Of this chunk; empty unless return_token_ids was asked for."""
    received_at: float
    """``time.monotonic()`` at arrival."""
    index: int = 0
    """Which of the n answers."""
    stop_reason: str = ""
    """The stop string or stop token id that ended the answer, or deadline."""
    num_cached_tokens: int | None = None
    """Of the prompt, found in the prefix cache."""
    output_logprobs: Logprobs | None = None
    """Of this chunk, if asked for."""
    prompt_token_logprobs: Logprobs | None = None
    """In the first chunk of an answer, if asked for."""
    timing: dict[str, float | None] | None = None
    """In the last chunk of an answer: queued_ms, ttft_ms, e2e_ms, as the server saw them."""


def read_chunks(response: service_pb2.ModelInferResponse, received_at: float) -> list[StreamChunk]:
    """One chunk per answer in the response: several only for n > 1 without streaming."""
    result = InferResult(response)
    texts = _strings(result, "text_output")
    counts = _counts(result, "num_output_tokens")
    ids = _counts(result, "output_token_ids")
    chunks = []
    for place, text in enumerate(texts):
        own = counts[place] if place < len(counts) else None
        num_ids = len(ids) if len(texts) == 1 else own or 0
        reason = _at(_strings(result, "finish_reason"), place, "")
        chunks.append(
            StreamChunk(
                text_output=text,
                # `vllm` spells "not finished" as its backend does, as the text None.
                finish_reason="" if reason == "None" else reason,
                num_input_tokens=_at(_counts(result, "num_input_tokens"), 0, None),
                num_output_tokens=own,
                output_token_ids=tuple(ids[:num_ids]),
                received_at=received_at,
                index=_at(_counts(result, "index"), place, 0),
                stop_reason=_at(_strings(result, "stop_reason"), place, ""),
                num_cached_tokens=_at(_counts(result, "num_cached_tokens"), place, None),
                output_logprobs=_json(result, "output_logprobs", place)
                or _json(result, "logprobs", place),  # the name on `vllm`
                prompt_token_logprobs=_json(result, "prompt_token_logprobs", 0),
                timing=_json(result, "timing", place),
            )
        )
        ids = ids[num_ids:]
    return chunks


@dataclass(frozen=True)
class Completion:
    """A whole answer. Times are seconds seen by the client."""

    text_output: str
    finish_reason: str
    num_input_tokens: int | None
    num_output_tokens: int | None
    output_token_ids: tuple[int, ...]
    ttft_s: float
    """Time to first token: from sending the request to the first response."""
    tpot_s: float | None
    """Time per output token after the first response; None when there was only one."""
    latency_s: float
    """From sending the request to the last response."""
    num_chunks: int
    index: int = 0
    stop_reason: str = ""
    num_cached_tokens: int | None = None
    output_logprobs: Logprobs | None = None
    prompt_token_logprobs: Logprobs | None = None
    timing: dict[str, float | None] | None = None
    """The server's own: queued_ms, ttft_ms, e2e_ms."""

    @classmethod
    def from_chunks(cls, chunks: Iterable[StreamChunk], started_at: float) -> Completion:
        """Of the chunks of one answer."""
        chunks = list(chunks)
        if not chunks:
            raise ValueError("an answer needs at least one chunk")
        first, last = chunks[0], chunks[-1]
        counts = [
            chunk.num_output_tokens for chunk in chunks if chunk.num_output_tokens is not None
        ]
        later_tokens = sum(counts) - (first.num_output_tokens or 0)
        logprobs = [row for chunk in chunks for row in chunk.output_logprobs or []]
        prompt = [chunk.prompt_token_logprobs for chunk in chunks if chunk.prompt_token_logprobs]
        return cls(
            text_output="".join(chunk.text_output for chunk in chunks),
            finish_reason=last.finish_reason,
            num_input_tokens=last.num_input_tokens,
            num_output_tokens=sum(counts) if counts else None,
            output_token_ids=tuple(i for chunk in chunks for i in chunk.output_token_ids),
            ttft_s=first.received_at - started_at,
            tpot_s=(last.received_at - first.received_at) / later_tokens if later_tokens else None,
            latency_s=last.received_at - started_at,
            num_chunks=len(chunks),
            index=last.index,
            stop_reason=last.stop_reason,
            num_cached_tokens=last.num_cached_tokens,
            output_logprobs=logprobs or None,
            prompt_token_logprobs=prompt[0] if prompt else None,
            timing=last.timing,
        )


def by_answer(chunks: Iterable[StreamChunk], started_at: float) -> list[Completion]:
    """The n answers of a request, by index."""
    answers: dict[int, list[StreamChunk]] = {}
    for chunk in chunks:
        answers.setdefault(chunk.index, []).append(chunk)
    return [Completion.from_chunks(part, started_at) for _, part in sorted(answers.items())]


def _array(result: InferResult, name: str) -> list[Any]:
    array = result.as_numpy(name)
    return [] if array is None else list(array.reshape(-1).tolist())


def _strings(result: InferResult, name: str) -> list[str]:
    return [item.decode("utf-8") for item in _array(result, name)]


def _counts(result: InferResult, name: str) -> list[int]:
    return [int(item) for item in _array(result, name)]


def _at(values: list[Any], place: int, default: Any) -> Any:
    return values[place] if place < len(values) else default


def _json(result: InferResult, name: str, place: int) -> Any:
    text = _at(_strings(result, name), place, "null")
    return json.loads(text)
