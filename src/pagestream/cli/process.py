"""One running tritonserver with the processes it starts: spawn, end, clean up.

Owns the process group and the shared memory that this server, and no other, created. It knows
nothing of requests; the supervisor decides when to end it.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
from pathlib import Path

from pagestream.cli import shared_memory
from pagestream.cli.tritonserver import RunDirectory

PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None, use_errno=True)


def die_with_parent() -> None:
    """Ask the kernel to end this process when the thread that started it ends."""
    _libc.prctl(PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)


class TritonserverProcess:
    """Started by the constructor, which has to run in the main thread."""

    def __init__(
        self, command: list[str], environment: dict[str, str], log_file: Path, run: RunDirectory
    ) -> None:
        self._run = run
        self._regions: set[str] = set()
        with log_file.open("ab") as log:
            self._popen = subprocess.Popen(
                command,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                # A Ctrl-C of the terminal must reach the launcher only: it drains first.
                start_new_session=True,
                preexec_fn=die_with_parent,
            )

    @property
    def pid(self) -> int:
        return self._popen.pid

    def exit_status(self) -> int | None:
        return self._popen.poll()

    def track(self) -> None:
        """Note the shared memory in use now; call now and then while the server runs."""
        regions = shared_memory.regions_of(shared_memory.session_processes(self.pid))
        if regions - self._regions:
            self._regions |= regions
            self._run.note_regions(self._regions)

    def stop(self, timeout: float) -> bool:
        """End it in good order, by force after `timeout`; whether the order was good."""
        self.track()
        if self._popen.poll() is None:
            self._popen.send_signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._popen.wait(timeout)
        ended = self._popen.returncode == 0
        self.kill()
        return ended

    def kill(self) -> None:
        """End whatever is left of it and remove what it left behind."""
        self.track()
        for pid in [*shared_memory.session_processes(self.pid)]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self._popen.wait()
        shared_memory.remove(self._regions)
