"""The client of text_path.py, in a process of its own so that its CPU time can be told apart.

Reads one job as JSON per line of standard input and writes one line with its result: ``load`` keeps
a number of gRPC streams busy and checks every answer's text, ``ttft`` sends requests one at a time,
by turns through the ensemble and straight to the engine. tritonclient's own streaming client.
"""

from __future__ import annotations

import dataclasses
import json
import queue
import sys
import time
from dataclasses import dataclass
from typing import Any

import numpy as np
from tritonclient.grpc import InferenceServerClient, InferInput, InferResult
from tritonclient.utils import np_to_triton_dtype

TIMEOUT_S = 120.0


@dataclass(frozen=True)
class Job:
    """What to send. ``tokens_per_response`` is read by instant_engine.py as top_k."""

    url: str
    text_input: str
    prompt_token_ids: list[int]
    stop: str
    max_tokens: int
    tokens_per_response: int
    num_streams: int = 1
    num_requests: int = 1
    """Of each stream, one after another."""

    def inputs(self, model: str) -> list[InferInput]:
        if model == "engine":
            params = {
                "max_tokens": self.max_tokens,
                "top_k": self.tokens_per_response,
                "stream": True,
                "ignore_eos": True,
            }
            return [
                tensor("prompt_token_ids", np.array(self.prompt_token_ids, np.int32)),
                tensor("sampling_params", np.array([json.dumps(params).encode()], np.object_)),
            ]
        return [
            tensor("text_input", np.array([[self.text_input.encode()]], np.object_)),
            tensor("max_tokens", np.array([[self.max_tokens]], np.int32)),
            tensor("top_k", np.array([[self.tokens_per_response]], np.int32)),
            tensor("stop_words", np.array([[self.stop.encode()]], np.object_)),
            tensor("stream", np.array([[True]])),
            tensor("ignore_eos", np.array([[True]])),
        ]


class Stream:
    """One gRPC stream that sends its requests one after another and keeps their answers."""

    def __init__(self, job: Job, model: str, ended: queue.SimpleQueue[Stream]) -> None:
        self.model = model
        self.num_responses = 0
        self.num_tokens = 0
        self.first_response = 0.0
        self.error: str | None = None
        self._job = job
        self._inputs = job.inputs(model)
        self._left = job.num_requests
        self._ended = ended
        self._parts: list[Any] = []
        self._client = InferenceServerClient(job.url)
        self._client.start_stream(self._on_response)

    def send(self) -> None:
        self._parts = []
        self.first_response = 0.0
        self._client.async_stream_infer(self.model, self._inputs)

    def close(self) -> None:
        self._client.stop_stream()
        self._client.close()

    def _on_response(self, result: InferResult | None, error: Exception | None) -> None:
        now = time.perf_counter()
        if error is not None or result is None:
            self.error = str(error)
            self._ended.put(self)
            return
        self.first_response = self.first_response or now
        self.num_responses += 1
        if self.model == "engine":
            self._parts.append(result.as_numpy("token_ids"))
        else:
            self._parts.append(result.as_numpy("text_output")[0])
        if result.get_response().parameters["triton_final_response"].bool_param:
            self._finish()

    def _finish(self) -> None:
        job = self._job
        if self.model == "engine":
            whole = np.concatenate(self._parts).tolist()
            repeats = -(-job.max_tokens // len(job.prompt_token_ids))
            if whole != (job.prompt_token_ids * repeats)[: job.max_tokens]:
                self.error = f"wrong token ids: {whole}"
        else:
            text = b"".join(self._parts).decode()
            repeats = -(-job.max_tokens // len(job.prompt_token_ids))
            # The last character may be cut, where the last token is only a part of it.
            if not (job.text_input * repeats).startswith(text.rstrip("\ufffd")) or not text:
                self.error = f"wrong text: {text!r}"
        self.num_tokens += job.max_tokens
        self._left -= 1
        if self.error is None and self._left > 0:
            self.send()
        else:
            self._ended.put(self)


def tensor(name: str, array: np.ndarray[Any, Any]) -> InferInput:
    value = InferInput(name, list(array.shape), np_to_triton_dtype(array.dtype))
    value.set_data_from_numpy(array)
    return value


def load(job: Job, model: str) -> dict[str, float]:
    """Tokens, responses and seconds of all streams, and the CPU seconds of this process."""
    ended: queue.SimpleQueue[Stream] = queue.SimpleQueue()
    streams = [Stream(job, model, ended) for _ in range(job.num_streams)]
    start, cpu_start = time.perf_counter(), time.process_time()
    for stream in streams:
        stream.send()
    for _ in streams:
        fail_on_error(ended.get(timeout=TIMEOUT_S))
    seconds, cpu_seconds = time.perf_counter() - start, time.process_time() - cpu_start
    for stream in streams:
        stream.close()
    return {
        "tokens": sum(stream.num_tokens for stream in streams),
        "responses": sum(stream.num_responses for stream in streams),
        "seconds": seconds,
        "cpu_seconds": cpu_seconds,
    }


def ttft(job: Job) -> list[tuple[float, float]]:
    """Milliseconds to the first response, of the engine and of the ensemble, pair by pair."""
    ended: queue.SimpleQueue[Stream] = queue.SimpleQueue()
    one_each = dataclasses.replace(job, num_requests=1)
    engine, ensemble = (Stream(one_each, model, ended) for model in ("engine", "ensemble"))
    pairs = []
    for number in range(job.num_requests):
        times = {}
        for stream in (engine, ensemble) if number % 2 else (ensemble, engine):
            start = time.perf_counter()
            stream.send()
            fail_on_error(ended.get(timeout=TIMEOUT_S))
            times[stream.model] = (stream.first_response - start) * 1000
        pairs.append((times["engine"], times["ensemble"]))
    engine.close()
    ensemble.close()
    return pairs


def fail_on_error(stream: Stream) -> None:
    if stream.error is not None:
        sys.exit(f"{stream.model}: {stream.error}")


def main() -> None:
    for line in sys.stdin:
        call = json.loads(line)
        job = Job(**call["job"])
        result = ttft(job) if call["kind"] == "ttft" else load(job, call["kind"])
        print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
