"""A whole `pagestream serve` as a child process on free ports, for the demo and for tests.

    with start_server(max_num_seqs=8) as server:
        ... server.grpc_url, server.http_url, server.metrics_url ...

It knows the launcher's command line and its ready file, nothing of what the launcher does.
"""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import TracebackType
from typing import Any

STOP_MARGIN_SECS = 150.0
"""Longer than the launcher's own drain and exit limits together."""


class StartError(RuntimeError):
    """The server did not become ready; the message has what the launcher said."""


class ServerProcess:
    """A running server; a context manager that stops it."""

    def __init__(self, popen: subprocess.Popen[bytes], ready: dict[str, Any], scratch: Path):
        self._popen = popen
        self._scratch = scratch
        self.pid = popen.pid
        self.http_port: int = ready["http_port"]
        self.grpc_port: int = ready["grpc_port"]
        self.metrics_port: int = ready["metrics_port"]
        self.config = Path(ready["config"])
        self.log_file = Path(ready["log_file"])

    @property
    def http_url(self) -> str:
        return f"http://127.0.0.1:{self.http_port}"

    @property
    def grpc_url(self) -> str:
        return f"127.0.0.1:{self.grpc_port}"

    @property
    def metrics_url(self) -> str:
        return f"http://127.0.0.1:{self.metrics_port}/metrics"

    @property
    def ready_file(self) -> Path:
        """Absent while the server is not ready (it is starting again, or stopping)."""
        return self._scratch / "ready.json"

    @property
    def tritonserver_pid(self) -> int:
        pid: int = json.loads(self.ready_file.read_text(encoding="utf-8"))["tritonserver_pid"]
        return pid

    @property
    def messages(self) -> str:
        """What the launcher has said on its standard error."""
        return _messages(self._scratch)

    def send_signal(self, number: int) -> None:
        self._popen.send_signal(number)

    def wait(self, timeout: float = STOP_MARGIN_SECS) -> int:
        """The launcher's exit status; raises subprocess.TimeoutExpired."""
        return self._popen.wait(timeout)

    def stop(self, timeout: float = STOP_MARGIN_SECS) -> int:
        """Ask for an orderly stop and wait for it; returns the launcher's exit status."""
        if self._popen.poll() is None:
            self._popen.send_signal(signal.SIGTERM)
        try:
            return self._popen.wait(timeout)
        finally:
            self._popen.kill()
            self._popen.wait()
            shutil.rmtree(self._scratch, ignore_errors=True)

    def __enter__(self) -> ServerProcess:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.stop()


def start_server(
    model: str | None = None,
    *,
    timeout: float = 300.0,
    environment: dict[str, str] | None = None,
    **flags: object,
) -> ServerProcess:
    """Start `pagestream serve` and wait until it has answered an inference.

    `flags` are the launcher's, by name: max_num_seqs=8 is --max-num-seqs 8. Raises StartError.
    Call it from a thread that lives as long as the server: the launcher ends with that thread.
    """
    scratch = Path(tempfile.mkdtemp(prefix="pagestream-"))
    ready_file = scratch / "ready.json"
    defaults = {"host": "127.0.0.1", "http_port": 0, "grpc_port": 0, "metrics_port": 0}
    chosen = {**defaults, "model": model, "ready_file": ready_file, **flags}
    command = [sys.executable, "-m", "pagestream.cli.main", "serve", "--die-with-parent"]
    for name, value in chosen.items():
        if value is not None:
            command += [f"--{name.replace('_', '-')}", str(value)]
    with (scratch / "stderr").open("wb") as stderr:
        popen = subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=stderr,
            # A Ctrl-C in the terminal is ours to handle: the server stops when we say so.
            start_new_session=True,
        )
    deadline = time.monotonic() + timeout
    while not ready_file.is_file():
        if popen.poll() is not None or time.monotonic() > deadline:
            raise StartError(_give_up(popen, scratch, timeout))
        time.sleep(0.05)
    return ServerProcess(popen, json.loads(ready_file.read_text(encoding="utf-8")), scratch)


def _give_up(popen: subprocess.Popen[bytes], scratch: Path, timeout: float) -> str:
    status = popen.poll()
    if status is None:
        popen.terminate()
        try:
            popen.wait(STOP_MARGIN_SECS)
        except subprocess.TimeoutExpired:
            popen.kill()
            popen.wait()
    what = f"not ready after {timeout:.0f} s" if status is None else f"exit status {status}"
    messages = _messages(scratch)
    shutil.rmtree(scratch, ignore_errors=True)
    return f"`pagestream serve` failed ({what}); it said:\n{messages}"


def _messages(scratch: Path) -> str:
    return (scratch / "stderr").read_text(encoding="utf-8", errors="replace")
