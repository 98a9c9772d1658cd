"""What moving text costs: the real tritonserver, pre- and postprocessing, around an instant engine.

The engine's loop is replaced by one that has every token at once (instant_engine.py), so that what
is timed is the way from its tokens to text at a client. Exits with 1 when a bound is missed;
`make bench-text` runs it, benchmarks/README.md says how to read it.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import importlib.metadata
import itertools
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from text_path_client import Job

from pagestream.cli.server_process import ServerProcess, start_server
from pagestream.cli.tritonserver import STUB
from pagestream.model_store import DEFAULT_MODEL, resolve_model
from pagestream.serving.answers import Chunk
from pagestream.serving.postprocessing import Postprocessor
from pagestream.serving.preprocessing import Preprocessor
from pagestream.text.token_bytes import read_token_bytes
from pagestream.text.tokenizer import Tokenizer

ROOT = Path(__file__).resolve().parents[1]
NUM_STREAMS = 64
MAX_TOKENS = 512
PER_RESPONSE = 16
THROUGHPUT_BOUND = 20_000
TTFT_BOUND_MS = 3.0
GROWTH_BOUND = 1.2
"""Of the cost per token from token 10 to token 4,000; 1 is constant."""
EARLY, LATE, WINDOW = 10, 4000, 8
NUM_DECODED = 100
STOP_WORD = " the end of the story"
TEXT = (
    "At the end of the quiet road there was a house, and in the house lived a clockmaker. Every "
    "morning he wound the clocks; by the end of the day each of them told another time. “Why?” "
    "asked the girl from the café across the street, 你好 on her coat. “Because,” he said, “the "
    "end of the day is not the end of the work 🕰️.”\n"
)
MODELS = ("preprocessing", "engine", "postprocessing_batched")


@dataclass(frozen=True)
class Load:
    """One run of the load. CPU in microseconds per token, by process."""

    tokens_per_s: float
    responses_per_s: float
    cpu_us: dict[str, float]


@dataclass(frozen=True)
class Serving:
    process: ServerProcess
    repository: Path


@dataclass(frozen=True)
class Case:
    name: str
    model: str
    job: Job


class Client:
    """text_path_client.py as a child process."""

    def __init__(self) -> None:
        self._popen = subprocess.Popen(
            [sys.executable, Path(__file__).with_name("text_path_client.py")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def call(self, kind: str, job: Job) -> Any:
        assert self._popen.stdin
        assert self._popen.stdout
        self._popen.stdin.write(json.dumps({"kind": kind, "job": dataclasses.asdict(job)}) + "\n")
        self._popen.stdin.flush()
        line = self._popen.stdout.readline()
        if not line:
            sys.exit(f"the client failed with exit status {self._popen.wait()}")
        return json.loads(line)

    def close(self) -> None:
        assert self._popen.stdin
        self._popen.stdin.close()
        self._popen.wait(timeout=60)


@contextlib.contextmanager
def serving() -> Iterator[Serving]:
    """A server whose model repository has the instant engine in it."""
    with tempfile.TemporaryDirectory(prefix="pagestream-bench-") as scratch:
        repository = Path(scratch) / "model_repository"
        shutil.copytree(ROOT / "model_repository", repository)
        shutil.copyfile(
            Path(__file__).with_name("instant_engine.py"), repository / "engine" / "1" / "model.py"
        )
        # No waiting for more tokens: the engine itself decides how many a response has.
        with start_server(model_repository=repository, stream_interval_ms=0) as process:
            yield Serving(process, repository)


def processes(server: Serving) -> dict[str, int]:
    """Process ids of tritonserver and of the models' processes that the ensemble runs through."""
    found = {"tritonserver": server.process.tritonserver_pid}
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            command = (entry / "cmdline").read_bytes().decode(errors="replace")
            if STUB in command and str(server.repository) in command:
                found |= {name: int(entry.name) for name in MODELS if f"/{name}/1/" in command}
    missing = [name for name in MODELS if name not in found]
    if missing:
        sys.exit(f"no process found for {', '.join(missing)}")
    return found


def cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def run_load(client: Client, server: Serving, case: Case) -> Load:
    pids = processes(server)
    before = {name: cpu_seconds(pid) for name, pid in pids.items()}
    result = client.call(case.model, case.job)
    used = {name: cpu_seconds(pid) - before[name] for name, pid in pids.items()}
    tokens = result["tokens"]
    return Load(
        tokens / result["seconds"],
        result["responses"] / result["seconds"],
        {
            name: seconds / tokens * 1e6
            for name, seconds in {"client": result["cpu_seconds"], **used}.items()
        },
    )


def typical(loads: list[Load]) -> Load:
    """The median of each number."""
    return Load(
        statistics.median(load.tokens_per_s for load in loads),
        statistics.median(load.responses_per_s for load in loads),
        {name: statistics.median(load.cpu_us[name] for load in loads) for name in loads[0].cpu_us},
    )


def decoding_costs(directory: Path, token_ids: list[int], stream: bool) -> tuple[float, float]:
    """Microseconds per token at token EARLY and at token LATE: one token per chunk, no server."""
    prepared = Preprocessor(directory, max_model_len=8192).prepare(
        {
            "text_input": TEXT,
            "stop_words": [STOP_WORD],
            "stream": stream,
            "max_tokens": LATE + WINDOW,
        },
        {},
    )
    ids = itertools.islice(itertools.cycle(token_ids), LATE + WINDOW)
    postprocessor = Postprocessor(
        read_token_bytes(directory / "tokenizer.json"), 0.4, 16, lambda key, index: None
    )
    chunks = [Chunk("", 0, [token_id]) for token_id in ids]
    times: dict[int, list[float]] = {EARLY: [], LATE: []}
    for number in range(NUM_DECODED):
        key = str(number)
        postprocessor.handle(Chunk(key, 0, [], text_params=prepared.text_params), never)
        feed(postprocessor, key, chunks[: EARLY - WINDOW // 2])
        times[EARLY].append(feed(postprocessor, key, chunks[EARLY - WINDOW // 2 :][:WINDOW]))
        feed(postprocessor, key, chunks[EARLY + WINDOW // 2 : LATE - WINDOW // 2])
        times[LATE].append(feed(postprocessor, key, chunks[LATE - WINDOW // 2 :][:WINDOW]))
        postprocessor.handle(Chunk(key, 0, [], finish_reason="length"), never)
    early, late = (statistics.median(times[at]) / WINDOW * 1e6 for at in (EARLY, LATE))
    return early, late


def feed(postprocessor: Postprocessor, key: str, chunks: list[Chunk]) -> float:
    """Seconds for these chunks, as part of the request with this key."""
    chunks = [dataclasses.replace(chunk, request_key=key) for chunk in chunks]
    start = time.perf_counter()
    for chunk in chunks:
        postprocessor.handle(chunk, never)
    return time.perf_counter() - start


def never() -> bool:
    return False


def cases(job: Job) -> list[Case]:
    single = dataclasses.replace(job, tokens_per_response=1, num_requests=1)
    return [
        Case(f"ensemble, {job.tokens_per_response} tokens per response", "ensemble", job),
        Case("ensemble, 1 token per response", "ensemble", single),
        Case(f"engine alone, {job.tokens_per_response} tokens per response", "engine", job),
        Case("engine alone, 1 token per response", "engine", single),
    ]


def show_loads(loads: dict[str, Load]) -> None:
    table = Table("CPU in us per token", box=None, pad_edge=False)
    for column in ("tokens/s", "responses/s", "client", "tritonserver", "pre", "engine", "post"):
        table.add_column(column, justify="right")
    table.add_column("all", justify="right")
    for name, load in loads.items():
        cpu = [f"{load.cpu_us[part]:.1f}" for part in ("client", "tritonserver", *MODELS)]
        rates = f"{load.tokens_per_s:,.0f}", f"{load.responses_per_s:,.0f}"
        table.add_row(name, *rates, *cpu, f"{sum(load.cpu_us.values()):.1f}")
    Console(width=120).print(table)


def measure_server(prompt_ids: list[int], repeats: int) -> list[str]:
    """Prints the tables; returns the bounds that were missed."""
    with serving() as server, contextlib.closing(Client()) as client:
        job = Job(
            url=server.process.grpc_url,
            text_input=TEXT,
            prompt_token_ids=prompt_ids,
            stop=STOP_WORD,
            max_tokens=MAX_TOKENS,
            tokens_per_response=PER_RESPONSE,
            num_streams=NUM_STREAMS,
            num_requests=4,
        )
        warm_up = dataclasses.replace(job, num_requests=1)
        for model in ("ensemble", "engine"):
            client.call(model, warm_up)
        one = dataclasses.replace(job, num_streams=1, max_tokens=1)
        pairs = client.call("ttft", dataclasses.replace(one, num_requests=200))
        runs: dict[str, list[Load]] = {case.name: [] for case in cases(job)}
        for _ in range(repeats):
            for case in cases(job):
                runs[case.name].append(run_load(client, server, case))
    return report_ttft(pairs) + report_loads({name: typical(of) for name, of in runs.items()})


def report_ttft(pairs: list[tuple[float, float]]) -> list[str]:
    engine, ensemble = (statistics.median(column) for column in zip(*pairs, strict=True))
    added = statistics.median(after - before for before, after in pairs)
    print(
        f"first response when idle, median of {len(pairs)} pairs: {engine:.2f} ms from the engine, "
        f"{ensemble:.2f} ms through the ensemble, {added:.2f} ms more\n"
    )
    if added >= TTFT_BOUND_MS:
        return [f"the ensemble adds {added:.2f} ms, the bound is {TTFT_BOUND_MS} ms"]
    return []


def report_loads(loads: dict[str, Load]) -> list[str]:
    show_loads(loads)
    whole, naive, _, single = loads.values()
    ratio = whole.tokens_per_s / naive.tokens_per_s
    print(
        f"\n{PER_RESPONSE} tokens per response: {ratio:.1f} times the tokens/s of one\n"
        f"one sender: {single.responses_per_s:,.0f} responses/s\n"
    )
    if whole.tokens_per_s < THROUGHPUT_BOUND:
        return [f"{whole.tokens_per_s:,.0f} tokens/s, the bound is {THROUGHPUT_BOUND:,}"]
    return []


def report_decoding(directory: Path, token_ids: list[int]) -> list[str]:
    missed = []
    table = Table("postprocessing, us per token", box=None, pad_edge=False)
    for column in (f"token {EARLY}", f"token {LATE:,}", "ratio"):
        table.add_column(column, justify="right")
    for stream in (True, False):
        name = "streamed" if stream else "not streamed"
        early, late = decoding_costs(directory, token_ids, stream)
        table.add_row(name, f"{early:.2f}", f"{late:.2f}", f"{late / early:.2f}")
        if late / early > GROWTH_BOUND:
            missed.append(f"{name}: token {LATE} costs {late / early:.2f} times token {EARLY}")
    Console(width=100).print(table)
    print()
    return missed


def main() -> None:
    parser = argparse.ArgumentParser(description="What moving text costs, without a model.")
    parser.add_argument("--repeats", type=int, default=3, help="runs of each load (3)")
    repeats = parser.parse_args().repeats
    directory = resolve_model(DEFAULT_MODEL)
    token_ids = Tokenizer(directory).encode(TEXT)
    versions = ", ".join(
        f"{package} {importlib.metadata.version(package)}"
        for package in ("nvidia-pytriton", "tritonclient", "grpcio", "numpy")
    )
    print(
        f"Python {platform.python_version()} on {platform.machine()}, {os.cpu_count()} CPUs, "
        f"{versions}\n{NUM_STREAMS} streams, {MAX_TOKENS} tokens each, one stop string\n"
    )
    missed = report_decoding(directory, token_ids) + measure_server(token_ids, repeats)
    if missed:
        sys.exit("\n".join(missed))
    print("within the bounds")


if __name__ == "__main__":
    main()
