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
from tritonclient.grpc import InferenceServerClient, InferInput, InferResult
from tritonclient.utils import InferenceServerException, np_to_triton_dtype

from pagestream.cli.server_process import ServerProcess
from pagestream_client import PagestreamClient
from pagestream_client.metrics import read_metrics

TIMEOUT_S = 60.0


@dataclass(frozen=True)
class HttpAnswer:
    status: int
    body: Any
    """What the JSON says; a list with the JSON of each event for generate_stream."""


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

    def raw_infer(
        self, model: str, tensors: dict[str, np.ndarray]
    ) -> list[InferResult | InferenceServerException]:
        """All that one request to any model is answered with, through tritonclient alone."""
        inputs = []
        for name, array in tensors.items():
            inputs.append(InferInput(name, array.shape, np_to_triton_dtype(array.dtype)))
            inputs[-1].set_data_from_numpy(array)
        answers: queue.Queue[tuple[InferResult | None, InferenceServerException | None]]
        answers = queue.Queue()
        collected: list[InferResult | InferenceServerException] = []
        with InferenceServerClient(self.grpc_url) as client:
            client.start_stream(lambda result, error: answers.put((result, error)))
            client.async_stream_infer(model, inputs, enable_empty_final_response=True)
            while True:
                result, error = answers.get(timeout=TIMEOUT_S)
                if error is not None:
                    collected.append(error)
                    break
                response = result.get_response()
                if response.outputs:
                    collected.append(result)
                if response.parameters["triton_final_response"].bool_param:
                    break
            client.stop_stream()
        return collected

    def open_stream(self, model: str, body: dict[str, Any]) -> "HttpStream":
        return HttpStream(self.http_url, f"/v2/models/{model}/generate_stream", body)


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
