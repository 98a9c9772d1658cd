"""EngineProcess: an EngineLoop in a process of its own, behind the same three calls.

The loop then shares its interpreter with nobody: neither decoding of requests nor the sending of
responses holds it up, at the cost of pickling one report per step. The child ends when its end of
the pipe closes, whichever way the parent went; if the child dies, the parent hears of a failure.
Used by EngineBridge where ``engine_process`` is set; the module is also the child's main program.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from pagestream.config import EngineConfig
from pagestream.engine.engine_loop import Command, EngineLoop, Shutdown, StepReport
from pagestream.engine.metrics import EngineStats
from pagestream.sampling_params import Limits

logger = logging.getLogger(__name__)


class EngineProcess:
    """``report`` is called from a thread of this object; it must not block."""

    def __init__(self, config: EngineConfig, report: Callable[[StepReport], None]) -> None:
        self._config = config
        self._report = report
        self._reader = threading.Thread(target=self._read, name="engine-reports", daemon=True)
        self._ending = False

    def start(self) -> Limits:
        """Returns when requests can run; RuntimeError with the reason if they never will."""
        self._connection, theirs = multiprocessing.Pipe()
        command = [_python(), "-P", "-m", __spec__.name, str(theirs.fileno())]
        self._process = subprocess.Popen(command, pass_fds=[theirs.fileno()])
        theirs.close()
        self._connection.send(self._config)
        try:
            answer: Limits | str = self._connection.recv()
        except EOFError:
            answer = f"the engine process ended with status {self._process.wait()}"
        if isinstance(answer, str):
            self._connection.close()
            self._process.wait()
            raise RuntimeError(answer)
        self._reader.start()
        return answer

    def submit(self, command: Command) -> None:
        self._ending = self._ending or isinstance(command, Shutdown)
        try:
            self._connection.send(command)
        except OSError:
            logger.error("the engine process is gone; %s lost", type(command).__name__)

    def join(self, timeout: float | None = None) -> None:
        self._reader.join(timeout)
        self._connection.close()
        self._process.wait(timeout)

    def _read(self) -> None:
        stats = EngineStats()
        while True:
            try:
                report: StepReport = self._connection.recv()
            except (EOFError, OSError):
                break
            stats = report.stats
            self._report(report)
        if not self._ending:
            self._report(StepReport([], stats, failure="the engine process ended"))


def _python() -> str:
    """The environment's interpreter: an embedding program is not one that runs modules."""
    return str(Path(sys.prefix) / "bin" / "python3")


def _serve(connection: Connection[Any, Any]) -> None:
    """Run a loop for whoever is at the other end, until it shuts down or goes away."""
    told = threading.Event()

    def report(step_report: StepReport) -> None:
        told.wait()  # a connection takes one sender at a time, and the limits come first
        connection.send(step_report)

    loop = EngineLoop(connection.recv(), report)
    try:
        limits = loop.start()
    except BaseException as error:
        logger.exception("the engine did not start")
        connection.send(f"{type(error).__name__}: {error}")
        return
    connection.send(limits)
    told.set()
    command: Command | None = None
    while not isinstance(command, Shutdown):
        command = connection.recv()
        loop.submit(command)
    loop.join()


def main() -> None:
    logging.basicConfig(
        stream=sys.stderr,
        level=os.environ.get("PAGESTREAM_LOG_LEVEL", "INFO"),
        format="%(asctime)s engine %(levelname)s %(message)s",
    )
    try:
        _serve(Connection(int(sys.argv[1])))
    except (EOFError, BrokenPipeError, ConnectionResetError):
        # Nobody is left to work for; a step may be running in the loop's thread.
        os._exit(0)


if __name__ == "__main__":
    main()
