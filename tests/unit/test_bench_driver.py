"""How requests are sent: users that wait for their answers, or arrivals that wait for nobody."""

import threading
import time

import pytest

from pagestream.bench import driver
from pagestream.bench.driver import (
    RequestTimedOut,
    Response,
    Watch,
    run_point,
    warm_up,
)
from pagestream.bench.served import peak_memory_of, server_processes
from pagestream.bench.workload import PlannedRequest, Point


class Server:
    """Answers with two responses as soon as ``together`` requests are open, and a while later."""

    def __init__(self, answer_s=0.0, together=1, fail=None):
        self.answer_s = answer_s
        self.together = threading.Barrier(together)
        self.fail = fail or {}
        self.lock = threading.Lock()
        self.open = self.most_open = 0

    def send(self, request, timeout_s):
        with self.lock:
            self.open += 1
            self.most_open = max(self.most_open, self.open)
        try:
            self.together.wait(timeout_s)
            time.sleep(self.answer_s)
            if request.index in self.fail:
                raise self.fail[request.index]
            yield Response(time.monotonic(), 1, len(request.prompt_token_ids), 2)
            yield Response(time.monotonic(), request.max_tokens - 1, finish_reason="length")
        finally:
            with self.lock:
                self.open -= 1

    def queue_depth(self):
        return 7.0

    def peak_memory_bytes(self):
        return 5


def requests(number, arrivals=None):
    return tuple(
        PlannedRequest(index, (1, 2, 3), 4, None if arrivals is None else arrivals[index])
        for index in range(number)
    )


def run(server, point):
    return run_point(server, point, 2, 10.0, lambda record: None)


def test_users_wait_for_their_answers():
    server, seen = Server(answer_s=0.02, together=3), []
    point = Point("concurrency", 3, requests(9))
    records = run_point(server, point, 2, 10.0, seen.append)
    assert records == seen
    assert sorted(record.index for record in records) == list(range(9))
    assert server.most_open == 3
    assert max(record.end_s for record in records) >= 3 * server.answer_s
    for record in records:
        assert (record.outcome, record.finish_reason, record.point) == ("ok", "length", 2)
        assert (record.num_input_tokens, record.num_cached_tokens) == (3, 2)
        assert record.num_output_tokens == record.requested_output_tokens == 4
        assert [count for _, count in record.responses] == [1, 3]
        assert record.ttft_s >= server.answer_s


def test_arrivals_do_not_wait_for_a_slow_server():
    """No answer comes before all five are sent: the first one's latency has the others' wait."""
    server = Server(together=5)
    records = run(server, Point("rate", 100, requests(5, [0.0, 0.01, 0.02, 0.03, 0.04])))
    assert server.most_open == 5
    for record in records:
        assert record.outcome == "ok"
        assert record.first_token_s >= 0.04
        assert record.planned_start_s == record.index * 0.01
        assert record.start_s >= record.planned_start_s


def test_latency_counts_from_when_a_request_was_due():
    """A sender that comes too late, as one does here that was due before the start."""
    (record,) = run(Server(), Point("trace", 1, requests(1, [-2.0])))
    assert record.ttft_s > 2.0
    assert record.start_s < 1.0


@pytest.mark.parametrize(
    ("error", "outcome", "message"),
    [
        (RequestTimedOut("too late"), "timeout", "too late"),
        (RuntimeError("refused"), "error", "refused"),
        (KeyError(), "error", "KeyError()"),
    ],
)
def test_failures_are_recorded(error, outcome, message):
    records = run(Server(answer_s=0.05, fail={1: error}), Point("concurrency", 2, requests(4)))
    assert len(records) == 4
    (failed,) = [record for record in records if record.outcome != "ok"]
    assert (failed.index, failed.outcome, failed.error) == (1, outcome, message)
    assert failed.end_s >= failed.start_s + 0.05


class Scripted(Server):
    def __init__(self, *responses):
        super().__init__()
        self.responses = responses

    def send(self, request, timeout_s):
        yield from self.responses


@pytest.mark.parametrize(
    ("responses", "message"),
    [
        ([], "ended with no finish reason"),
        ([Response(0.0, 3)], "ended with no finish reason"),
        ([Response(0.0, 3, finish_reason="abort")], "ended with abort"),
        ([Response(0.0, 0, finish_reason="stop")], "the answer has no tokens"),
    ],
)
def test_an_answer_that_is_none_is_an_error(responses, message):
    (record,) = run(Scripted(*responses), Point("concurrency", 1, requests(1)))
    assert (record.outcome, record.error) == ("error", message)


def test_a_failed_warm_up_ends_the_run():
    warm_up(Server(), requests(3), 1.0)
    with pytest.raises(RuntimeError, match="a warm-up request failed: broken"):
        warm_up(Server(fail={2: ValueError("broken")}), requests(3), 1.0)


def test_the_server_is_watched_while_a_point_runs(monkeypatch):
    looks = threading.Semaphore(0)

    class Watched(Server):
        def queue_depth(self):
            looks.release()
            return 7.0

    monkeypatch.setattr(driver, "LOOK_INTERVAL_S", 0.01)
    with Watch(Watched()) as watch:
        assert looks.acquire(timeout=10)
        assert looks.acquire(timeout=10)
    samples = watch.samples()
    assert samples.waiting[:2] == [7.0, 7.0]
    assert samples.peak_memory_bytes == 5


def test_memory_is_that_of_the_servers_own_processes(tmp_path):
    def process(pid, name, session):
        directory = tmp_path / str(pid)
        directory.mkdir()
        (directory / "stat").write_text(f"{pid} ({name}) S 1 {session} {session} 0")
        (directory / "status").write_text(f"Name: x\nVmHWM:\t{pid} kB\nVmRSS: 1 kB\n")

    process(10, "tritonserver", 10)
    process(11, "triton_python_", 10)
    process(12, "odd) name", 12)
    assert sorted(server_processes(None, tmp_path)) == [10, 11]
    process(20, "tritonserver", 20)
    assert server_processes(None, tmp_path) == []
    assert server_processes(20, tmp_path) == [20]
    assert peak_memory_of(11, tmp_path) == 11 * 1024
    assert peak_memory_of(99, tmp_path) is None
