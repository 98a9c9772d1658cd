"""The HTML report of one run or several side by side: one file, nothing loaded from elsewhere.

Turns summaries into rows of text for the template; the pictures are charts'. Ratios are of each
further run to the first one, for points under the same load. Used by `pagestream bench report`.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

import jinja2

from pagestream.bench import charts
from pagestream.bench.columns import COLUMNS, Column
from pagestream.bench.records import Run

TEMPLATE = "report.html.j2"


def pictures(runs: Sequence[Run]) -> dict[str, str]:
    """SVG by name: curves, distributions, and a timeline of every point of every run."""
    drawn = {"curves": charts.curves(runs), "distributions": charts.distributions(runs)}
    for run in runs:
        for number, point in enumerate(run.summary):
            drawn[timeline_name(run, point)] = charts.timeline(run, number)
    return drawn


def timeline_name(run: Run, point: dict[str, Any]) -> str:
    return f"timeline of {run.name}, {point['label']}"


def comparison(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """Per load that the first run shares with others: rows of values, and ratios to the first."""
    groups = []
    for point in runs[0].summary:
        others = [
            (run.name, match)
            for run in runs[1:]
            for match in run.summary
            if match["label"] == point["label"]
        ]
        if not others:
            continue
        rows = [{"name": runs[0].name, "cells": [(c.text(point), "") for c in _compared()]}]
        for name, match in others:
            cells = [(c.text(match), _ratio(c.value(match), c.value(point))) for c in _compared()]
            rows.append({"name": name, "cells": cells})
        groups.append({"label": point["label"], "rows": rows})
    return groups


def render(runs: Sequence[Run], drawn: dict[str, str]) -> str:
    """The page of at least one run, with its ``pictures``."""
    template = (files("pagestream.bench") / TEMPLATE).read_text(encoding="utf-8")
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined)
    return environment.from_string(template).render(
        title=" and ".join(run.name for run in runs),
        runs=[
            {
                "name": run.name,
                "facts": list(facts(run)),
                "rows": [
                    [point["label"], *(c.text(point) for c in COLUMNS)] for point in run.summary
                ],
                "errors": _errors(run),
            }
            for run in runs
        ],
        columns=[column.title for column in COLUMNS],
        compared=[column.title for column in _compared()],
        comparison=comparison(runs),
        pictures=drawn,
    )


def facts(run: Run) -> list[tuple[str, str]]:
    """What run.json says, as one line per fact; nested objects get dotted names."""
    return [
        (name, value)
        for name, value in _flat("", {k: v for k, v in run.info.items() if k != "points"})
        if value
    ]


def write_pictures(drawn: dict[str, str], prefix: Path) -> list[Path]:
    """Each picture as a file PREFIX-NAME.svg of its own."""
    written = []
    for name, svg in drawn.items():
        slug = "".join(char if char.isalnum() else "-" for char in name.lower())
        path = prefix.with_name(f"{prefix.name}-{slug.replace('--', '-')}.svg")
        path.write_text(svg, encoding="utf-8")
        written.append(path)
    return written


def _compared() -> list[Column]:
    return [column for column in COLUMNS if column.compared]


def _ratio(value: float | None, base: float | None) -> str:
    return "" if value is None or not base else f"{value / base:.2f}x"


def _flat(prefix: str, values: dict[str, Any]) -> list[tuple[str, str]]:
    found = []
    for name, value in values.items():
        if isinstance(value, dict):
            found += _flat(f"{prefix}{name}.", value)
        elif isinstance(value, list):
            found.append((prefix + name, ", ".join(map(str, value))))
        else:
            found.append((prefix + name, value if isinstance(value, str) else json.dumps(value)))
    return found


def _errors(run: Run) -> list[tuple[str, int]]:
    """Each message and how often it came."""
    counts: dict[str, int] = {}
    for record in run.records:
        if record.outcome != "ok":
            message = f"{record.outcome}: {record.error}"
            counts[message] = counts.get(message, 0) + 1
    return sorted(counts.items(), key=lambda item: -item[1])
