"""Draws step traces as one SVG: seats of the batch as lanes, iterations as columns.

A request takes a seat when it starts and leaves it when it ends or is preempted; the next one takes
the lowest free seat, which is how in-flight batching becomes visible. Several traces are drawn one
above the other on the same scale. Knows the record of step_trace, not how it came about. Used by
`pagestream trace`.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from pagestream.cli.svg import Svg
from pagestream.engine.step_trace import Arrival, Share, Step, Trace

WIDTH = 1080
LEFT, RIGHT = 104, 16
MAX_CELL = 26.0
LANE, BAR = 40, 22
"""Height of a lane, and of the bar in it; the rest is for the request's name."""
CHART = 34
MAX_STEPS = 1000
"""Columns get too thin beyond."""

STYLE = """
text { font: 11px system-ui, -apple-system, 'Segoe UI', Helvetica, Arial, sans-serif; fill: #222 }
.title { font-size: 16px; font-weight: 600 }
.quiet { fill: #666 }
.name { font-weight: 600 }
.cached-text { fill: #0b7a68; font-weight: 600 }
.preempted-text { fill: #c21f30; font-weight: 600 }
.in-cell { font-size: 10px; fill: #fff; text-anchor: middle }
.right { text-anchor: end }
.middle { text-anchor: middle }
.paper { fill: #fff }
.lane { fill: #f4f5f7 }
.prefill { fill: #2f6fb7 }
.decode { fill: #f2a541 }
.recompute { fill: #8a56b0 }
.surplus { fill: #d8d3c8 }
.idle { fill: #fff; stroke: #b9bec6; stroke-dasharray: 2 2 }
.empty { fill: url(#empty) }
.cached { fill: url(#cached); stroke: #0b7a68 }
.grid { stroke: #e3e5e9 }
.preempted { stroke: #c21f30; stroke-width: 2.5 }
.end { fill: #222 }
.blocks { fill: #8e99a8 }
.waiting { fill: #d98a94 }
"""
PATTERNS = """
<pattern id="empty" width="7" height="7" patternUnits="userSpaceOnUse"
 patternTransform="rotate(45)"><rect width="7" height="7" fill="#fdf1f2"/>
<rect width="2" height="7" fill="#eebfc5"/></pattern>
<pattern id="cached" width="5" height="5" patternUnits="userSpaceOnUse"
 patternTransform="rotate(45)"><rect width="5" height="5" fill="#fff"/>
<rect width="2.5" height="5" fill="#27a590"/></pattern>
"""
LEGEND = {
    "prefill": "prompt (prefill)",
    "decode": "output token (decode)",
    "recompute": "computed again",
    "cached": "prompt tokens from the prefix cache",
    "idle": "in the batch, no tokens this time",
    "surplus": "surplus, dropped",
    "empty": "seat empty while requests wait",
    "end": "ended",
    "preempted": "preempted",
}


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


@dataclass(frozen=True)
class Panel:
    """One trace, as far as it is drawn."""

    title: str
    trace: Trace
    steps: Sequence[Step]
    stays: Sequence[Stay]

    @property
    def num_seats(self) -> int:
        return 1 + max((stay.seat for stay in self.stays), default=0)

    @property
    def height(self) -> float:
        return 76 + self.num_seats * LANE + 3 * (CHART + 10)


def make_panel(title: str, trace: Trace, first: int, last: int | None) -> Panel:
    """Steps ``first`` to ``last`` of a trace, both included."""
    steps = [s for s in trace.steps if s.step >= first and (last is None or s.step <= last)]
    if not steps:
        raise ValueError(
            f"{title}: no step between {first} and {last}: the trace has {len(trace.steps)}"
        )
    if len(steps) > MAX_STEPS:
        raise ValueError(
            f"{title}: {len(steps)} steps, a picture holds {MAX_STEPS}: choose some with "
            "--first and --last"
        )
    stays = [
        stay
        for stay in stays_of(trace)
        if stay.first <= steps[-1].step and stay.last >= steps[0].step
    ]
    return Panel(title, trace, steps, stays)


def draw(panels: Sequence[Panel]) -> str:
    most = max(len(panel.steps) for panel in panels)
    cell = min(MAX_CELL, (WIDTH - LEFT - RIGHT) / most)
    height = 44 + sum(panel.height + 18 for panel in panels)
    svg = Svg(WIDTH, height, STYLE, PATTERNS)
    svg.rect("paper", 0, 0, WIDTH, height)
    drawings = []
    top = 44.0
    for panel in panels:
        drawing = _Drawing(svg, panel, cell, top)
        drawing.draw()
        drawings.append(drawing)
        top += panel.height + 18
    _legend(svg, set().union(*(drawing.used for drawing in drawings)))
    return svg.text_of("Step trace: " + ", ".join(panel.title for panel in panels))


