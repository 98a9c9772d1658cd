"""What the tests of a running server share: requests over HTTP, waiting, reading metrics."""

import http.client
import json
import queue
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from script_model import ScriptModel
from tritonclient.grpc import InferenceServerClient, InferInput, InferResult
from tritonclient.utils import InferenceServerException, np_to_triton_dtype

from pagestream.cli.server_process import ServerProcess
from pagestream_client import Completion, PagestreamClient, StreamChunk
from pagestream_client.inputs import BATCHED_MODELS
from pagestream_client.metrics import read_metrics

TIMEOUT_S = 60.0
ENSEMBLES = ("ensemble", "vllm", "chat")
MODES = pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])


@dataclass(frozen=True)
class HttpAnswer:
    status: int
    body: Any
    """What the JSON says; a list with the JSON of each event for generate_stream."""


@dataclass(frozen=True)
class RawRequest:
    """One request as tritonclient sends it. Arrays go as they are; plain values become tensors of
    the type that ours have, with a batch dimension where the model has one."""

    model: str
    values: dict[str, Any]
    id: str = ""
    parameters: dict[str, Any] | None = None

    def inputs(self) -> list[InferInput]:
        inputs = []
        for name, value in self.values.items():
            array = value if isinstance(value, np.ndarray) else self._array(value)
            inputs.append(InferInput(name, array.shape, np_to_triton_dtype(array.dtype)))
            inputs[-1].set_data_from_numpy(array)
        return inputs

    def _array(self, value: Any) -> np.ndarray:
        items = value if isinstance(value, list) else [value]
        dtype = _DTYPES[type(items[0]) if items else int]
        array = np.array([i.encode() if isinstance(i, str) else i for i in items], dtype)
        return array.reshape(1, -1) if self.model in BATCHED_MODELS else array


_DTYPES = {bool: np.bool_, int: np.int32, float: np.float32, str: np.object_}


def text_of(result: InferResult) -> str:
    """Of a response with one answer."""
    (text,) = result.as_numpy("text_output").tolist()
    return str(text.decode())


def is_final(result: InferResult) -> bool:
    return bool(result.get_response().parameters["triton_final_response"].bool_param)


class Service:
    """A running server, as its tests see it."""

    def __init__(self, server: ServerProcess) -> None:
        self.server = server
        self.http_url = server.http_url
        self.grpc_url = server.grpc_url
        self.metrics_url = server.metrics_url
        self.client = PagestreamClient(server.grpc_url, timeout_s=TIMEOUT_S)

    def metrics(self) -> dict[str, float]:
        """pagestream's own metrics, without the prefix."""
        prefix = "pagestream_"
        values = read_metrics(self.metrics_url)
        return {name.removeprefix(prefix): v for name, v in values.items() if prefix in name}

    def is_idle(self) -> bool:
        values = self.metrics()
        return (
            values["requests_running"] == 0
            and values["requests_waiting"] == 0
            and values["kv_blocks_free"] == values["kv_blocks_total"]
        )

    def post(self, path: str, body: Any) -> HttpAnswer:
        """POST JSON; `body` may be bytes, for what is not JSON."""
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        request = urllib.request.Request(f"{self.http_url}{path}", data=data)
        try:
            with urllib.request.urlopen(request, timeout=TIMEOUT_S) as response:
                return HttpAnswer(response.status, _parse(response.read().decode()))
        except urllib.error.HTTPError as error:
            with error:
                return HttpAnswer(error.code, _parse(error.read().decode()))

    def generate(self, model: str, body: Any) -> HttpAnswer:
        return self.post(f"/v2/models/{model}/generate", body)

    def generate_stream(self, model: str, body: Any) -> HttpAnswer:
        return self.post(f"/v2/models/{model}/generate_stream", body)

    def exchange(self, *requests: RawRequest) -> list[InferResult | InferenceServerException]:
        """All that these requests, sent over one stream, are answered with, through tritonclient
        alone; also responses that have nothing but the final flag."""
        answers: queue.Queue[tuple[InferResult | None, InferenceServerException | None]]
        answers = queue.Queue()
        collected: list[InferResult | InferenceServerException] = []
        num_open = len(requests)
        with InferenceServerClient(self.grpc_url) as client:
            client.start_stream(lambda result, error: answers.put((result, error)))
            for request in requests:
                client.async_stream_infer(
                    request.model,
                    request.inputs(),
                    request_id=request.id,
                    parameters=request.parameters,
                    enable_empty_final_response=True,
                )
            while num_open:
                result, error = answers.get(timeout=TIMEOUT_S)
                collected.append(error or result)
                num_open -= error is not None or is_final(result)
            client.stop_stream()
        # What should not be: more after the last one.
        return [*collected, *(error or result for result, error in list(answers.queue))]

    def open_stream(self, model: str, body: dict[str, Any]) -> "HttpStream":
        return HttpStream(self.http_url, f"/v2/models/{model}/generate_stream", body)


