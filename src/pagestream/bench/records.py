"""What is kept of a run: one record per request, and the directory that holds all of it.

``run.json`` says what was run and where, ``requests.jsonl`` has a line per request, written as
they end, and ``summary.json`` what was computed from them. Written by the driver's caller and the
importers, read by the summary and the report.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TextIO

RUN, REQUESTS, SUMMARY = "run.json", "requests.jsonl", "summary.json"
Outcome = Literal["ok", "error", "timeout"]


@dataclass
class RequestRecord:
    """One request as the client saw it. Times are seconds after its point's start."""

    point: int
    """Which of the run's points, from 0."""
    index: int
    planned_start_s: float
    """When it was due. Latencies count from here, so that a late sender hides nothing."""
    start_s: float
    """When it was sent."""
    end_s: float = 0.0
    """When the last response came, or the failure."""
    requested_output_tokens: int = 0
    num_input_tokens: int | None = None
    num_output_tokens: int = 0
    num_cached_tokens: int | None = None
    """Of the prompt, found in the prefix cache."""
    responses: list[tuple[float, int]] = field(default_factory=list)
    """When each response came, and how many tokens it had."""
    finish_reason: str = ""
    outcome: Outcome = "ok"
    error: str = ""

    @property
    def first_token_s(self) -> float | None:
        return next((time_s for time_s, count in self.responses if count), None)

    @property
    def last_token_s(self) -> float | None:
        return next((time_s for time_s, count in reversed(self.responses) if count), None)

    @property
    def ttft_s(self) -> float | None:
        """Time to first token, from the planned start."""
        first = self.first_token_s
        return None if first is None else first - self.planned_start_s

    @property
    def tpot_s(self) -> float | None:
        """Time per output token after the first; None when all tokens came in one response."""
        first, last = self.first_token_s, self.last_token_s
        if first is None or last is None or first == last or self.num_output_tokens < 2:
            return None
        return (last - first) / (self.num_output_tokens - 1)

    @property
    def gaps_s(self) -> list[float]:
        """Times between one response with tokens and the next."""
        times = [time_s for time_s, count in self.responses if count]
        return [after - before for before, after in itertools.pairwise(times)]

    @property
    def e2e_s(self) -> float:
        """From the planned start to the last response."""
        return self.end_s - self.planned_start_s

    def to_json(self) -> str:
        values = dataclasses.asdict(self)
        values["first_token_s"] = self.first_token_s
        return json.dumps(values)

    @classmethod
    def from_json(cls, line: str) -> RequestRecord:
        values = json.loads(line)
        del values["first_token_s"]
        values["responses"] = [(time_s, count) for time_s, count in values["responses"]]
        return cls(**values)


@dataclass(frozen=True)
class Samples:
    """What was seen of the server while a point ran."""

    waiting: list[float] = field(default_factory=list)
    """Requests in its queue, at each look."""
    peak_memory_bytes: int | None = None


@dataclass
class Run:
    """A finished run, as the report reads it."""

    directory: Path
    info: dict[str, Any]
    """run.json. ``points`` lists kind, value and label of each."""
    records: list[RequestRecord]
    summary: list[dict[str, Any]]
    """summary.json: PointSummary fields, by point."""

    @property
    def name(self) -> str:
        return str(self.info.get("name") or self.directory.name)

    def of_point(self, point: int) -> list[RequestRecord]:
        return [record for record in self.records if record.point == point]


class RunWriter:
    """Writes a run directory as the run goes; what was measured survives a Ctrl-C.

    Raises ValueError for a directory that already holds a run.
    """

    def __init__(self, directory: Path, info: dict[str, Any]) -> None:
        if (directory / RUN).exists():
            raise ValueError(f"{directory} already holds a run: choose another --output")
        directory.mkdir(parents=True, exist_ok=True)
        self.directory = directory
        self._info = info
        self._write(RUN, {**info, "complete": False})
        self._requests: TextIO = (directory / REQUESTS).open("w", encoding="utf-8")

    def add(self, records: Sequence[RequestRecord]) -> None:
        for record in records:
            self._requests.write(record.to_json() + "\n")
        self._requests.flush()

    def close(self, summary: list[dict[str, Any]], *, complete: bool) -> None:
        self._requests.close()
        self._write(SUMMARY, summary)
        self._write(RUN, {**self._info, "complete": complete})

    def _write(self, name: str, values: Any) -> None:
        text = json.dumps(values, indent=2, ensure_ascii=False) + "\n"
        (self.directory / name).write_text(text, encoding="utf-8")


def read_runs(directories: Sequence[Path]) -> list[Run]:
    """Runs whose names differ: one that is there already gets its place behind it."""
    runs = [read_run(directory) for directory in directories]
    for place, run in enumerate(runs):
        if run.name in {other.name for other in runs[:place]}:
            run.info["name"] = f"{run.name} ({place + 1})"
    return runs


def read_run(directory: Path) -> Run:
    """Raises ValueError for a directory that holds no finished run."""
    try:
        info = json.loads((directory / RUN).read_text(encoding="utf-8"))
        lines = (directory / REQUESTS).read_text(encoding="utf-8").splitlines()
        summary = json.loads((directory / SUMMARY).read_text(encoding="utf-8"))
        return Run(directory, info, [RequestRecord.from_json(line) for line in lines], summary)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{directory} holds no run of `pagestream bench`: {error}") from None
