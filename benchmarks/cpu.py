"""pagestream on this CPU: the workload offline and through tritonserver, in float32 and int8.

Offline figures come from peers/pagestream_offline.py; served ones from 16 gRPC streams to the
ensemble, with default coalescing. Offline and served runs take turns, so that the ratio between
them is of one time. `make bench-cpu` runs it; exits with 1 when a bound is missed.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table
from workload import Request, load_workload

from pagestream.cli.server_process import ServerProcess, start_server
from pagestream.model_store import DEFAULT_MODEL, resolve_model
from pagestream_client import PagestreamClient

OFFLINE = Path(__file__).with_name("peers") / "pagestream_offline.py"
SERVED_SHARE = 0.85
GAP_GROWTH = 3.0
"""Bounds: served tokens/s of offline ones; p99 of median of the gaps between responses."""


@dataclass(frozen=True)
class Served:
    tokens_per_s: float
    first_ms: float
    """Median time to the first response."""
    gaps_ms: list[float]
    """Between two responses of one stream."""


def offline(quantization: str) -> dict[str, float]:
    environment = {k: v for k, v in os.environ.items() if k != "OMP_WAIT_POLICY"}
    command = [sys.executable, str(OFFLINE), str(resolve_model(DEFAULT_MODEL)), quantization]
    output = subprocess.check_output(command, env=environment, text=True)
    figures: dict[str, float] = json.loads(output.splitlines()[-1])
    return figures


def stream(client: PagestreamClient, request: Request) -> list[float]:
    """Arrival times of the responses; the request was sent at the first of them."""
    answer = client.stream(
        prompt_token_ids=request.prompt_token_ids,
        max_tokens=request.max_tokens,
        temperature=0.0,
        ignore_eos=True,
        prefix_cache=False,
    )
    with answer:
        chunks = list(answer)
    generated = sum(chunk.num_output_tokens or 0 for chunk in chunks)
    if generated != request.max_tokens:
        sys.exit(f"{generated} tokens came, asked for {request.max_tokens}")
    return [answer.started_at, *(chunk.received_at for chunk in chunks)]


def served(server: ServerProcess, requests: list[Request]) -> Served:
    with PagestreamClient(server.grpc_url) as client, ThreadPoolExecutor(len(requests)) as pool:
        start = time.monotonic()
        times = list(pool.map(lambda request: stream(client, request), requests))
        seconds = time.monotonic() - start
    gaps = [(b - a) * 1000 for one in times for a, b in itertools.pairwise(one[1:])]
    return Served(
        sum(request.max_tokens for request in requests) / seconds,
        statistics.median((one[1] - one[0]) * 1000 for one in times),
        gaps,
    )


def measure(quantization: str, repeats: int) -> tuple[dict[str, float], list[Served], float]:
    """Offline figures, served ones, and the served tokens/s at 32 requests."""
    workload = load_workload()
    with start_server(quantization=quantization, num_blocks=400) as server:
        served(server, workload.concurrent[:2])
        runs = []
        for _ in range(repeats):
            runs.append(served(server, workload.concurrent))
        twice = statistics.median(
            served(server, workload.concurrent * 2).tokens_per_s for _ in range(repeats)
        )
    return offline(quantization), runs, twice


def percentile(values: list[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=3)
    repeats = parser.parse_args().repeats
    print(f"Python {platform.python_version()} on {platform.machine()}, {os.cpu_count()} CPUs\n")
    table = Table("", box=None, pad_edge=False)
    for title in (
        *("prefill tok/s", "one stream", "16 at once", "served, 16", "of offline", "served, 32"),
        *("first ms", "gap ms", "p99 gap"),
    ):
        table.add_column(title, justify="right")
    missed = []
    for quantization in ("none", "int8"):
        name = "float32" if quantization == "none" else quantization
        alone, runs, twice = measure(quantization, repeats)
        rate = statistics.median(run.tokens_per_s for run in runs)
        gaps = [gap for run in runs for gap in run.gaps_ms]
        gap, late = statistics.median(gaps), percentile(gaps, 0.99)
        share = rate / alone["concurrent"]
        table.add_row(
            name,
            f"{alone['prefill']:,.0f}",
            *(f"{alone[key]:.1f}" for key in ("single", "concurrent")),
            *(f"{rate:.1f}", f"{share:.0%}", f"{twice:.1f}"),
            f"{statistics.median(run.first_ms for run in runs):.0f}",
            *(f"{gap:.0f}", f"{late:.0f}"),
        )
        if share < SERVED_SHARE:
            missed.append(f"{name}: served {share:.0%} of offline, bound {SERVED_SHARE:.0%}")
        if late > GAP_GROWTH * gap:
            missed.append(f"{name}: p99 gap {late / gap:.1f} times the median, bound {GAP_GROWTH}")
        if twice < rate:
            missed.append(f"{name}: {twice:.1f} tok/s at 32, {rate:.1f} at 16")
    Console(width=140).print(table)
    if missed:
        sys.exit("\n".join(missed))
    print("within the bounds")


if __name__ == "__main__":
    main()