class ScriptService(Service):
    """A server of a script model. Its chains are asked for by name, through any ensemble."""

    def __init__(self, server: ServerProcess, script: ScriptModel) -> None:
        super().__init__(server)
        self.script = script
        self.family = script.family

    def inputs(self, name: str, ensemble: str, options: dict[str, Any]) -> dict[str, Any]:
        """As the ensemble's own clients send them."""
        options = {"temperature": 0.0, **options}
        if ensemble == "chat":
            return {"prompt_token_ids": self.script.prompt_token_ids(name), **options}
        prompt = {"text_input": self.script.prompt(name)}
        if ensemble == "vllm":
            return {**prompt, "sampling_parameters": options}
        return {**prompt, **options}

    def raw(
        self, name: str, ensemble: str, *, stream: bool, request_id: str = "", **options: Any
    ) -> RawRequest:
        """A request with what the ensemble's responses have when nothing is said about it."""
        values = {**self.inputs(name, ensemble, options), "stream": stream}
        if "sampling_parameters" in values:
            values["sampling_parameters"] = json.dumps(values["sampling_parameters"])
        return RawRequest(ensemble, values, request_id)

    def ask(
        self, name: str, ensemble: str = "ensemble", *, stream: bool, **options: Any
    ) -> Completion:
        return self.client.generate(ensemble, stream=stream, **self.inputs(name, ensemble, options))

    def chunks(
        self, name: str, ensemble: str = "ensemble", *, stream: bool = True, **options: Any
    ) -> list[StreamChunk]:
        inputs = self.inputs(name, ensemble, options)
        return list(self.client.stream(ensemble, stream=stream, **inputs))


class HttpStream:
    """A generate_stream request that can be dropped in the middle."""

    def __init__(self, http_url: str, path: str, body: dict[str, Any]) -> None:
        host = http_url.removeprefix("http://")
        self._connection = http.client.HTTPConnection(host, timeout=TIMEOUT_S)
        self._connection.request("POST", path, json.dumps(body))
        self._response: http.client.HTTPResponse | None = None

    def next_event(self) -> dict[str, Any]:
        if self._response is None:
            self._response = self._connection.getresponse()
        while not (line := self._response.readline()).startswith(b"data: "):
            assert line, "the stream ended"
        return json.loads(line.removeprefix(b"data: "))

    def drop(self) -> None:
        """Close the connection, as a client that goes away does."""
        if self._response is not None:
            self._response.close()
        self._connection.close()


def _parse(text: str) -> Any:
    if text.startswith("data: "):
        events = [line for line in text.splitlines() if line.startswith("data: ")]
        return [json.loads(line.removeprefix("data: ")) for line in events]
    return json.loads(text) if text else None


def wait_until(condition: Callable[[], bool], timeout_s: float, what: str) -> float:
    """Seconds until `condition` held; fails the test if that takes longer than `timeout_s`."""
    started = time.monotonic()
    while not condition():
        waited = time.monotonic() - started
        assert waited < timeout_s, f"{what}: not within {timeout_s} s"
        time.sleep(0.02)
    return time.monotonic() - started
