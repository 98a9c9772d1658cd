"""Stays: who sat in the batch from when to when, put together from a step trace; and its summary.

A request takes a seat when it starts and leaves it when it ends or is preempted; the next one takes
the lowest free seat. Knows nothing of pictures. Used by trace_picture and `pagestream trace`.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable
from dataclasses import dataclass, field

from pagestream.engine.step_trace import Arrival, Share, Trace


@dataclass
class Stay:
    """One request's time in the batch: from where it starts to where it ends or is preempted."""

    arrival: Arrival
    first: int
    last: int
    again: bool
    """It was preempted before."""
    shares: dict[int, Share] = field(default_factory=dict)
    outcome: str = ""
    """preempted, or why it ended; empty if the trace stops before."""
    seat: int = 0

    @property
    def num_cached_tokens(self) -> int:
        return self.shares[self.first].num_cached_tokens or 0

    @property
    def name(self) -> str:
        """The request_id if it is short, else the request's number."""
        arrival = self.arrival
        name = arrival.request_id if len(arrival.request_id) <= 8 else f"#{arrival.request}"
        return f"{name}/{arrival.index}" if arrival.index else name

    def __str__(self) -> str:
        shares = self.shares.values()
        computed = sum(share.num_scheduled_tokens for share in shares if share.phase != "decode")
        return (
            f"{self.arrival.request_id}, answer {self.arrival.index}: "
            f"iterations {self.first + 1} to {self.last + 1}, "
            f"{self.arrival.num_prompt_tokens} prompt tokens, "
            f"{self.num_cached_tokens} from the prefix cache, {computed} computed; "
            f"{sum(share.num_new_tokens for share in shares)} output tokens; "
            f"{self.outcome or 'still running'}"
        )


def stays_of(trace: Trace) -> list[Stay]:
    """In the order of their starts, each with its seat."""
    arrivals = {arrival.request: arrival for arrival in trace.arrivals}
    ends = {end.request: end for end in trace.ends}
    stays: list[Stay] = []
    current: dict[int, Stay] = {}
    started: set[int] = set()
    for step in trace.steps:
        for request in step.preempted:
            stay = current.pop(request)
            stay.outcome, stay.last = "preempted", step.step - 1
        for share in step.scheduled:
            if share.num_cached_tokens is not None:
                again = share.request in started
                stay = Stay(arrivals[share.request], step.step, step.step, again)
                current[share.request] = stay
                started.add(share.request)
                stays.append(stay)
            stay = current[share.request]
            stay.shares[step.step] = share
            stay.last = step.step
            stay.outcome = share.finish_reason or stay.outcome
    for request, stay in current.items():
        end = ends.get(request)
        if end is not None:
            stay.outcome, stay.last = end.finish_reason, max(stay.last, end.step - 1)
        elif not stay.outcome and trace.steps:
            stay.last = trace.steps[-1].step
    _take_seats(stays)
    return stays


def _take_seats(stays: Iterable[Stay]) -> None:
    free: list[int] = []
    taken: list[tuple[int, int]] = []  # (last step, seat)
    for stay in stays:
        while taken and taken[0][0] < stay.first:
            heapq.heappush(free, heapq.heappop(taken)[1])
        stay.seat = heapq.heappop(free) if free else len(taken)
        heapq.heappush(taken, (stay.last, stay.seat))


def summary(trace: Trace) -> str:
    """The trace in numbers."""
    steps = trace.steps
    shares = [share for step in steps for share in step.scheduled]
    seconds = steps[-1].end_s - steps[0].start_s
    output = sum(share.num_new_tokens for share in shares)
    cached = sum(share.num_cached_tokens or 0 for share in shares if share.phase != "recompute")
    preempted = sum(len(step.preempted) for step in steps)
    text = (
        f"{len(trace.arrivals)} requests, {len(steps)} iterations, {seconds_text(seconds)}, "
        f"{len(shares) / len(steps):.1f} requests per iteration, {output} output tokens, "
        f"{output / seconds:.0f} per second"
    )
    text += f", {cached} prompt tokens from the prefix cache" if cached else ""
    return text + (f", {preempted} preemption{'s' * (preempted > 1)}" if preempted else "")


def seconds_text(seconds: float) -> str:
    return f"{seconds * 1000:.0f} ms" if seconds < 1 else f"{seconds:.2f} s"
