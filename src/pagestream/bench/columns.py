"""The numbers of a point's summary that people are shown: titles, units, digits.

One list for the terminal and the report. Times are milliseconds, memory MiB.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Column:
    """One number of a point's summary, and how it is shown."""

    title: str
    path: str
    digits: int = 0
    scale: float = 1.0
    compared: bool = False
    """Whether a ratio to another run says something."""

    def value(self, point: dict[str, Any]) -> float | None:
        value: Any = point
        for key in self.path.split("."):
            value = value[key]
        return None if value is None else float(value) * self.scale

    def text(self, point: dict[str, Any]) -> str:
        value = self.value(point)
        return "–" if value is None else f"{value:,.{self.digits}f}"


COLUMNS = (
    Column("requests", "num_requests"),
    Column("errors", "num_errors"),
    Column("timeouts", "num_timeouts"),
    Column("requests/s", "requests_per_s", 2, compared=True),
    Column("goodput, requests/s", "goodput_requests_per_s", 2, compared=True),
    Column("output tokens/s", "output_tokens_per_s", 1, compared=True),
    Column("TTFT median", "ttft_ms.median", compared=True),
    Column("TTFT p90", "ttft_ms.p90"),
    Column("TTFT p99", "ttft_ms.p99", compared=True),
    Column("TPOT median", "tpot_ms.median", 1, compared=True),
    Column("TPOT p90", "tpot_ms.p90", 1),
    Column("TPOT p99", "tpot_ms.p99", 1, compared=True),
    Column("ITL median", "itl_ms.median", 1),
    Column("ITL p90", "itl_ms.p90", 1),
    Column("ITL p99", "itl_ms.p99", 1),
    Column("e2e median", "e2e_ms.median", compared=True),
    Column("e2e p90", "e2e_ms.p90"),
    Column("e2e p99", "e2e_ms.p99"),
    Column("tokens per response", "tokens_per_response", 2),
    Column("input tokens, mean", "input_tokens_mean"),
    Column("output tokens, mean", "output_tokens_mean"),
    Column("short answers", "num_short_answers"),
    Column("cached, %", "cached_token_share", 1, 100.0),
    Column("waiting, mean", "queue_depth_mean", 1),
    Column("waiting, most", "queue_depth_max"),
    Column("sent late, p99", "start_lag_ms.p99", 1),
    Column("peak memory, MiB", "peak_memory_bytes", 0, 1 / 2**20),
)
