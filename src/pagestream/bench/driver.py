"""Runs one point of a workload against a target, and records what happens to every request.

Closed loop: each of N users sends its next request when its last one has ended. Open loop (a rate,
or a trace): requests are sent when they are due, however many are open already, each in a thread of
its own; latencies count from when they were due, so a slow server cannot slow the load down and
hide it. What a target is, is in ``Target``; which one, is the command line's choice.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import TracebackType
from typing import Protocol

from pagestream.bench.records import RequestRecord, Samples
from pagestream.bench.workload import PlannedRequest, Point

LOOK_INTERVAL_S = 0.5
WARM_UP_USERS = 4


@dataclass(frozen=True, slots=True)
class Response:
    """One response with tokens, or the last one."""

    received_at: float
    """``time.monotonic()``."""
    num_tokens: int
    num_input_tokens: int | None = None
    num_cached_tokens: int | None = None
    finish_reason: str = ""


class RequestTimedOut(Exception):
    """No complete answer within the request's time."""


class Target(Protocol):
    """What requests are sent to; used from many threads."""

    def send(self, request: PlannedRequest, timeout_s: float) -> Iterator[Response]:
        """Raises RequestTimedOut, or whatever else says why the request failed."""
        ...

    def queue_depth(self) -> float | None:
        """Requests waiting in the server now; None where it cannot be seen."""
        ...

    def peak_memory_bytes(self) -> int | None:
        """Of the engine's process since it started; None where it cannot be seen."""
        ...


class Watch:
    """Looks at the target now and then while a point runs; a context manager."""

    def __init__(self, target: Target) -> None:
        self._target = target
        self._waiting: list[float] = []
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)

    def __enter__(self) -> Watch:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._stopped.set()
        self._thread.join()

    def samples(self) -> Samples:
        """Call it when the target is still there."""
        return Samples(self._waiting, self._target.peak_memory_bytes())

    def _look(self) -> None:
        while not self._stopped.wait(LOOK_INTERVAL_S):
            depth = self._target.queue_depth()
            if depth is not None:
                self._waiting.append(depth)


def run_point(
    target: Target,
    point: Point,
    place: int,
    timeout_s: float,
    on_done: Callable[[RequestRecord], None],
) -> list[RequestRecord]:
    """Send all requests of the point and wait for their ends; records in the order of those.

    ``place`` is the point's in the run. ``on_done`` is called in this thread, for every request.
    """
    ended: queue.SimpleQueue[RequestRecord] = queue.SimpleQueue()
    origin = time.monotonic()

    def send(request: PlannedRequest, planned_start_s: float) -> None:
        ended.put(_execute(target, request, place, planned_start_s, origin, timeout_s))

    if point.kind == "concurrency":
        _start_users(point, origin, send)
    else:
        _start(_send_when_due, point, origin, send)
    records = []
    for _ in point.requests:
        records.append(ended.get())
        on_done(records[-1])
    return records


_Send = Callable[[PlannedRequest, float], None]


def _start_users(point: Point, origin: float, send: _Send) -> None:
    left = iter(point.requests)
    lock = threading.Lock()

    def user() -> None:
        while True:
            with lock:
                request = next(left, None)
            if request is None:
                return
            send(request, time.monotonic() - origin)

    for _ in range(min(int(point.value), len(point.requests))):
        _start(user)


def _send_when_due(point: Point, origin: float, send: _Send) -> None:
    for request in sorted(point.requests, key=lambda each: each.arrival_s or 0.0):
        due = request.arrival_s or 0.0
        time.sleep(max(0.0, origin + due - time.monotonic()))
        _start(send, request, due)


def _start(run: Callable[..., None], *arguments: object) -> None:
    # Daemons: a Ctrl-C must not wait for requests that are still open.
    threading.Thread(target=run, args=arguments, daemon=True).start()


def _execute(
    target: Target,
    request: PlannedRequest,
    place: int,
    planned_start_s: float,
    origin: float,
    timeout_s: float,
) -> RequestRecord:
    """Every way to fail ends up in the record: a request that failed is a result too."""
    record = RequestRecord(
        place,
        request.index,
        planned_start_s,
        start_s=time.monotonic() - origin,
        requested_output_tokens=request.max_tokens,
    )
    record.end_s = record.start_s
    try:
        for response in target.send(request, timeout_s):
            _note(record, response, origin)
    except RequestTimedOut as error:
        record.outcome, record.error = "timeout", str(error)
    except Exception as error:
        record.outcome, record.error = "error", str(error) or repr(error)
    else:
        if record.finish_reason not in ("stop", "length"):
            record.outcome = "error"
            record.error = f"ended with {record.finish_reason or 'no finish reason'}"
        elif not record.num_output_tokens:
            record.outcome, record.error = "error", "the answer has no tokens"
    if record.outcome != "ok":
        record.end_s = time.monotonic() - origin
    return record


def _note(record: RequestRecord, response: Response, origin: float) -> None:
    record.end_s = response.received_at - origin
    record.responses.append((record.end_s, response.num_tokens))
    record.num_output_tokens += response.num_tokens
    if response.num_input_tokens is not None:
        record.num_input_tokens = response.num_input_tokens
    if response.num_cached_tokens is not None:
        record.num_cached_tokens = response.num_cached_tokens
    record.finish_reason = response.finish_reason or record.finish_reason


def warm_up(target: Target, requests: tuple[PlannedRequest, ...], timeout_s: float) -> None:
    """Send them, a few at a time, and forget them; raises RuntimeError if one failed."""
    if not requests:
        return
    point = Point("concurrency", WARM_UP_USERS, requests)
    records = run_point(target, point, -1, timeout_s, lambda record: None)
    failed = next((record for record in records if record.outcome != "ok"), None)
    if failed is not None:
        raise RuntimeError(f"a warm-up request failed: {failed.error}")
