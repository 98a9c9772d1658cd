"""What the GPU benchmark found: rows that are written as they come, and the table at the end.

A row is one measurement, or the reason why there is none. Rows go to a file of JSON lines at once,
so that a section that hangs or dies takes nothing with it. Knows nothing of what is measured.
"""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import torch

COPY, READ, MATMUL = "copy", "read only", "bf16 matmul"
"""Rows of the section `ceilings` that others are a share of."""
CEILINGS = "ceilings"


@dataclass(frozen=True)
class Row:
    section: str
    name: str
    value: float | None = None
    unit: str = ""
    share: float | None = None
    """Of what ``of`` names; 1 is all of it."""
    of: str = ""
    target: str = ""
    met: bool | None = None
    noise: float | None = None
    """Difference of two runs, relative to the better one."""
    error: str = ""


@dataclass
class Bench:
    """What every section gets. ``smoke``: shapes so small that a CPU runs them in seconds."""

    device: torch.device
    smoke: bool
    path: Path
    """File of JSON lines, appended to."""
    deadline: float
    """time.monotonic() after which no further case starts."""
    part: tuple[int, int] = (0, 1)
    """This process's share of a section that is divided among several: index, count."""

    @property
    def cuda(self) -> bool:
        return self.device.type == "cuda"

    @property
    def dtype(self) -> torch.dtype:
        return torch.bfloat16 if self.cuda else torch.float32

    def add(self, row: Row) -> None:
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(dataclasses.asdict(row)) + "\n")
        print(f"  {describe(row)}", flush=True)

    def run(self, section: str, name: str, measure: Callable[[], Iterable[Row]]) -> None:
        """Add the rows that ``measure`` yields, or the reason why it yields no more."""
        if time.monotonic() >= self.deadline:
            self.add(Row(section, name, error="skipped: out of time"))
            return
        try:
            for row in measure():
                self.add(row)
        except Exception as error:
            reason = (str(error).strip().splitlines() or [""])[0]
            self.add(Row(section, name, error=f"{type(error).__name__}: {reason:.140}"))
        if self.cuda:
            torch.cuda.empty_cache()

    def ceiling(self, name: str) -> float | None:
        """Value of an earlier run's ceiling, in bytes or operations per second."""
        for row in read(self.path):
            if row.section == CEILINGS and row.name == name and row.value is not None:
                return row.value * _SCALE[row.unit]
        return None


_SCALE = {"GB/s": 1e9, "TFLOP/s": 1e12}


def rate_row(
    bench: Bench,
    section: str,
    name: str,
    amount: float,
    runs: tuple[float, float],
    ceiling: str,
    least: float | None = None,
) -> Row:
    """``amount`` bytes or operations in ``runs`` seconds, as a share of a ceiling.

    ``least``: the share aimed at.
    """
    unit = "TFLOP/s" if ceiling == MATMUL else "GB/s"
    best = min(runs)
    rate = amount / best
    most = bench.ceiling(ceiling)
    share = None if most is None else rate / most
    return Row(
        section,
        name,
        value=rate / _SCALE[unit],
        unit=unit,
        share=share,
        of=ceiling,
        noise=abs(runs[0] - runs[1]) / best,
        **at_least(share, least),
    )


def at_least(found: float | None, least: float | None, unit: str = "") -> dict[str, object]:
    """The fields ``target`` and ``met``; without a unit, of a share."""
    if least is None:
        return {}
    shown = f"{least:g} {unit}" if unit else f"{least:.0%}"
    return {"target": f">= {shown}", "met": None if found is None else found >= least}


def read(path: Path) -> list[Row]:
    """The rows of a file; lines of other kinds (the environment) are passed over."""
    if not path.is_file():
        return []
    values = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    return [Row(**value) for value in values if "section" in value]


def merged(rows: list[Row]) -> list[Row]:
    """One row for those that several processes made of one name: the worst."""
    found: dict[tuple[str, str, str], Row] = {}
    for row in rows:
        key = (row.section, row.name, row.error)
        other = found.get(key)
        if other is None or (row.met is not None and (row.value or 0) > (other.value or 0)):
            found[key] = row
    return sorted(found.values(), key=lambda row: _first_of(rows, row.section))


def _first_of(rows: list[Row], section: str) -> int:
    return next(index for index, row in enumerate(rows) if row.section == section)


def describe(row: Row) -> str:
    if row.error:
        return f"{row.name}: {row.error}"
    share = "" if row.share is None else f", {row.share:.1%} of {row.of}"
    return f"{row.name}: {number(row.value)} {row.unit}{share}"


def number(value: float | None) -> str:
    if value is None:
        return ""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def table(rows: list[Row]) -> str:
    lines = []
    section = ""
    for row in rows:
        if row.section != section:
            section = row.section
            lines += ["", f"{section:<52}{'value':>10} {'unit':<9}{'share':>7} noise target"]
        if row.error:
            lines.append(f"  {row.name:<50}{row.error}")
            continue
        share = "" if row.share is None else f"{row.share:.1%}"
        noise = "" if row.noise is None else f"{row.noise:.1%}"
        verdict = {True: " met", False: " MISSED", None: ""}[row.met]
        line = f"  {row.name:<50}{number(row.value):>10} {row.unit:<9}{share:>7} {noise:>5} "
        lines.append((line + row.target + verdict).rstrip())
    return "\n".join(lines)
