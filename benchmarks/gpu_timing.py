"""Timing of device work without what surrounds it, and the machine's ceilings.

On CUDA, calls are recorded in one graph and its replays are timed by events: launches cost next to
nothing there, as in the engine's decode steps. On CPU (smoke runs) calls are timed one by one.
"""

from __future__ import annotations

import itertools
import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch
from gpu_report import CEILINGS, COPY, MATMUL, READ, Bench, Row

from pagestream_kernels import rms_norm

L2_BYTES = 60 << 20
_MIN_REPLAYS, _MAX_REPLAYS = 20, 200
_RUN_S = 0.05
_MIN_CALLS = 16
"""In a graph, so that the launch of the graph itself does not count."""

Call = Callable[[], object]


def rotations(bytes_per_call: int, *, most: int = 128) -> int:
    """How many sets of inputs to go round in, so that none is found in the L2 cache."""
    return max(1, min(most, math.ceil(3 * L2_BYTES / max(bytes_per_call, 1))))


def time_calls(bench: Bench, calls: Sequence[Call]) -> tuple[float, float]:
    """Seconds per call, in two runs: the median of many replays of all ``calls`` in turn."""
    if not bench.cuda:
        return _time_on_cpu(calls), _time_on_cpu(calls)
    calls = [*calls] * math.ceil(_MIN_CALLS / len(calls)) if len(calls) < _MIN_CALLS else calls
    replay = _record(calls)
    replay()
    once = _replay_times(replay, 3)[-1]
    count = max(_MIN_REPLAYS, min(_MAX_REPLAYS, int(_RUN_S / once)))
    if once > 2 * _RUN_S:
        count = 5
    first, second = (statistics.median(_replay_times(replay, count)) for _ in range(2))
    return first / len(calls), second / len(calls)


def _record(calls: Sequence[Call]) -> Call:
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for call in calls[:2]:
            call()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    return graph.replay


def _replay_times(replay: Call, count: int) -> list[float]:
    events = [torch.cuda.Event(enable_timing=True) for _ in range(count + 1)]
    events[0].record()
    for event in events[1:]:
        replay()
        event.record()
    torch.cuda.synchronize()
    return [before.elapsed_time(after) / 1000 for before, after in itertools.pairwise(events)]


def _time_on_cpu(calls: Sequence[Call]) -> float:
    calls[0]()
    times = []
    for call in calls[:3]:
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def launch_time(bench: Bench, call: Call, count: int) -> float:
    """Seconds that the host spends on one launch, while the device keeps up."""
    for _ in range(10):
        call()
    times = []
    for _ in range(count // 20):
        if bench.cuda:
            torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(20):
            call()
        times.append((time.perf_counter() - start) / 20)
    return statistics.median(times)


def ceilings(bench: Bench) -> None:
    """What the machine gives: bandwidth, matrix rate, and the price of a kernel."""
    bench.run(CEILINGS, COPY, partial(_bandwidth, bench, 1 << 20 if bench.smoke else 1 << 32))
    bench.run(CEILINGS, MATMUL, partial(_matmul, bench, 128 if bench.smoke else 8192))
    small, weight = torch.randn(2, 64, device=bench.device)
    launches: dict[str, Call] = {
        "torch": lambda: small.mul_(1.0),
        "rms_norm": lambda: rms_norm(small, weight, 1e-5),
    }
    for name, call in launches.items():
        bench.run(CEILINGS, f"launch, {name}", partial(_launches, bench, name, call))


def _bandwidth(bench: Bench, num_bytes: int) -> Iterator[Row]:
    source = torch.randn(num_bytes // 4, device=bench.device)
    target = torch.empty_like(source)
    runs = time_calls(bench, [lambda: target.copy_(source)])
    yield _ceiling(COPY, 2 * num_bytes / 1e9, "GB/s", runs)
    runs = time_calls(bench, [lambda: source.sum()])
    yield _ceiling(READ, num_bytes / 1e9, "GB/s", runs)


def _matmul(bench: Bench, width: int) -> Iterator[Row]:
    a, b = torch.randn(2, width, width, device=bench.device).to(bench.dtype)
    runs = time_calls(bench, [lambda: a @ b])
    yield _ceiling(MATMUL, 2 * width**3 / 1e12, "TFLOP/s", runs)


def _launches(bench: Bench, name: str, call: Call) -> Iterator[Row]:
    spent = launch_time(bench, call, 200 if bench.smoke else 4000)
    yield Row(CEILINGS, f"launch from Python, {name}", spent * 1e6, "us")
    runs = time_calls(bench, [call] * (20 if bench.smoke else 1000))
    what = f"one small kernel in a graph, {name}"
    yield Row(CEILINGS, what, min(runs) * 1e6, "us", noise=_noise(runs))


def _ceiling(name: str, amount: float, unit: str, runs: tuple[float, float]) -> Row:
    return Row(CEILINGS, name, amount / min(runs), unit, noise=_noise(runs))


def _noise(runs: tuple[float, float]) -> float:
    return abs(runs[0] - runs[1]) / min(runs)
