"""The client against a real gRPC server in this process that answers from a script."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import grpc
import numpy as np
import pytest
from tritonclient.grpc import service_pb2, service_pb2_grpc
from tritonclient.utils import serialize_byte_tensor

from pagestream_client import Completion, PagestreamClient, RequestTimeout, ServerError, StreamChunk

LONG_S = 20.0


def response(text, *, reason="", tokens=1, ids=None, final=None, count_dtype=np.int32):
    infer = service_pb2.ModelInferResponse()
    tensors = {
        "text_output": np.array([text.encode()], dtype=np.object_),
        "finish_reason": np.array([reason.encode()], dtype=np.object_),
        "num_input_tokens": np.array([5], dtype=count_dtype),
        "num_output_tokens": np.array([tokens], dtype=count_dtype),
    }
    if ids is not None:
        tensors["output_token_ids"] = np.array(ids, dtype=np.int32)
    names = {np.dtype(np.int32): "INT32", np.dtype(np.uint32): "UINT32"}
    for name, array in tensors.items():
        datatype = names.get(array.dtype, "BYTES")
        infer.outputs.add(name=name, datatype=datatype, shape=array.shape)
        raw = serialize_byte_tensor(array).item() if datatype == "BYTES" else array.tobytes()
        infer.raw_output_contents.append(raw)
    infer.parameters["triton_final_response"].bool_param = bool(reason) if final is None else final
    return service_pb2.ModelStreamInferResponse(infer_response=infer)


def error(message):
    return service_pb2.ModelStreamInferResponse(error_message=message)


class ScriptedServer(service_pb2_grpc.GRPCInferenceServiceServicer):
    """The text of the first input names the script to play."""

    def __init__(self):
        self.cancelled = threading.Event()
        self.requests = []

    def ModelReady(self, request, context):
        return service_pb2.ModelReadyResponse(ready=request.name == "ensemble")

    def ModelStreamInfer(self, request_iterator, context):
        for request in request_iterator:
            self.requests.append(request)
            script = request.raw_input_contents[0][4:].decode()
            yield from getattr(self, script)(context)

    def answer(self, context):
        yield response("Hel", ids=[1])
        time.sleep(0.1)
        yield response("lo", tokens=3, ids=[2, 3, 4])
        yield response("!", tokens=1, ids=[5], reason="stop")

    def one_response(self, context):
        yield response("Hello", tokens=4, reason="length", count_dtype=np.uint32)

    def vllm_answer(self, context):
        yield response("a", reason="None", final=False)
        yield response("b", reason="stop")

    def no_finish_reason(self, context):
        yield response("a")
        yield response("b", final=True)

    def refused(self, context):
        yield error("max_tokens must be at least 1, got 0")

    def fails_late(self, context):
        yield response("a")
        yield error("decoder failed")

    def cut_off(self, context):
        yield response("a")

    def endless(self, context):
        context.add_callback(self.cancelled.set)
        yield response("a")
        self.cancelled.wait(LONG_S)

    def aborts(self, context):
        context.abort(grpc.StatusCode.UNAVAILABLE, "server is stopping")


@pytest.fixture
def server():
    servicer = ScriptedServer()
    executor = ThreadPoolExecutor(max_workers=8)
    server = grpc.server(executor)
    service_pb2_grpc.add_GRPCInferenceServiceServicer_to_server(servicer, server)
    servicer.url = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    yield servicer
    servicer.cancelled.set()
    server.stop(grace=None).wait()
    executor.shutdown()


@pytest.fixture
def client(server):
    with PagestreamClient(server.url, timeout_s=LONG_S) as client:
        yield client


def test_stream_yields_each_response_as_it_arrives(client):
    chunks = list(client.stream(text_input="answer"))
    assert [chunk.text_output for chunk in chunks] == ["Hel", "lo", "!"]
    assert [chunk.finish_reason for chunk in chunks] == ["", "", "stop"]
    assert [chunk.num_output_tokens for chunk in chunks] == [1, 3, 1]
    assert [chunk.output_token_ids for chunk in chunks] == [(1,), (2, 3, 4), (5,)]
    assert {chunk.num_input_tokens for chunk in chunks} == {5}
    assert 0.09 < chunks[1].received_at - chunks[0].received_at < 1


def test_generate_joins_and_times_the_answer(client):
    completion = client.generate(text_input="answer")
    assert completion.text_output == "Hello!"
    assert completion.finish_reason == "stop"
    assert completion.num_output_tokens == 5
    assert completion.output_token_ids == (1, 2, 3, 4, 5)
    assert completion.num_chunks == 3
    assert 0 < completion.ttft_s < completion.latency_s
    assert completion.tpot_s == pytest.approx((completion.latency_s - completion.ttft_s) / 4)


def test_generate_without_streaming_is_one_chunk(client, server):
    completion = client.generate("chat", text_input="one_response", stream=False)
    assert (completion.text_output, completion.num_output_tokens) == ("Hello", 4)
    assert completion.tpot_s is None
    (request,) = server.requests
    sent = {t.name: raw for t, raw in zip(request.inputs, request.raw_input_contents, strict=True)}
    assert sent["stream"] == b"\x00"


def test_the_text_none_is_no_finish_reason(client):
    chunks = list(client.stream("vllm", text_input="vllm_answer"))
    assert [chunk.finish_reason for chunk in chunks] == ["", "stop"]


def test_the_final_flag_ends_an_answer_without_a_finish_reason(client):
    assert client.generate("vllm", text_input="no_finish_reason").text_output == "ab"


def test_a_refusal_is_a_server_error_with_its_message(client):
    with pytest.raises(ServerError, match="max_tokens must be at least 1, got 0") as caught:
        client.generate(text_input="refused")
    assert caught.value.code is None


def test_a_late_failure_comes_after_the_text_so_far(client):
    stream = client.stream(text_input="fails_late")
    assert next(stream).text_output == "a"
    with pytest.raises(ServerError, match="decoder failed"):
        next(stream)
    with pytest.raises(StopIteration):
        next(stream)


def test_a_stream_that_stops_short_is_an_error(client):
    with pytest.raises(ServerError, match="before the last response"):
        client.generate(text_input="cut_off")


def test_a_transport_failure_names_its_status(client):
    with pytest.raises(ServerError, match="UNAVAILABLE: server is stopping") as caught:
        client.generate(text_input="aborts")
    assert caught.value.code == "UNAVAILABLE"


def test_timeout_cancels_and_names_the_limit(client, server):
    with pytest.raises(RequestTimeout, match=r"timeout_s = 0\.3"):
        client.generate(text_input="endless", timeout_s=0.3)
    assert server.cancelled.wait(2)


@pytest.mark.parametrize("how", ["cancel", "close", "with", "other thread"])
def test_cancel_reaches_the_server_and_ends_the_iteration(client, server, how):
    stream = client.stream(text_input="endless")
    assert next(stream).text_output == "a"
    if how == "with":
        with stream:
            pass
    elif how == "other thread":
        threading.Timer(0.1, stream.cancel).start()
    else:
        getattr(stream, how)()
    assert list(stream) == []
    assert stream.cancelled
    assert server.cancelled.wait(2)


def test_a_finished_stream_does_not_count_as_cancelled(client):
    with client.stream(text_input="answer") as stream:
        list(stream)
    assert not stream.cancelled


def test_cancelling_leaves_no_thread_behind(client, server):
    before = threading.active_count()
    for _ in range(20):
        server.cancelled.clear()
        with client.stream(text_input="endless") as stream:
            next(stream)
        assert server.cancelled.wait(2)
    deadline = time.monotonic() + 5
    # The server's pool keeps its 8 threads.
    while threading.active_count() > before + 8 and time.monotonic() < deadline:
        time.sleep(0.05)
    assert threading.active_count() <= before + 8


def test_one_client_serves_many_threads(client):
    with ThreadPoolExecutor(max_workers=8) as pool:
        texts = list(
            pool.map(lambda _: client.generate(text_input="answer").text_output, range(24))
        )
    assert texts == ["Hello!"] * 24


def test_is_ready(client):
    assert client.is_ready("ensemble")
    assert not client.is_ready("chat")


def test_is_ready_is_false_where_nothing_listens():
    with PagestreamClient("127.0.0.1:1") as client:
        assert not client.is_ready(timeout_s=0.5)


def test_a_wrong_input_is_refused_before_anything_is_sent(client, server):
    with pytest.raises(TypeError, match="unknown input"):
        client.generate(text_input="answer", max_token=3)
    assert server.requests == []


def test_completion_needs_a_chunk():
    with pytest.raises(ValueError, match="at least one chunk"):
        Completion.from_chunks([], 0.0)


def test_completion_times_and_counts():
    chunks = [
        StreamChunk("a", "", 3, 1, (), 10.5),
        StreamChunk("b", "", 3, 4, (), 11.0),
        StreamChunk("c", "length", 3, 1, (), 11.5),
    ]
    completion = Completion.from_chunks(chunks, 10.0)
    assert completion.ttft_s == 0.5
    assert completion.tpot_s == pytest.approx(0.2)
    assert completion.latency_s == 1.5
    assert completion.num_output_tokens == 6


def test_completion_of_a_model_that_gives_no_counts():
    completion = Completion.from_chunks([StreamChunk("a", "stop", None, None, (), 1.0)], 0.0)
    assert completion.num_output_tokens is None
    assert completion.tpot_s is None
