"""Runs one tritonserver from start to end: wait until it answers, watch it, drain it, stop it.

Owns the launcher's life cycle and its signals. What to start comes from tritonserver.py, the
process from process.py, the questions it asks from control.py. Called by `pagestream serve`.
"""

from __future__ import annotations

import contextlib
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import FrameType

from rich.console import Console

from pagestream.cli.control import (
    TEXT_MODELS,
    Control,
    ControlError,
    DeadModelError,
    NotLoadedError,
)
from pagestream.cli.drain import Drain
from pagestream.cli.process import TritonserverProcess
from pagestream.cli.progress import Phase

WATCH_INTERVAL_SECS = 3.0
PROBE_TIMEOUT_SECS = 10.0
FAILURES_BEFORE_RESTART = 3
STUCK_STEP_SECS = 300.0
MAX_RESTARTS, RESTART_WINDOW_SECS = 3, 600.0


class StopRequested(BaseException):
    """A signal came in while it should act at once. Not an Exception: nothing may swallow it."""


class ServerDownError(Exception):
    """tritonserver does not start, or is beyond help; the message says why."""


class StopSignals:
    """SIGINT, SIGTERM, SIGHUP: the first asks for an orderly stop, the second for one at once."""

    def __init__(self) -> None:
        self.count = 0
        self.last = signal.SIGTERM
        self._event = threading.Event()
        self._raise_at: int | None = None

    def install(self) -> None:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, self._handle)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self.count += 1
        self.last = signal.Signals(number)
        self._event.set()
        if self._raise_at is not None and self.count >= self._raise_at:
            self._raise_at = None
            raise StopRequested

    @contextlib.contextmanager
    def raising_at(self, count: int) -> Iterator[None]:
        """Inside, the signal number `count` raises StopRequested, wherever the code is."""
        if self.count >= count:
            raise StopRequested
        self._raise_at = count
        try:
            yield
        finally:
            self._raise_at = None

    def wait(self, seconds: float) -> bool:
        return self._event.wait(seconds)


class RestartBudget:
    """At most `limit` restarts within `window` seconds."""

    def __init__(self, limit: int, window: float, now: Callable[[], float] = time.monotonic):
        self._limit, self._window, self._now = limit, window, now
        self._spent: deque[float] = deque()

    def spend(self) -> bool:
        """Whether one more restart is allowed; it counts if so."""
        now = self._now()
        while self._spent and now - self._spent[0] > self._window:
            self._spent.popleft()
        if len(self._spent) >= self._limit:
            return False
        self._spent.append(now)
        return True


@dataclass(frozen=True)
class Timeouts:
    """All in seconds."""

    start: float
    drain: float
    exit: float


