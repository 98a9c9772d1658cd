"""PagestreamClient: one connection to the server; TokenStream: one running request.

A request is one gRPC stream, because tritonserver's unit of cancellation is the stream. The
stream is opened on the stub directly: ``InferenceServerClient.stop_stream(cancel_requests=True)``
leaves a thread behind for every cancelled request, and needs a client object per request.
Used by the command line, the tests and the load generator.
"""

from __future__ import annotations

import threading
import time
from types import TracebackType
from typing import Self, Unpack

import grpc
from tritonclient.grpc import service_pb2, service_pb2_grpc

from pagestream_client.errors import RequestTimeout, ServerError
from pagestream_client.inputs import RequestInputs, build_request
from pagestream_client.results import Completion, StreamChunk, by_answer, read_chunks

CLOSE_TIMEOUT_S = 5.0
_CHANNEL_OPTIONS = [("grpc.max_send_message_length", -1), ("grpc.max_receive_message_length", -1)]


class TokenStream:
    """Iterates over the chunks of one answer, in one thread; any thread may cancel it.

    Ends after the last chunk, or without an error once it is cancelled. Raises ServerError or
    RequestTimeout. Leaving its ``with`` block cancels whatever is left of the request.
    """

    def __init__(
        self,
        stub: service_pb2_grpc.GRPCInferenceServiceStub,
        request: service_pb2.ModelInferRequest,
        timeout_s: float | None,
    ) -> None:
        self.cancelled = False
        self._timeout_s = timeout_s
        self._finished = False
        self._ready: list[StreamChunk] = []
        self.started_at = time.monotonic()
        """``time.monotonic()`` when the request was sent."""
        self._call = stub.ModelStreamInfer(iter((request,)), timeout=timeout_s)

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> StreamChunk:
        if self._ready:
            return self._ready.pop(0)
        response = self._next_response()
        received_at = time.monotonic()
        if response is None:
            self.close()
            raise StopIteration
        if response.error_message:
            self._finished = True
            self.close()
            raise ServerError(response.error_message)
        self._ready = read_chunks(response.infer_response, received_at)
        self._finished = response.infer_response.parameters["triton_final_response"].bool_param
        return next(self)

    def cancel(self) -> None:
        """Ask the server to stop; iteration ends. Does nothing after the last chunk."""
        if not self._finished:
            self.cancelled = True
            self._call.cancel()

    def close(self) -> None:
        """Cancel whatever is left; after the last chunk, wait for the server to end the stream.

        A cancel that reaches tritonserver 24.10 just after the last response leaks the request
        there: the model can no longer be unloaded, nor the server stopped in good order.
        """
        self.cancel()
        closed = threading.Event()
        if self._call.add_callback(closed.set) and not closed.wait(CLOSE_TIMEOUT_S):
            self._call.cancel()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _next_response(self) -> service_pb2.ModelStreamInferResponse | None:
        if self._finished or self.cancelled:
            return None
        try:
            return next(self._call)
        except StopIteration:
            raise ServerError("the server closed the stream before the last response") from None
        except grpc.RpcError as error:
            if self.cancelled:
                return None
            raise self._transport_error(error) from None

    def _transport_error(self, error: grpc.RpcError) -> ServerError:
        code = error.code()
        if code is grpc.StatusCode.DEADLINE_EXCEEDED:
            message = f"no complete answer within timeout_s = {self._timeout_s}"
            return RequestTimeout(message, code=code.name)
        return ServerError(f"{code.name}: {error.details()}", code=code.name)


class PagestreamClient:
    """A connection to one server, safe to share between threads.

    >>> with PagestreamClient("localhost:8001") as client:
    ...     for chunk in client.stream(model="chat", messages=[{"role": "user", "content": "Hi"}]):
    ...         print(chunk.text_output, end="", flush=True)
    """

    def __init__(self, url: str, *, timeout_s: float | None = None) -> None:
        """``url`` is host:port of the gRPC endpoint; ``timeout_s`` the default per request."""
        self.url = url
        self._timeout_s = timeout_s
        self._channel = grpc.insecure_channel(url, options=_CHANNEL_OPTIONS)
        self._stub = service_pb2_grpc.GRPCInferenceServiceStub(self._channel)

    def stream(
        self,
        model: str = "ensemble",
        *,
        stream: bool = True,
        timeout_s: float | None = None,
        request_id: str = "",
        **inputs: Unpack[RequestInputs],
    ) -> TokenStream:
        """Send a request and return its chunks as they come (one chunk with ``stream=False``).

        Raises TypeError or ValueError, before anything is sent, for inputs that do not fit the
        wire.
        """
        request = build_request(model, request_id, {**inputs, "stream": stream})
        timeout_s = self._timeout_s if timeout_s is None else timeout_s
        return TokenStream(self._stub, request, timeout_s)

    def generate(
        self,
        model: str = "ensemble",
        *,
        stream: bool = True,
        timeout_s: float | None = None,
        request_id: str = "",
        **inputs: Unpack[RequestInputs],
    ) -> Completion:
        """Send a request and wait for the whole answer.

        With ``stream=False`` the server sends it in one response, so time to first token is the
        latency and there is no time per output token. One answer only: for n > 1, ``generate_all``.
        """
        if inputs.get("n") not in (None, 1):
            raise ValueError("generate gives one answer; use generate_all for n above 1")
        with self.stream(
            model, stream=stream, timeout_s=timeout_s, request_id=request_id, **inputs
        ) as chunks:
            return Completion.from_chunks(chunks, chunks.started_at)

    def generate_all(
        self,
        model: str = "ensemble",
        *,
        stream: bool = True,
        timeout_s: float | None = None,
        request_id: str = "",
        **inputs: Unpack[RequestInputs],
    ) -> list[Completion]:
        """The n answers of one request, by index; otherwise as ``generate``."""
        with self.stream(
            model, stream=stream, timeout_s=timeout_s, request_id=request_id, **inputs
        ) as chunks:
            return by_answer(chunks, chunks.started_at)

    def is_ready(self, model: str = "ensemble", *, timeout_s: float = 5.0) -> bool:
        """Whether the server says that it can take requests for this model."""
        request = service_pb2.ModelReadyRequest(name=model)
        try:
            return bool(self._stub.ModelReady(request, timeout=timeout_s).ready)
        except grpc.RpcError:
            return False

    def close(self) -> None:
        """Close the connection, cancelling what still runs on it."""
        self._channel.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
