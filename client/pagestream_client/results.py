"""What comes back: StreamChunk (one response) and Completion (a whole answer, with its timings).

Decodes the output tensors of the three ensembles, whatever their integer widths and batch
dimension. Knows nothing of connections; ``client`` makes both kinds of value.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy.typing as npt
from tritonclient.grpc import InferResult, service_pb2


@dataclass(frozen=True)
class StreamChunk:
    """One response: the text and the tokens that are new in it."""

    text_output: str
    finish_reason: str
    """Empty until the last chunk, then stop, length or abort."""
    num_input_tokens: int | None
    """Of the whole prompt, the same in every chunk; None where the model does not say."""
    num_output_tokens: int | None
    """Of this chunk; the sum over the chunks is the total."""
    output_token_ids: tuple[int, ...]
    """Of this chunk; empty unless return_token_ids was asked for."""
    received_at: float
    """``time.monotonic()`` at arrival."""

    @classmethod
    def from_response(
        cls, response: service_pb2.ModelInferResponse, received_at: float
    ) -> StreamChunk:
        result = InferResult(response)
        return cls(
            text_output=_text(result, "text_output"),
            finish_reason=_finish_reason(result),
            num_input_tokens=_count(result, "num_input_tokens"),
            num_output_tokens=_count(result, "num_output_tokens"),
            output_token_ids=_ids(result, "output_token_ids"),
            received_at=received_at,
        )


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

    @classmethod
    def from_chunks(cls, chunks: Iterable[StreamChunk], started_at: float) -> Completion:
        chunks = list(chunks)
        if not chunks:
            raise ValueError("an answer needs at least one chunk")
        first, last = chunks[0], chunks[-1]
        counts = [
            chunk.num_output_tokens for chunk in chunks if chunk.num_output_tokens is not None
        ]
        later_tokens = sum(counts) - (first.num_output_tokens or 0)
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
        )


def _array(result: InferResult, name: str) -> npt.NDArray[Any] | None:
    array = result.as_numpy(name)
    return None if array is None else array.reshape(-1)


def _text(result: InferResult, name: str) -> str:
    array = _array(result, name)
    return "" if array is None else b"".join(array.tolist()).decode("utf-8")


def _finish_reason(result: InferResult) -> str:
    """`vllm` spells "not finished" as its backend does, as the text None."""
    text = _text(result, "finish_reason")
    return "" if text == "None" else text


def _count(result: InferResult, name: str) -> int | None:
    array = _array(result, name)
    return None if array is None or not array.size else int(array[0])


def _ids(result: InferResult, name: str) -> tuple[int, ...]:
    array = _array(result, name)
    return () if array is None else tuple(array.tolist())
