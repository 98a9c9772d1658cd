"""Turns tritonserver's log into what an operator needs after a failed start: cause and advice.

Knows the log's format and the failures that people run into. Called by `pagestream serve`.
"""

from __future__ import annotations

import contextlib
import re
from pathlib import Path

MOST_LINES = 12
MOST_CHARACTERS = 400
_READ_BYTES = 200_000
# A model that raised while loading: the message, then tritonserver's form of a traceback.
_RAISED = re.compile(r'Failed to initialize Python stub: (.+?)(?:\\n|"$)', re.MULTILINE)
_ERROR_LINE = re.compile(r"^[EF]\d{4} |^\w*(Error|Exception)\b|^Traceback|terminate|^Signal \(")
# Printed by every start on a machine without a GPU.
_NOISE = re.compile(r"CUDA driver version|CudaDriverHelper|NVML|DCGM")
_ADVICE = (
    (
        r"No module named 'pagestream",
        "pagestream is not installed in the Python that tritonserver runs: "
        "`make setup`, or `pip install -e .` in the environment of this command",
    ),
    (r"No module named '([\w.]+)'", "install the server's dependencies: `make setup`"),
    (r"address already in use|failed to (?:start|bind)", "a port was taken meanwhile: try again"),
    (r"lock_exception", "the machine was too busy to start tritonserver's processes: try again"),
    (
        r"out of memory|MemoryError|cannot allocate memory",
        "not enough memory: lower --num-blocks or --max-model-len, or choose a smaller --model",
    ),
    (
        r"no space left on device|bus error",
        "/dev/shm is full: remove what does not belong there, or enlarge it (docker: --shm-size)",
    ),
)


def explain(log_file: Path, start: int = 0) -> list[str]:
    """What matters in the log from byte `start` on, then the advice for it if there is any."""
    text = _read(log_file, start)
    if raised := _RAISED.search(text):
        shown = [raised[1]]
    else:
        lines = [line for line in text.splitlines() if line.strip() and not _NOISE.search(line)]
        errors = [line for line in lines if _ERROR_LINE.search(line)]
        # The first errors are the cause, what follows the consequences.
        shown = errors[:MOST_LINES] or lines[-MOST_LINES:]
    shown = [line[:MOST_CHARACTERS] for line in shown]
    for pattern, advice in _ADVICE:
        if re.search(pattern, "\n".join(shown), re.IGNORECASE):
            return [*shown, f"What to do: {advice}"]
    return shown


def _read(log_file: Path, start: int) -> str:
    with contextlib.suppress(OSError), log_file.open("rb") as log:
        log.seek(0, 2)
        log.seek(max(start, log.tell() - _READ_BYTES))
        return log.read().decode("utf-8", errors="replace")
    return ""
