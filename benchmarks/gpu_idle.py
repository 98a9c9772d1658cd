"""How much of the time the GPU does nothing, by what torch's profiler saw it do."""

from __future__ import annotations

from collections.abc import Callable

from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile


def idle_share(work: Callable[[], None]) -> float:
    """Between the first and the last thing that ``work`` has the GPU do. The profiler slows the
    host a little, so this is an upper bound."""
    with profile(activities=[ProfilerActivity.CUDA]) as profiled:
        work()
    spans = [
        (event.time_range.start, event.time_range.end)
        for event in profiled.events()
        if event.device_type == DeviceType.CUDA
    ]
    if not spans:
        raise RuntimeError("the profiler saw nothing on the GPU")
    return idle_of(spans)


def idle_of(spans: list[tuple[float, float]]) -> float:
    """Share of the time from the first start to the last end that no span covers."""
    spans = sorted(spans)
    first, busy, reached = spans[0][0], 0.0, spans[0][0]
    for start, end in spans:
        busy += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return 1.0 - busy / max(reached - first, 1e-9)
