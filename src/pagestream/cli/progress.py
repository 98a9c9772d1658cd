"""Shows that something long is going on: a spinner with the elapsed time on a terminal, lines else.

Used by every command that takes more than two seconds.
"""

from __future__ import annotations

import time
from types import TracebackType

import rich.progress
from rich.console import Console

LINE_INTERVAL_SECS = 10.0


class Phase:
    """One step of a command, as a context manager; says how long it took when it is done."""

    def __init__(self, console: Console, text: str) -> None:
        self._console = console
        self._text = text
        self._started = self._last_line = time.monotonic()
        self._bar: rich.progress.Progress | None = None

    def __enter__(self) -> Phase:
        if self._console.is_terminal:
            self._bar = rich.progress.Progress(
                rich.progress.SpinnerColumn(),
                rich.progress.TextColumn("{task.description}", markup=False),
                rich.progress.TimeElapsedColumn(),
                console=self._console,
                transient=True,
            )
            self._bar.add_task(self._text, total=None)
            self._bar.start()
        else:
            self._print(f"{self._text} ...")
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._bar:
            self._bar.stop()
        if kind is None:
            self._print(f"{self._text}: {self.elapsed:.1f} s")

    @property
    def elapsed(self) -> float:
        return time.monotonic() - self._started

    def update(self, detail: str = "") -> None:
        """Call often; `detail` is what is going on now."""
        text = f"{self._text}: {detail}" if detail else self._text
        if self._bar:
            self._bar.update(rich.progress.TaskID(0), description=text)
        elif time.monotonic() - self._last_line >= LINE_INTERVAL_SECS:
            self._last_line = time.monotonic()
            self._print(f"{text} ({self.elapsed:.0f} s)")

    def _print(self, text: str) -> None:
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)
