"""perf_analyzer against the real server: every request answered with input data, none hung with
random data.

Streams at several concurrencies to `ensemble` and `vllm`; then perf_analyzer's random data, which
fills the optional inputs too, so that nearly all of it is refused. `make perf-analyzer` runs it,
benchmarks/README.md says how to read it. Exits with 1 when a request failed or hung.
"""

from __future__ import annotations

import argparse
import itertools
import json
import re
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from perf_analyzer_binary import FetchError, PerfAnalyzer, fetch
from rich.console import Console
from rich.table import Table

from pagestream.cli.server_process import ServerProcess, start_server
from pagestream.model_store import DEFAULT_MODEL
from pagestream_client import PagestreamClient, ServerError
from pagestream_client.metrics import read_metrics

MODELS = ("ensemble", "vllm")
CONCURRENCIES = (1, 16, 64)
MAX_TOKENS = 8
PROMPTS = ("Once upon a time", "The capital of France is", "def main():", "你好，世界", "1, 2, 3,")
RANDOM_CONCURRENCIES = (1, 16)
RANDOM_LIMIT_S = 60.0
GOOD_LIMIT_S = 10.0
# name: (items of a list, further flags)
RANDOM_DATA: dict[str, tuple[int, list[str]]] = {
    "random, lists of 1": (1, []),
    "random, lists of 3": (3, []),
    "random, strings of 1": (1, ["--string-length", "1"]),
    "random, strings {}": (1, ["--string-data", "{}"]),
    "zeros, empty strings": (1, ["--input-data", "zero"]),
}


@dataclass
class Run:
    """What perf_analyzer saw of one load. Times in seconds."""

    model: str
    data: str
    concurrency: int
    num_requests: int
    problems: list[str] = field(default_factory=list)
    num_answers: int = 0
    num_tokens: int = 0
    num_errors: int = 0
    seconds: float = 0.0
    first_responses: list[float] = field(default_factory=list)
    latencies: list[float] = field(default_factory=list)


class Bench:
    """One server and what is sent to it."""

    def __init__(self, tool: PerfAnalyzer, server: ServerProcess, scratch: Path) -> None:
        self._tool = tool
        self._server = server
        self._scratch = scratch

    def run_data(self, model: str, concurrency: int, num_requests: int, limit_s: float) -> Run:
        """Every request has an answer with all its tokens, or the run has problems."""
        run = Run(model, "input data", concurrency, num_requests)
        data = self._scratch / "data.json"
        data.write_text(json.dumps({"data": [_inputs(model, prompt) for prompt in PROMPTS]}))
        export = self._scratch / "export.json"
        export.unlink(missing_ok=True)
        flags = ["--input-data", str(data), "--profile-export-file", str(export)]
        done = self._perf_analyzer(run, limit_s, flags)
        if done is not None and done.returncode != 0:
            run.problems.append(f"exit status {done.returncode}: {done.stderr.strip():.300}")
        if export.is_file():
            _read_export(run, json.loads(export.read_text()))
        return run

    def run_random(self, model: str, data: str, concurrency: int) -> Run:
        """It has got answers, or an error from the model. It ends at the first error it sees, and
        so may tell of fewer than it had requests open."""
        run = Run(model, data, concurrency, concurrency)
        size, flags = RANDOM_DATA[data]
        started = time.monotonic()
        done = self._perf_analyzer(run, RANDOM_LIMIT_S, [*self._shapes(model, size), *flags])
        run.seconds = time.monotonic() - started
        if done is not None and done.returncode == 0:
            run.num_answers = run.num_requests
        elif done is not None:
            errors = re.findall(r"^Thread \[\d+\] had error: (.*)$", done.stderr, re.MULTILINE)
            run.num_errors = sum(f"in ensemble '{model}'" in error for error in errors)
            if run.num_errors == 0 or run.num_errors < len(errors):
                run.problems.append(f"exit status {done.returncode}: {done.stderr.strip():.300}")
        return run

    def check_good(self, run: Run) -> None:
        """The next request, with all that it should have, and an idle server after it."""
        try:
            with PagestreamClient(self._server.grpc_url, timeout_s=GOOD_LIMIT_S) as client:
                answer = client.generate(text_input=PROMPTS[0], max_tokens=4, ignore_eos=True)
            if answer.num_output_tokens != 4:
                run.problems.append(f"the next request got {answer.num_output_tokens} tokens of 4")
        except ServerError as error:
            run.problems.append(f"the next request failed: {error}")
        deadline = time.monotonic() + GOOD_LIMIT_S
        while not self._is_idle():
            if time.monotonic() > deadline:
                run.problems.append(f"the server was not idle {GOOD_LIMIT_S:.0f} s later")
                return
            time.sleep(0.1)

    def _perf_analyzer(
        self, run: Run, limit_s: float, flags: list[str]
    ) -> subprocess.CompletedProcess[str] | None:
        """None if it hung, which is noted."""
        common = ["-m", run.model, "-u", self._server.grpc_url, "-i", "grpc", "--streaming"]
        common += ["--async", "--concurrency-range", str(run.concurrency)]
        common += ["--request-count", str(run.num_requests)]
        try:
            return self._tool.run(*common, *flags, timeout_s=limit_s)
        except subprocess.TimeoutExpired:
            run.problems.append(f"hung: not done after {limit_s:.0f} s")
            return None

    def _shapes(self, model: str, size: int) -> list[str]:
        """It wants to be told the length of every list."""
        url = f"{self._server.http_url}/v2/models/{model}"
        with urllib.request.urlopen(url, timeout=GOOD_LIMIT_S) as response:
            inputs = json.load(response)["inputs"]
        flags = []
        for spec in inputs:
            dims = spec["shape"][1:] if model == "ensemble" else spec["shape"]
            if -1 in dims:
                shape = ",".join(str(size if dim < 0 else dim) for dim in dims)
                flags += ["--shape", f"{spec['name']}:{shape}"]
        return flags

    def _is_idle(self) -> bool:
        values = read_metrics(self._server.metrics_url)
        open_requests = (
            values["pagestream_requests_running"] + values["pagestream_requests_waiting"]
        )
        free, total = values["pagestream_kv_blocks_free"], values["pagestream_kv_blocks_total"]
        return open_requests == 0 and free == total