class Supervisor:
    """`spawn` starts a tritonserver; `on_ready` and `on_down` are told of its state."""

    def __init__(
        self,
        spawn: Callable[[], TritonserverProcess],
        control: Control,
        console: Console,
        timeouts: Timeouts,
        on_ready: Callable[[int], None],
        on_down: Callable[[], None],
    ) -> None:
        self._spawn = spawn
        self._control = control
        self._console = console
        self._timeouts = timeouts
        self._on_ready = on_ready
        self._on_down = on_down
        self._signals = StopSignals()
        self._restarts = RestartBudget(MAX_RESTARTS, RESTART_WINDOW_SECS)
        self._process: TritonserverProcess | None = None

    def run(self) -> int:
        """The exit status: 0 after an orderly stop. Raises ServerDownError."""
        self._signals.install()
        try:
            self._start()
            self._watch()
            self._stop()
            return 0
        except StopRequested:
            self._say("Stopping at once")
            # As a shell reports a program that the signal ended.
            return 128 + self._signals.last
        finally:
            self._on_down()
            if self._process:
                self._process.kill()

    def _say(self, text: str) -> None:
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)

    def _start(self) -> None:
        self._process = process = self._spawn()
        with self._signals.raising_at(1):
            with Phase(self._console, "Starting tritonserver and loading the model") as phase:
                while not self._control.is_loaded(timeout=2.0):
                    self._check_start(process, phase)
            with Phase(self._console, "Waiting for the first answer") as phase:
                self._first_answer(process, phase)
            process.track()
        self._on_ready(process.pid)

    def _check_start(self, process: TritonserverProcess, phase: Phase) -> None:
        status = process.exit_status()
        if status is not None:
            raise ServerDownError(f"tritonserver ended while starting ({_status_text(status)})")
        if phase.elapsed > self._timeouts.start:
            raise ServerDownError(
                f"the model was not loaded within {self._timeouts.start:.0f} s: "
                "allow more with --start-timeout-secs"
            )
        process.track()
        phase.update()
        time.sleep(0.2)

    def _first_answer(self, process: TritonserverProcess, phase: Phase) -> None:
        """In a thread of its own, as the wait must notice a server that dies meanwhile."""
        outcome: list[ControlError | None] = []

        def ask() -> None:
            try:
                self._control.infer(self._timeouts.start)
                outcome.append(None)
            except ControlError as error:
                outcome.append(error)

        threading.Thread(target=ask, daemon=True).start()
        while not outcome:
            self._check_start(process, phase)
        if outcome[0] is not None:
            raise ServerDownError(f"the first inference failed: {outcome[0]}")

    def _watch(self) -> None:
        """Returns when a stop is asked for."""
        failures = 0
        while not self._pause(WATCH_INTERVAL_SECS):
            try:
                self._probe()
                failures = 0
                continue
            except (ServerDownError, DeadModelError) as error:
                reason = str(error)
            except ControlError as error:
                failures += 1
                self._say(f"warning: health probe {failures} failed: {error}")
                if failures < FAILURES_BEFORE_RESTART:
                    continue
                reason = f"{failures} health probes in a row failed, the last one with: {error}"
            if self._signals.count:
                return
            self._restart(reason)
            failures = 0

    def _pause(self, seconds: float) -> bool:
        """Wait, but not longer than until a signal comes or the server ends; whether to stop."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline and self._running().exit_status() is None:
            if self._signals.wait(0.2):
                return True
        return self._signals.count > 0

    def _probe(self) -> None:
        process = self._running()
        status = process.exit_status()
        if status is not None:
            raise ServerDownError(f"tritonserver ended unexpectedly ({_status_text(status)})")
        process.track()
        try:
            stats = self._control.stats(PROBE_TIMEOUT_SECS)
        except NotLoadedError:
            return
        if stats.num_running and stats.last_step_age_s > STUCK_STEP_SECS:
            raise ServerDownError(
                f"the engine has made no step for {stats.last_step_age_s:.0f} s "
                f"with {stats.num_running} requests running"
            )
        for model in TEXT_MODELS:
            self._control.passed_through(model, PROBE_TIMEOUT_SECS)

    def _restart(self, reason: str) -> None:
        while True:
            self._say(f"error: {reason}")
            self._on_down()
            self._running().kill()
            if not self._restarts.spend():
                raise ServerDownError(
                    f"gave up after {MAX_RESTARTS} restarts within "
                    f"{RESTART_WINDOW_SECS / 60:.0f} minutes; the last reason: {reason}"
                )
            self._say("Restarting tritonserver")
            try:
                return self._start()
            except ServerDownError as error:
                reason = str(error)

    def _stop(self) -> None:
        self._on_down()
        process = self._running()
        with self._signals.raising_at(2):
            if process.exit_status() is None and self._timeouts.drain > 0:
                Drain(self._control, process.exit_status, self._timeouts.drain).run(self._console)
            with Phase(self._console, "Stopping tritonserver"):
                # It waits for its own exit timeout first, and needs a moment to say so.
                ended = process.stop(self._timeouts.exit + 5.0)
        if not ended:
            self._say("warning: tritonserver did not stop in good order and was killed")

    def _running(self) -> TritonserverProcess:
        assert self._process is not None
        return self._process


def _status_text(status: int) -> str:
    if status < 0:
        return f"signal {signal.Signals(-status).name}"
    return f"exit status {status}"
