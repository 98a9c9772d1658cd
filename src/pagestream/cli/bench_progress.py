"""PointProgress: how far one point of a load test is, as a bar on a terminal and as lines else.

Used by `pagestream bench run`.
"""

from __future__ import annotations

import time
from types import TracebackType

import rich.progress
from rich.console import Console

from pagestream.bench.records import RequestRecord
from pagestream.cli.progress import LINE_INTERVAL_SECS


class PointProgress:
    """A context manager; ``note`` every request that ended."""

    def __init__(self, console: Console, label: str, total: int) -> None:
        self._console = console
        self._label = label
        self._total = total
        self._done = self._failed = self._tokens = 0
        self._started = self._last_line = time.monotonic()
        self._bar = rich.progress.Progress(
            rich.progress.TextColumn("{task.description}"),
            rich.progress.BarColumn(),
            rich.progress.MofNCompleteColumn(),
            rich.progress.TimeElapsedColumn(),
            rich.progress.TextColumn("{task.fields[detail]}"),
            console=console,
            transient=True,
            disable=not console.is_terminal,
        )

    def __enter__(self) -> PointProgress:
        self._task = self._bar.add_task(self._label, total=self._total, detail="")
        self._bar.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._bar.stop()
        self._print(f"{self._label}: {self._done} of {self._total} requests, {self._detail()}")

    def note(self, record: RequestRecord) -> None:
        self._done += 1
        self._failed += record.outcome != "ok"
        self._tokens += record.num_output_tokens
        self._bar.update(self._task, advance=1, detail=self._detail())
        if not self._console.is_terminal:
            now = time.monotonic()
            if now - self._last_line >= LINE_INTERVAL_SECS:
                self._last_line = now
                self._print(f"{self._label}: {self._done} of {self._total} ...")

    def _detail(self) -> str:
        elapsed = time.monotonic() - self._started
        failed = f", {self._failed} failed" if self._failed else ""
        return f"{self._tokens / max(elapsed, 1e-9):.0f} tok/s, {elapsed:.0f} s{failed}"

    def _print(self, text: str) -> None:
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)
