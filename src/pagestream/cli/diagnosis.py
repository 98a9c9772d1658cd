"""Turns tritonserver's log into what an operator needs after a failed start: lines and advice.

Knows the log's format and the failures that people run into. Called by `pagestream serve`.
"""

from __future__ import annotations

import contextlib
import re
from pathlib import Path

MOST_LINES = 20
_READ_BYTES = 200_000
_ERROR_LINE = re.compile(
    r"^[EF]\d{4} |error|exception|traceback|terminate|signal \(", re.IGNORECASE
)
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


def explain(log_file: Path) -> list[str]:
    """The lines of the log that matter, then the advice for them if there is any."""
    text = _tail(log_file)
    lines = [line for line in text.splitlines() if line.strip() and line[0] not in "|+"]
    marks = [number for number, line in enumerate(lines) if _ERROR_LINE.search(line)]
    # The first error is the cause, what follows the consequences.
    first = max(marks[0] - 1, 0) if marks else max(len(lines) - MOST_LINES, 0)
    shown = lines[first : first + MOST_LINES]
    for pattern, advice in _ADVICE:
        if re.search(pattern, text, re.IGNORECASE):
            return [*shown, f"What to do: {advice}"]
    return shown


def _tail(log_file: Path) -> str:
    with contextlib.suppress(OSError), log_file.open("rb") as log:
        log.seek(0, 2)
        log.seek(max(0, log.tell() - _READ_BYTES))
        return log.read().decode("utf-8", errors="replace")
    return ""
