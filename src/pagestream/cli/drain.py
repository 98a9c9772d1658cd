"""Brings a running server to the point where ending it cuts nobody off.

tritonserver's own shutdown freezes ensemble streams, so all requests have to be over before it is
told to end. Owns the order of the steps and the patience; the questions are control.py's. Called
by the supervisor.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

from rich.console import Console

from pagestream.cli.control import (
    POSTPROCESSING,
    PREPROCESSING,
    Control,
    ControlError,
    DeadModelError,
    NotLoadedError,
)
from pagestream.cli.progress import Phase

ANSWER_TIMEOUT_SECS = 10.0
POLL_SECS = 0.1
SETTLE_SECS = (0.1, 0.2)
Answer = TypeVar("Answer")


class Drain:
    """`exit_status` tells whether the server still runs (None); `limit` is in seconds."""

    def __init__(
        self, control: Control, exit_status: Callable[[], int | None], limit: float
    ) -> None:
        self._control = control
        self._exit_status = exit_status
        self._limit = limit
        self._deadline = time.monotonic() + limit

    def run(self, console: Console) -> None:
        """Returns when no request is open, or with a warning when that is not to be had."""
        with Phase(console, "Draining (Ctrl-C again: stop at once)") as phase:
            try:
                self._empty_engine(phase)
                self._empty_postprocessing()
            except NotLoadedError:
                # Whoever unloaded the engine has let its requests end.
                return
            except ControlError as error:
                text = (
                    f"warning: not drained within {self._limit:.0f} s, what is still open is cut "
                    f"off: {error} (--drain-timeout-secs allows more)"
                )
                console.print(text, markup=False, highlight=False, soft_wrap=True)

    def _empty_engine(self, phase: Phase) -> None:
        self._insist(self._control.drain)
        # What is being tokenized reaches the engine yet, and is refused there.
        self._pass_through(PREPROCESSING)
        while (stats := self._insist(self._control.stats)).num_open_requests:
            if time.monotonic() > self._deadline:
                raise ControlError(f"{stats.num_open_requests} requests are open")
            phase.update(f"{stats.num_open_requests} requests open")
            time.sleep(POLL_SECS)

    def _empty_postprocessing(self) -> None:
        """What the engine sent last may still wait for its text, and that for its way out."""
        for pause in SETTLE_SECS:
            for model in POSTPROCESSING:
                self._pass_through(model)
            time.sleep(pause)

    def _pass_through(self, model: str) -> None:
        """Its queue is first-in first-out: an answer means that all before it was handled."""
        self._insist(lambda timeout: self._control.passed_through(model, timeout))

    def _insist(self, ask: Callable[[float], Answer]) -> Answer:
        """A busy server may be slow to answer: only a dead one or the deadline ends the asking."""
        while True:
            try:
                return ask(ANSWER_TIMEOUT_SECS)
            except (DeadModelError, NotLoadedError):
                raise
            except ControlError:
                if self._exit_status() is not None or time.monotonic() > self._deadline:
                    raise
                time.sleep(POLL_SECS)
