"""Draws step traces as one SVG: seats of the batch as lanes, iterations as columns.

A seat that is taken by one request after another is how in-flight batching becomes visible.
Several traces are drawn one above the other on the same scale. Knows the record of step_trace, not
how it came about. Used by `pagestream trace`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from pagestream.cli.svg import Svg
from pagestream.cli.trace_stays import Stay, seconds_text, stays_of, summary
from pagestream.engine.step_trace import Step, Trace

WIDTH = 1080
LEFT, RIGHT = 104, 16
MAX_CELL = 26.0
LANE, BAR = 40, 22
"""Height of a lane, and of the bar in it; the rest is for the request's name."""
CHART = 34
HEAD, GAP = 70, 32
"""Above a panel's lanes, and between panels."""
MAX_STEPS = 1000
"""Columns get too thin beyond."""

STYLE = """
text { font: 11px system-ui, -apple-system, 'Segoe UI', Helvetica, Arial, sans-serif; fill: #222 }
.title { font-size: 16px; font-weight: 600 }
.quiet { fill: #666 }
.name { font-weight: 600 }
.cached-text { fill: #0b7a68; font-weight: 600 }
.preempted-text { fill: #c21f30; font-weight: 600 }
.in-cell { font-size: 9.5px; fill: #fff; text-anchor: middle }
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
    def most_waiting(self) -> int:
        return max(step.num_waiting for step in self.steps)

    @property
    def num_charts(self) -> int:
        return 3 if self.most_waiting else 2

    @property
    def height(self) -> float:
        return HEAD + self.num_seats * LANE + self.num_charts * (CHART + 10)


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
    cell = min(MAX_CELL, (WIDTH - LEFT - RIGHT) / max(len(panel.steps) for panel in panels))
    kinds = set().union(*map(_kinds, panels))
    rows = _legend_rows([kind for kind in LEGEND if kind in kinds])
    top = 20.0 + 24 * len(rows)
    height = top + sum(panel.height + GAP for panel in panels)
    svg = Svg(WIDTH, height, STYLE, PATTERNS)
    svg.rect("paper", 0, 0, WIDTH, height)
    for number, row in enumerate(rows):
        for kind, x in row:
            _legend_entry(svg, kind, x, 12 + 24 * number)
    for panel in panels:
        _Drawing(svg, panel, cell, top).draw()
        top += panel.height + GAP
    return svg.text_of("Step trace: " + ", ".join(panel.title for panel in panels))


def _kinds(panel: Panel) -> set[str]:
    """What the legend has to explain."""
    kinds = {"empty"} if any(_empty_runs(panel)) else set()
    for stay in panel.stays:
        kinds |= {kind for kind, _, _ in _runs(stay, stay.first, stay.last, merge=True)}
        kinds |= {"cached"} if stay.num_cached_tokens else set()
        if stay.outcome:
            kinds.add("preempted" if stay.outcome == "preempted" else "end")
    return kinds


def _legend_rows(kinds: Sequence[str]) -> list[list[tuple[str, float]]]:
    """(kind, x), line by line."""
    rows: list[list[tuple[str, float]]] = [[]]
    x = 16.0
    for kind in kinds:
        width = 44 + 5.9 * len(LEGEND[kind])
        if x + width > WIDTH:
            rows.append([])
            x = 16.0
        rows[-1].append((kind, x))
        x += width
    return rows


def _legend_entry(svg: Svg, kind: str, x: float, y: float) -> None:
    if kind == "preempted":
        svg.cross(kind, x + 9, y + 7, 5)
    elif kind == "end":
        svg.rect(kind, x + 8, y, 3, 14)
    else:
        svg.rect(kind, x, y, 18, 14)
    svg.text("", x + 24, y + 11, LEGEND[kind])


class _Drawing:
    """One panel on its way into the picture."""

    def __init__(self, svg: Svg, panel: Panel, cell: float, top: float) -> None:
        self._svg = svg
        self._panel = panel
        self._cell = cell
        self._top = top
        self._lanes = top + HEAD
        self._first = panel.steps[0].step
        self._right = LEFT + cell * len(panel.steps)

    def draw(self) -> None:
        panel = self._panel
        self._svg.text("title", 16, self._top + 16, panel.title)
        self._svg.text("quiet", 16, self._top + 34, summary(panel.trace))
        bottom = self._lanes + panel.num_seats * LANE
        self._axis(bottom + panel.num_charts * (CHART + 10))
        for seat in range(panel.num_seats):
            y = self._lanes + seat * LANE
            self._svg.text("quiet right", LEFT - 10, y + LANE - 11, f"seat {seat + 1}")
            self._svg.rect("lane", LEFT, y + LANE - BAR - 2, self._right - LEFT, BAR)
        for seat, start, count in _empty_runs(panel):
            y = self._lanes + seat * LANE + LANE - BAR - 2
            self._svg.rect("empty", self._x(start), y, count * self._cell, BAR)
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
        marked = [step for step in steps if (step.step + 1) % distance == 0]
        if not marked or (marked[0].step - self._first) * self._cell >= 44:
            marked.insert(0, steps[0])
        for step in marked:
            x = self._x(step.step)
            self._svg.line("grid", x, y - 2, x, bottom)
            if x > WIDTH - 44:
                continue
            self._svg.text("quiet", x + 2, y - 10, str(step.step + 1))
            self._svg.text("quiet", x + 2, y + 2, seconds_text(step.start_s))

    def _stay(self, stay: Stay) -> None:
        svg, cell = self._svg, self._cell
        y = self._lanes + stay.seat * LANE + LANE - BAR - 2
        gap = 1.0 if cell >= 6 else 0.0
        first = max(stay.first, self._first)
        last = min(stay.last, self._panel.steps[-1].step)
        svg.begin(str(stay))
        for kind, start, count in _runs(stay, first, last, merge=gap == 0):
            svg.rect(kind, self._x(start) + gap / 2, y, count * cell - gap, BAR)
        for step, share in stay.shares.items():
            words = str(share.num_scheduled_tokens)
            fits = cell >= 5.6 * len(words) + 1
            if share.phase != "decode" and fits and first <= step <= last:
                svg.text("in-cell", self._x(step) + cell / 2, y + BAR / 2 + 4, words)
        cached = stay.num_cached_tokens
        if cached and first == stay.first:
            svg.rect("cached", self._x(first) + gap / 2, y - 1, max(cell - gap, 5), 7)
        self._ending(stay, y, last)
        self._name(stay, y - 5, first, last, cached)
        svg.end()

    def _ending(self, stay: Stay, y: float, last: int) -> None:
        if not stay.outcome or last < stay.last:
            return
        x = self._x(stay.last + 1)
        if stay.outcome == "preempted":
            self._svg.cross("preempted", x - min(self._cell, 10) / 2, y + BAR / 2, 5)
        else:
            self._svg.rect("end", x - 2.5, y - 2, 2.5, BAR + 4)

    def _name(self, stay: Stay, y: float, first: int, last: int, cached: int) -> None:
        room = (last - first + 1) * self._cell
        name = stay.name
        parts = [("name", name)]
        if stay.again:
            parts.append(("quiet", "again"))
        if cached:
            parts.append(("cached-text", f"{cached} cached"))
        shown: list[tuple[str, str]] = []
        for part in parts:
            if sum(len(words) + 1 for _, words in [*shown, part]) * 6.6 <= room + 4:
                shown.append(part)
        if shown and shown[0] == parts[0]:
            self._svg.spans(self._x(first) + 1, y, shown)

    def _charts(self, top: float) -> None:
        panel, steps = self._panel, self._panel.steps
        tokens = max(sum(s.num_scheduled_tokens for s in step.scheduled) for step in steps)
        self._chart_label(top + 10, "tokens", f"most {tokens}")
        blocks = max(step.num_blocks_used for step in steps)
        second = top + 20 + CHART
        self._chart_label(second, "KV blocks", f"{blocks} of {panel.trace.engine.num_blocks}")
        for step in steps:
            base = top + 10 + CHART
            for phase in ("decode", "prefill", "recompute"):
                count = sum(s.num_scheduled_tokens for s in step.scheduled if s.phase == phase)
                base -= self._bar(phase, step.step, base, count / tokens)
            self._bar("blocks", step.step, second + CHART, step.num_blocks_used / blocks)
        if panel.most_waiting:
            third = second + CHART + 10
            self._chart_label(third, "waiting", f"most {panel.most_waiting}")
            for step in steps:
                share = step.num_waiting / panel.most_waiting
                self._bar("waiting", step.step, third + CHART, share)

    def _chart_label(self, y: float, words: str, scale: str) -> None:
        self._svg.text("quiet right", LEFT - 10, y + 14, words)
        self._svg.text("quiet right", LEFT - 10, y + 27, scale)
        self._svg.rect("lane", LEFT, y, self._right - LEFT, CHART)

    def _bar(self, kind: str, step: int, base: float, share: float) -> float:
        height = max(CHART * share, 1.5) if share else 0.0
        if height:
            gap = 1.0 if self._cell >= 6 else 0.0
            self._svg.rect(kind, self._x(step) + gap / 2, base - height, self._cell - gap, height)
        return height


def _empty_runs(panel: Panel) -> Iterable[tuple[int, int, int]]:
    """(seat, first step, number of steps) where a seat is empty while requests wait."""
    taken: dict[int, set[int]] = {seat: set() for seat in range(panel.num_seats)}
    for stay in panel.stays:
        taken[stay.seat].update(range(stay.first, stay.last + 1))
    for seat, busy in taken.items():
        count = 0
        for step in panel.steps:
            if step.num_waiting and step.step not in busy:
                count += 1
            elif count:
                yield seat, step.step - count, count
                count = 0
        if count:
            yield seat, panel.steps[-1].step + 1 - count, count


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
