"""A client that goes away: the engine ends its request at once and frees its blocks.

At once is within a second where nothing else runs; on a busy machine, three are allowed.
"""

import threading
import time
from collections.abc import Callable, Iterator

import pytest
from e2e_support import Service, wait_until

pytestmark = [pytest.mark.server, pytest.mark.smollm2]

LONG = {"max_tokens": 500, "ignore_eos": True}
LIMIT_S = 3.0


@pytest.fixture(autouse=True)
def idle_before(service):
    wait_until(service.is_idle, 10, "idle before the test")


def cancelled(service: Service) -> float:
    return service.metrics()["cancelled_total"]


@pytest.mark.parametrize("ensemble", ["ensemble", "chat", "vllm"])
def test_grpc_cancel_after_a_few_tokens(service, ensemble):
    before = cancelled(service)
    inputs = {
        "ensemble": {"text_input": "Tell me a story.", **LONG},
        "chat": {"messages": [{"role": "user", "content": "Tell me a story."}], **LONG},
        "vllm": {"text_input": "Tell me a story.", "sampling_parameters": LONG},
    }[ensemble]
    stream = service.client.stream(ensemble, **inputs)
    for _ in range(3):
        next(stream)
    assert not service.is_idle()
    stream.cancel()
    wait_until(service.is_idle, LIMIT_S, "idle after a gRPC cancel")
    assert cancelled(service) == before + 1


def test_http_disconnect_on_generate_stream(service):
    before = cancelled(service)
    stream = service.open_stream(
        "ensemble", {"text_input": "Tell me a story.", "stream": True, **LONG}
    )
    for _ in range(3):
        assert "text_output" in stream.next_event()
    assert not service.is_idle()
    stream.drop()
    wait_until(service.is_idle, LIMIT_S, "idle after an HTTP disconnect")
    assert cancelled(service) == before + 1


def test_grpc_cancel_of_a_whole_answer(service):
    """With stream=false the client sees nothing before the end; its cancel counts all the same."""
    stream = service.client.stream(text_input="Tell me a story.", stream=False, **LONG)
    wait_until(lambda: service.metrics()["requests_running"] == 1, 5, "running")
    stream.cancel()
    wait_until(service.is_idle, LIMIT_S, "idle after a gRPC cancel")


@pytest.fixture
def full_batch(service) -> Iterator[Callable[[], None]]:
    """16 long streams in the 16 places; calling it cancels them all."""
    running = [service.client.stream(text_input=f"Story {i}", **LONG) for i in range(16)]
    consumers = [threading.Thread(target=lambda s=stream: list(s)) for stream in running]

    def cancel_all() -> None:
        for stream in running:
            stream.cancel()

    for consumer in consumers:
        consumer.start()
    try:
        wait_until(lambda: service.metrics()["requests_running"] == 16, 10, "a full batch")
        yield cancel_all
    finally:
        cancel_all()
        for consumer in consumers:
            consumer.join()


def test_grpc_cancel_while_waiting_behind_a_full_batch(service, full_batch):
    waiting = service.client.stream(text_input="One too many", **LONG)
    wait_until(lambda: service.metrics()["requests_waiting"] == 1, 5, "one waiting")
    waiting.cancel()
    wait_until(lambda: service.metrics()["requests_waiting"] == 0, LIMIT_S, "none waiting")
    assert service.metrics()["requests_running"] == 16
    full_batch()
    wait_until(service.is_idle, 2 * LIMIT_S, "idle after all were cancelled")


def test_http_disconnect_while_waiting_behind_a_full_batch(service, full_batch):
    waiting = service.open_stream(
        "ensemble", {"text_input": "One too many", "stream": True, **LONG}
    )
    wait_until(lambda: service.metrics()["requests_waiting"] == 1, 5, "one waiting")
    waiting.drop()
    wait_until(lambda: service.metrics()["requests_waiting"] == 0, LIMIT_S, "none waiting")
    assert service.metrics()["requests_running"] == 16
    full_batch()
    wait_until(service.is_idle, 2 * LIMIT_S, "idle after all were cancelled")


def test_a_cancel_leaves_the_others_alone(service):
    other = service.client.stream(
        text_input="Write about rivers.", max_tokens=40, ignore_eos=True, temperature=0.0
    )
    texts = [next(other).text_output]
    with service.client.stream(text_input="Tell me a story.", **LONG) as stream:
        next(stream)
    texts += [chunk.text_output for chunk in other]
    alone = service.client.generate(
        text_input="Write about rivers.", max_tokens=40, ignore_eos=True, temperature=0.0
    )
    assert "".join(texts) == alone.text_output


def test_a_grpc_stream_that_waits_gets_no_empty_response(service, full_batch):
    waiting = service.client.stream(text_input="One too many", max_tokens=3, ignore_eos=True)
    wait_until(lambda: service.metrics()["requests_waiting"] == 1, 5, "one waiting")
    time.sleep(LIMIT_S)
    full_batch()
    assert all(chunk.num_output_tokens for chunk in waiting)