def _legend(svg: Svg, used: set[str]) -> None:
    x = 16.0
    for kind, words in LEGEND.items():
        if kind not in used:
            continue
        if kind == "preempted":
            svg.cross(kind, x + 8, 20, 4)
        elif kind == "end":
            svg.rect(kind, x + 6, 13, 3, 14)
        else:
            svg.rect(kind, x, 13, 18, 14)
        svg.text("", x + 23, 24, words)
        x += 23 + 5.7 * len(words) + 20


class _Drawing:
    """One panel on its way into the picture; ``used``: kinds that the legend has to explain."""

    def __init__(self, svg: Svg, panel: Panel, cell: float, top: float) -> None:
        self._svg = svg
        self._panel = panel
        self._cell = cell
        self._top = top
        self._lanes = top + 62
        self._first = panel.steps[0].step
        self._right = LEFT + cell * len(panel.steps)
        self.used: set[str] = set()

    def draw(self) -> None:
        panel = self._panel
        self._svg.text("title", 16, self._top + 16, panel.title)
        self._svg.text("quiet", 16, self._top + 34, summary(panel.trace))
        bottom = self._lanes + panel.num_seats * LANE
        self._axis(bottom + 3 * (CHART + 10))
        for seat in range(panel.num_seats):
            y = self._lanes + seat * LANE
            self._svg.text("quiet right", LEFT - 10, y + LANE - 11, f"seat {seat + 1}")
            self._svg.rect("lane", LEFT, y + LANE - BAR - 2, self._right - LEFT, BAR)
        self._empty_seats()
        for stay in panel.stays:
            self._stay(stay)
        self._charts(bottom)

    def _x(self, step: int) -> float:
        return LEFT + (step - self._first) * self._cell

    def _axis(self, bottom: float) -> None:
        steps = self._panel.steps
        distance = next(n for n in (1, 2, 5, 10, 20, 50, 100, 200) if n * self._cell >= 44)
        y = self._lanes - 4
        self._svg.text("quiet right", LEFT - 10, y - 10, "iteration")
        self._svg.text("quiet right", LEFT - 10, y + 2, "time")
        for step in steps:
            if step.step % distance == 0:
                x = self._x(step.step)
                self._svg.line("grid", x, y - 2, x, bottom)
                self._svg.text("quiet", x + 2, y - 10, str(step.step + 1))
                self._svg.text("quiet", x + 2, y + 2, _seconds(step.start_s))

    def _empty_seats(self) -> None:
        taken = {
            (stay.seat, step)
            for stay in self._panel.stays
            for step in range(stay.first, stay.last + 1)
        }
        for seat in range(self._panel.num_seats):
            run: list[int] = []
            for step in self._panel.steps:
                if step.num_waiting and (seat, step.step) not in taken:
                    run.append(step.step)
                elif run:
                    self._run("empty", seat, run)
                    run = []
            if run:
                self._run("empty", seat, run)

    def _run(self, kind: str, seat: int, steps: list[int]) -> None:
        self.used.add(kind)
        y = self._lanes + seat * LANE + LANE - BAR - 2
        self._svg.rect(kind, self._x(steps[0]), y, len(steps) * self._cell, BAR)

    def _stay(self, stay: Stay) -> None:
        svg, cell = self._svg, self._cell
        y = self._lanes + stay.seat * LANE + LANE - BAR - 2
        gap = 1.0 if cell >= 6 else 0.0
        first = max(stay.first, self._first)
        last = min(stay.last, self._panel.steps[-1].step)
        svg.begin(describe(stay))
        for kind, start, count in _runs(stay, first, last, merge=gap == 0):
            self.used.add(kind)
            svg.rect(kind, self._x(start) + gap / 2, y, count * cell - gap, BAR)
        for step, share in stay.shares.items():
            words = str(share.num_scheduled_tokens)
            fits = cell >= 6.2 * len(words) + 2
            if share.phase != "decode" and fits and first <= step <= last:
                svg.text("in-cell", self._x(step) + cell / 2, y + BAR / 2 + 4, words)
        cached = stay.shares[stay.first].num_cached_tokens
        if cached and first == stay.first:
            self.used.add("cached")
            svg.rect("cached", self._x(first) + gap / 2, y - 1, max(cell - gap, 5), 7)
        self._ending(stay, y, last)
        self._name(stay, y - 5, first, last, cached or 0)
        svg.end()

    def _ending(self, stay: Stay, y: float, last: int) -> None:
        if not stay.outcome or last < stay.last:
            return
        x = self._x(stay.last + 1)
        if stay.outcome == "preempted":
            self.used.add("preempted")
            self._svg.cross("preempted", x - min(self._cell, 10) / 2, y + BAR / 2, 5)
        else:
            self.used.add("end")
            self._svg.rect("end", x - 2.5, y - 2, 2.5, BAR + 4)

    def _name(self, stay: Stay, y: float, first: int, last: int, cached: int) -> None:
        room = (last - first + 1) * self._cell
        name = short_name(stay.arrival)
        parts = [("name", name)]
        if stay.again:
            parts.append(("quiet", "again"))
        if cached:
            parts.append(("cached-text", f"{cached} cached"))
        shown: list[tuple[str, str]] = []
        for part in parts:
            if sum(len(words) + 1 for _, words in [*shown, part]) * 6.0 <= room + 4:
                shown.append(part)
        if shown and shown[0] == parts[0]:
            self._svg.spans(self._x(first) + 1, y, shown)

    def _charts(self, top: float) -> None:
        trace, steps = self._panel.trace, self._panel.steps
        budget = max(sum(s.num_scheduled_tokens for s in step.scheduled) for step in steps)
        self._chart_label(top + 10, "tokens", f"most {budget}")
        self._chart_label(top + 20 + CHART, "KV blocks", f"of {trace.engine.num_blocks}")
        waiting = max(1, *(step.num_waiting for step in steps))
        self._chart_label(top + 30 + 2 * CHART, "waiting", f"most {waiting}")
        for step in steps:
            base = top + 10 + CHART
            for phase in ("decode", "prefill", "recompute"):
                count = sum(s.num_scheduled_tokens for s in step.scheduled if s.phase == phase)
                base -= self._bar(phase, step.step, base, count / budget)
            used = step.num_blocks_used / trace.engine.num_blocks
            self._bar("blocks", step.step, top + 20 + 2 * CHART, used)
            self._bar("waiting", step.step, top + 30 + 3 * CHART, step.num_waiting / waiting)

    def _chart_label(self, y: float, words: str, scale: str) -> None:
        self._svg.text("quiet right", LEFT - 10, y + 14, words)
        self._svg.text("quiet right", LEFT - 10, y + 27, scale)
        self._svg.rect("lane", LEFT, y, self._right - LEFT, CHART)

    def _bar(self, kind: str, step: int, base: float, share: float) -> float:
        height = CHART * share
        if height:
            gap = 1.0 if self._cell >= 6 else 0.0
            self._svg.rect(kind, self._x(step) + gap / 2, base - height, self._cell - gap, height)
        return height


