"""Draws runs as SVG: latency against throughput, distributions, and when each request was what.

Needs matplotlib, of the optional dependencies ``bench``. Text stays text, so that the pictures can
be searched; the same run gives the same file. Used by the report alone.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import LogLocator, NullLocator

from pagestream.bench.records import RequestRecord, Run

PREFILL, DECODE, LATE, FAILED, MARK = "#2f6fb7", "#f2a541", "#d9dce1", "#c21f30", "#222"
COLORS = ("#2f6fb7", "#d9822b", "#0b7a68", "#8a56b0", "#c21f30", "#5c6670", "#a3b82c", "#d073a8")
LINES = ("-", "--", ":", "-.")
MAX_BARS = 200
"""Requests in a timeline; bars get too thin beyond."""
_STYLE: dict[str, Any] = {
    "svg.fonttype": "none",
    "font.family": "sans-serif",
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#e3e5e9",
    "axes.edgecolor": "#8e99a8",
    "legend.frameon": False,
}


def curves(runs: Sequence[Run]) -> str:
    """Latency over throughput: each run a line, each of its points a mark with its load."""
    with _figure(10, 4) as figure:
        axes = figure.subplots(1, 2)
        for axis, key, name in zip(
            axes,
            ("ttft_ms", "tpot_ms"),
            ("time to first token", "time per output token"),
            strict=True,
        ):
            for place, run in enumerate(runs):
                _curve(axis, run, key, COLORS[place % len(COLORS)], len(runs) > 1)
            axis.set(title=f"{name}, ms", xlabel="output tokens per second", xlim=(0, None))
            axis.set_ylim(0, None)
            axis.legend()
        return _svg(figure, "curves")


def _curve(axis: Axes, run: Run, key: str, color: str, named: bool) -> None:
    points = [point for point in run.summary if point[key]["median"] is not None]
    rates = [point["output_tokens_per_s"] for point in points]
    for quantile, line in (("median", "-"), ("p99", ":")):
        label = f"{run.name}, {quantile}" if named else quantile
        values = [point[key][quantile] for point in points]
        axis.plot(rates, values, line, marker="o", ms=4, color=color, label=label)
    for rate, point in zip(rates, points, strict=True):
        axis.annotate(
            f"{point['value']:g}", (rate, point[key]["median"]), (3, 4), textcoords="offset points"
        )


def distributions(runs: Sequence[Run]) -> str:
    """Which share of the requests was at most so slow: a colour per point, a line per run."""
    kinds: tuple[tuple[str, Callable[[RequestRecord], float | None]], ...] = (
        ("time to first token", lambda record: record.ttft_s),
        ("time per output token", lambda record: record.tpot_s),
    )
    with _figure(10, 4) as figure:
        axes = figure.subplots(1, 2, sharey=True)
        for axis, (name, of) in zip(axes, kinds, strict=True):
            for place, run in enumerate(runs):
                for number, point in enumerate(run.summary):
                    ok = [r for r in run.of_point(number) if r.outcome == "ok"]
                    values = sorted(v * 1e3 for v in map(of, ok) if v is not None)
                    label = f"{run.name}, {point['label']}" if len(runs) > 1 else point["label"]
                    _steps(axis, values, COLORS[number % len(COLORS)], LINES[place % 4], label)
            axis.set(title=f"{name}, ms", xscale="log", ylim=(0, 1.02))
            axis.xaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
            axis.xaxis.set_major_formatter("{x:g}")
            axis.xaxis.set_minor_locator(NullLocator())
        axes[0].set_ylabel("share of requests")
        axes[1].legend(fontsize=8)
        return _svg(figure, "distributions")


def _steps(axis: Axes, values: list[float], color: str, line: str, label: str) -> None:
    shares = [place / len(values) for place in range(len(values) + 1)]
    axis.plot(
        [*values[:1], *values],
        shares if values else [],
        line,
        drawstyle="steps-post",
        color=color,
        label=label,
    )


def timeline(run: Run, number: int) -> str:
    """One bar per request of a point, by planned start; the mark between the colours is its first
    token."""
    records = sorted(run.of_point(number), key=lambda record: record.planned_start_s)[:MAX_BARS]
    with _figure(10, 1.1 + min(8.0, 0.17 * len(records))) as figure:
        axis = figure.subplots()
        for row, record in enumerate(records):
            for start, end, color in _parts(record):
                axis.barh(row, end - start, left=start, height=0.75, color=color)
            if record.first_token_s is not None:
                axis.vlines(record.first_token_s, row - 0.38, row + 0.38, color=MARK, linewidth=2)
        axis.set(xlabel="seconds", ylabel="request", ylim=(len(records) - 0.4, -0.6))
        axis.set_xlim(0, None)
        axis.grid(axis="y", visible=False)
        axis.legend(handles=_legend(records), ncols=5, loc="lower left", bbox_to_anchor=(0, 1))
        return _svg(figure, f"{run.name}-{number}")


def _parts(record: RequestRecord) -> Iterator[tuple[float, float, str]]:
    yield record.planned_start_s, record.start_s, LATE
    if record.outcome != "ok":
        yield record.start_s, record.end_s, FAILED
        return
    first = record.first_token_s or record.end_s
    yield record.start_s, first, PREFILL
    yield first, record.end_s, DECODE


def _legend(records: Sequence[RequestRecord]) -> list[Patch | Line2D]:
    handles: list[Patch | Line2D] = [
        Patch(color=PREFILL, label="waiting and prefill"),
        Line2D([], [], color=MARK, marker="|", ms=9, mew=2, linestyle="", label="first token"),
        Patch(color=DECODE, label="decode"),
    ]
    if any(record.start_s - record.planned_start_s > 0.01 for record in records):
        handles.append(Patch(color=LATE, label="due, not sent yet"))
    if any(record.outcome != "ok" for record in records):
        handles.append(Patch(color=FAILED, label="failed"))
    return handles


@contextmanager
def _figure(width: float, height: float) -> Iterator[Figure]:
    with matplotlib.rc_context(_STYLE):
        yield Figure(figsize=(width, height), layout="constrained")


def _svg(figure: Figure, salt: str) -> str:
    """The <svg> element. ``salt`` keeps the ids of several pictures on one page apart."""
    out = io.StringIO()
    with matplotlib.rc_context({"svg.hashsalt": salt}):
        figure.savefig(out, format="svg", metadata={"Date": None, "Creator": None})
    text = out.getvalue()
    return text[text.index("<svg") :]