def _inputs(model: str, prompt: str) -> dict[str, Any]:
    """As genai-perf writes them, to whom numbers for vllm are strings."""
    common = {"text_input": [prompt], "stream": [True], "exclude_input_in_output": [True]}
    if model == "ensemble":
        options = {"max_tokens": [MAX_TOKENS], "temperature": [0.0], "ignore_eos": [True]}
        return {**common, **options}
    parameters = {"max_tokens": str(MAX_TOKENS), "temperature": "0", "ignore_eos": "true"}
    return {
        **common,
        "sampling_parameters": [json.dumps(parameters)],
        "return_num_output_tokens": [True],
    }


def _read_export(run: Run, export: dict[str, Any]) -> None:
    """Counts and times of the requests that perf_analyzer completed."""
    requests = [each for experiment in export["experiments"] for each in experiment["requests"]]
    for request in requests:
        tokens = sum(output["num_output_tokens"] for output in request["response_outputs"])
        run.num_tokens += tokens
        run.num_answers += tokens == MAX_TOKENS
        if times := request["response_timestamps"]:
            run.first_responses.append((times[0] - request["timestamp"]) / 1e9)
            run.latencies.append((times[-1] - request["timestamp"]) / 1e9)
    if run.num_answers < run.num_requests:
        run.problems.append(f"{run.num_answers} whole answers to {run.num_requests} requests")
    if run.latencies:
        started = min(request["timestamp"] for request in requests)
        ended = max(time for request in requests for time in request["response_timestamps"][-1:])
        run.seconds = (ended - started) / 1e9


def show_data_runs(runs: list[Run]) -> None:
    table = Table(f"streaming, {MAX_TOKENS} tokens", box=None, pad_edge=False)
    columns = ("requests", "failed", "requests/s", "tokens/s", "first p50", "first p99")
    for column in ("concurrency", *columns, "last p50", "last p99"):
        table.add_column(column, justify="right")
    for run in runs:
        counts = [run.concurrency, run.num_requests, max(0, run.num_requests - run.num_answers)]
        rates = [run.num_answers / run.seconds, run.num_tokens / run.seconds] if run.seconds else []
        times = [at for of in (run.first_responses, run.latencies) for at in _percentiles(of)]
        cells = [*map(str, counts), *(f"{rate:.1f}" for rate in rates)]
        table.add_row(run.model, *cells, *(f"{second * 1000:,.0f} ms" for second in times))
    Console(width=120).print(table)
    print()


def show_random_runs(runs: list[Run]) -> None:
    table = Table("random data", "", box=None, pad_edge=False)
    for column in ("concurrency", "answers", "errors told", "over after", "next request"):
        table.add_column(column, justify="right")
    for run in runs:
        counts = map(str, (run.concurrency, run.num_answers, run.num_errors))
        next_request = "failed" if run.problems else "worked"
        table.add_row(run.model, run.data, *counts, f"{run.seconds:.1f} s", next_request)
    Console(width=120).print(table)
    print()


def _percentiles(seconds: list[float]) -> list[float]:
    if len(seconds) < 2:
        return seconds * 2
    cuts = statistics.quantiles(seconds, n=100, method="inclusive")
    return [cuts[49], cuts[98]]


def main() -> None:
    parser = argparse.ArgumentParser(description="perf_analyzer against `ensemble` and `vllm`.")
    parser.add_argument("--model", default=DEFAULT_MODEL, help=f"what to serve ({DEFAULT_MODEL})")
    parser.add_argument("--requests", type=int, default=4, help="per unit of concurrency (4)")
    parser.add_argument("--limit", type=float, default=300.0, help="seconds for one run (300)")
    options = parser.parse_args()
    try:
        tool = fetch()
    except FetchError as error:
        sys.exit(f"error: {error}")
    data_runs, random_runs = [], []
    with (
        tempfile.TemporaryDirectory() as scratch,
        start_server(options.model, max_num_seqs=max(CONCURRENCIES)) as server,
    ):
        bench = Bench(tool, server, Path(scratch))
        for model, concurrency in itertools.product(MODELS, CONCURRENCIES):
            num_requests = max(8, options.requests * concurrency)
            run = bench.run_data(model, concurrency, num_requests, options.limit)
            bench.check_good(run)
            data_runs.append(run)
        show_data_runs(data_runs)
        for each in itertools.product(MODELS, RANDOM_DATA, RANDOM_CONCURRENCIES):
            run = bench.run_random(*each)
            bench.check_good(run)
            random_runs.append(run)
        show_random_runs(random_runs)
    problems = [
        f"{run.model}, {run.data}, concurrency {run.concurrency}: {problem}"
        for run in data_runs + random_runs
        for problem in run.problems
    ]
    if problems:
        sys.exit("\n".join(problems))
    print("no request failed or hung")


if __name__ == "__main__":
    main()