def _runs(stay: Stay, first: int, last: int, merge: bool) -> Iterable[tuple[str, int, int]]:
    """(kind, first step, number of steps) of the cells; one each unless ``merge``."""
    start, kind = first, ""
    for step in range(first, last + 2):
        share = stay.shares.get(step)
        now = "idle" if share is None else "surplus" if share.surplus else share.phase
        if step > first and (step > last or now != kind or not merge):
            yield kind, start, step - start
            start = step
        kind = now


def short_name(arrival: Arrival) -> str:
    """The request_id if it is short, else its number."""
    name = arrival.request_id if len(arrival.request_id) <= 8 else f"#{arrival.request}"
    return f"{name}/{arrival.index}" if arrival.index else name


def describe(stay: Stay) -> str:
    """The tooltip."""
    shares = stay.shares.values()
    computed = sum(share.num_scheduled_tokens for share in shares if share.phase != "decode")
    cached = stay.shares[stay.first].num_cached_tokens
    return (
        f"{stay.arrival.request_id}, answer {stay.arrival.index}: iterations {stay.first + 1} to "
        f"{stay.last + 1}, {stay.arrival.num_prompt_tokens} prompt tokens, {cached} from the "
        f"cache, {computed} computed; {sum(share.num_new_tokens for share in shares)} output "
        f"tokens; {stay.outcome or 'still running'}"
    )


def summary(trace: Trace) -> str:
    """The trace in numbers."""
    steps = trace.steps
    shares = [share for step in steps for share in step.scheduled]
    seconds = steps[-1].end_s - steps[0].start_s
    output = sum(share.num_new_tokens for share in shares)
    cached = sum(share.num_cached_tokens or 0 for share in shares if share.phase != "recompute")
    preempted = sum(len(step.preempted) for step in steps)
    text = (
        f"{len(trace.arrivals)} requests, {len(steps)} iterations, {_seconds(seconds)}, "
        f"{len(shares) / len(steps):.1f} requests per iteration, {output} output tokens, "
        f"{output / seconds:.0f} per second"
    )
    text += f", {cached} prompt tokens from the prefix cache" if cached else ""
    return text + (f", {preempted} preemptions" if preempted else "")


def _seconds(seconds: float) -> str:
    return f"{seconds * 1000:.0f} ms" if seconds < 1 else f"{seconds:.2f} s"
