"""What every peer's script measures and prints, so that peers.py can compare them.

A peer is a function that answers requests, all at once, greedily, to exactly the length asked for
(an end-of-sequence token stops nothing). Runs inside the peer's own Python, so it imports the
standard library alone.
"""

from __future__ import annotations

import json
import resource
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from workload import Request, load_workload

RUNS = 3

Answer = Callable[[list[Request]], int]
"""Answers the requests and returns the number of tokens generated."""


def measure(name: str, version: str, answer: Answer) -> None:
    """Print one line of JSON: tokens per second, medians of RUNS."""
    workload = load_workload()
    short = Request(workload.single.prompt_token_ids, 2)
    answer([short])
    figures: dict[str, list[float]] = {"prefill": [], "single": [], "concurrent": []}
    for _ in range(RUNS):
        seconds, _ = _timed(answer, [workload.prefill])
        figures["prefill"].append(len(workload.prefill.prompt_token_ids) / seconds)
        # Without the time to the second token, which is mostly the prompt's.
        first, few = _timed(answer, [short])
        whole, many = _timed(answer, [workload.single])
        figures["single"].append((many - few) / (whole - first))
        seconds, generated = _timed(answer, workload.concurrent)
        expected = sum(request.max_tokens for request in workload.concurrent)
        if generated != expected:
            sys.exit(f"{name} generated {generated} tokens, asked for {expected}")
        figures["concurrent"].append(generated / seconds)
    print(
        json.dumps(
            {
                "name": name,
                "version": version,
                **{key: statistics.median(values) for key, values in figures.items()},
                "runs": figures,
                "peak_rss_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
            }
        ),
        flush=True,
    )


def _timed(answer: Answer, requests: list[Request]) -> tuple[float, int]:
    start = time.perf_counter()
    generated = answer(requests)
    return time.perf_counter() - start, generated
