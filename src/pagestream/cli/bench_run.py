"""`pagestream bench run`: one load test, from its flags to a run directory.

Owns the order of things: check, find or start the target, warm up, run each point, sum up. What is
sent is bench.workload's, how it is sent bench.driver's.
"""

from __future__ import annotations

import dataclasses
import json
import shlex
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from pagestream.bench.summary import PointSummary, Slo, summarize
from pagestream.bench.workload import Lengths, Point, Workload, plain_token_ids
from pagestream.cli.engine_flags import with_engine_flags
from pagestream.cli.progress import Phase
from pagestream.model_store import DEFAULT_MODEL, resolve_model

if TYPE_CHECKING:
    from pagestream.bench.driver import Target
    from pagestream.bench.records import RunWriter

DEFAULT_SWEEP = "1,2,4,8,16"
LEAST_REQUESTS = 16
REQUESTS_PER_USER = 4
DEFAULT_GRPC_PORT = 8001
_URL = "host:port of a running server's gRPC; default: start one with the engine flags below."
_METRICS = "Its metrics page. (default: port 8002 of a server on port 8001)"
_TRACE = "JSON Lines: arrival_s, max_tokens, and prompt_token_ids or num_input_tokens."
_NUM = f"Of each point. (default: {REQUESTS_PER_USER} per user, at least {LEAST_REQUESTS})"
_LENGTH = "128, 64-256 (uniform) or 128±32 (normal)."
_OUTPUT = "New directory for the run. (default: bench-runs/TIME)"


@dataclass(frozen=True)
class BenchFlags:
    """The command's own flags, checked."""

    url: str | None
    metrics_url: str | None
    offline: bool
    sweep: tuple[str, tuple[float, ...]]
    """Kind of load and its values; for a trace, none."""
    trace: Path | None
    input_tokens: Lengths
    output_tokens: Lengths
    num_requests: int | None
    warm_up: int
    seed: int
    shared_prefix: int
    stream: bool
    ignore_eos: bool
    timeout_s: float
    slo: Slo
    output: Path
    name: str | None


def register(app: typer.Typer) -> None:
    app.command("run")(with_engine_flags(run))


def run(
    engine_flags: dict[str, Any],
    url: Annotated[str | None, typer.Option(help=_URL)] = None,
    metrics_url: Annotated[str | None, typer.Option(help=_METRICS)] = None,
    offline: Annotated[bool, typer.Option(help="The engine in this process, no server.")] = False,
    concurrency: Annotated[str | None, typer.Option(help="Users, as 1,2,4: closed loop.")] = None,
    request_rate: Annotated[str | None, typer.Option(help="Requests/s, as 0.5,1: Poisson.")] = None,
    trace: Annotated[Path | None, typer.Option(help=_TRACE)] = None,
    input_tokens: Annotated[str, typer.Option(help=_LENGTH)] = "128",
    output_tokens: Annotated[str, typer.Option(help=_LENGTH)] = "64",
    num_requests: Annotated[int | None, typer.Option(min=1, help=_NUM)] = None,
    warm_up: Annotated[int, typer.Option(min=0, help="Requests before, not counted.")] = 4,
    seed: Annotated[int, typer.Option(help="Of prompts, lengths and arrivals.")] = 0,
    shared_prefix: Annotated[int, typer.Option(min=0, help="Tokens all prompts share.")] = 0,
    stream: Annotated[bool, typer.Option(help="Responses as tokens come, or one.")] = True,
    ignore_eos: Annotated[bool, typer.Option(help="Answers as long as planned.")] = True,
    timeout_s: Annotated[float, typer.Option(min=0.1, help="Of a request.")] = 600.0,
    slo_ttft_ms: Annotated[float | None, typer.Option(help="Limit for goodput.")] = None,
    slo_tpot_ms: Annotated[float | None, typer.Option(help="Limit for goodput.")] = None,
    output: Annotated[Path | None, typer.Option("--output", "-o", help=_OUTPUT)] = None,
    name: Annotated[str | None, typer.Option(help="What reports call the run.")] = None,
) -> None:
    """Load a server, or the engine alone, and record every request."""
    from pagestream.bench.records import read_run
    from pagestream.cli.bench import errors_told, print_runs

    console = Console(stderr=True)
    with errors_told():
        flags = BenchFlags(
            url=url,
            metrics_url=metrics_url,
            offline=offline,
            sweep=_sweep(concurrency, request_rate, trace),
            trace=trace,
            input_tokens=Lengths.parse(input_tokens),
            output_tokens=Lengths.parse(output_tokens),
            num_requests=num_requests,
            warm_up=warm_up,
            seed=seed,
            shared_prefix=shared_prefix,
            stream=stream,
            ignore_eos=ignore_eos,
            timeout_s=timeout_s,
            slo=Slo(slo_ttft_ms, slo_tpot_ms),
            output=output or Path("bench-runs") / time.strftime("%Y%m%d-%H%M%S"),
            name=name,
        )
        status = _bench(flags, engine_flags, console)
        finished = read_run(flags.output)
    print_runs([finished], Console())
    console.print(f"run in {flags.output}", markup=False, highlight=False, soft_wrap=True)
    raise typer.Exit(status)


def _sweep(
    concurrency: str | None, rate: str | None, trace: Path | None
) -> tuple[str, tuple[float, ...]]:
    given = [value for value in (concurrency, rate, trace) if value is not None]
    if len(given) > 1:
        raise ValueError("--concurrency, --request-rate and --trace are three loads: choose one")
    if trace is not None:
        return "trace", ()
    kind, text = ("rate", rate) if rate is not None else ("concurrency", concurrency)
    try:
        values = tuple(float(part) for part in (text or DEFAULT_SWEEP).split(","))
    except ValueError:
        raise ValueError(f"'{text}' is no list of numbers such as 1,2,4") from None
    if any(value <= 0 or (kind == "concurrency" and value % 1) for value in values):
        raise ValueError(f"'{text}': a load is above 0, and users are whole")
    return kind, values


def _bench(flags: BenchFlags, engine_flags: Mapping[str, Any], console: Console) -> int:
    """The exit status: 1 if a point had no answer at all, 130 after Ctrl-C."""
    from pagestream.bench.driver import warm_up
    from pagestream.bench.records import RunWriter

    model = resolve_model(engine_flags.get("model") or DEFAULT_MODEL)
    workload = Workload(
        flags.input_tokens,
        flags.output_tokens,
        flags.seed,
        flags.shared_prefix,
        plain_token_ids(model),
    )
    points = _points(flags, workload)
    with _target(flags, engine_flags, model, console) as (target, server):
        writer = RunWriter(flags.output, _info(flags, model, points, server))
        summaries: list[PointSummary] = []
        complete = False
        try:
            with Phase(console, f"Warming up with {flags.warm_up} requests"):
                warm_up(target, workload.warm_up(flags.warm_up), flags.timeout_s)
            for place, point in enumerate(points):
                summaries.append(_measure(target, point, place, flags, writer, console))
            complete = True
        except KeyboardInterrupt:
            console.print("[yellow]interrupted: the finished points are kept[/]")
            return 130
        except RuntimeError as error:
            raise ValueError(str(error)) from None
        finally:
            writer.close([dataclasses.asdict(each) for each in summaries], complete=complete)
    return int(any(summary.num_ok == 0 for summary in summaries))


def _points(flags: BenchFlags, workload: Workload) -> list[Point]:
    kind, values = flags.sweep
    if flags.trace is not None:
        return [workload.trace_point(flags.trace, flags.num_requests)]
    points = []
    for place, value in enumerate(values):
        if kind == "rate":
            num_requests = flags.num_requests or 2 * LEAST_REQUESTS
            points.append(workload.rate_point(place, value, num_requests))
        else:
            users = int(value)
            num_requests = flags.num_requests or max(LEAST_REQUESTS, REQUESTS_PER_USER * users)
            points.append(workload.concurrency_point(place, users, num_requests))
    return points


def _measure(
    target: Target,
    point: Point,
    place: int,
    flags: BenchFlags,
    writer: RunWriter,
    console: Console,
) -> PointSummary:
    from pagestream.bench.driver import Watch, run_point
    from pagestream.bench.records import RequestRecord
    from pagestream.cli.bench_progress import PointProgress

    with PointProgress(console, point.label, len(point.requests)) as progress:

        def note(record: RequestRecord) -> None:
            writer.add([record])
            progress.note(record)

        with Watch(target) as watch:
            records = run_point(target, point, place, flags.timeout_s, note)
    return summarize(point.label, point.kind, point.value, records, flags.slo, watch.samples())


Server = dict[str, Any]
"""What is known of the target, for run.json."""


@contextmanager
def _target(
    flags: BenchFlags, engine_flags: Mapping[str, Any], model: Path, console: Console
) -> Iterator[tuple[Target, Server]]:
    given = {name: value for name, value in engine_flags.items() if value is not None}
    given["model"] = str(model)
    if flags.offline and not flags.stream:
        raise ValueError("--no-stream is about responses, and --offline has none: choose one")
    if flags.metrics_url is not None and flags.url is None:
        raise ValueError("--metrics-url belongs to a running server: give its --url too")
    if flags.url is None and flags.offline:
        yield from _offline(flags, given, console)
    elif flags.url is not None:
        if flags.offline or len(given) > 1:
            raise ValueError(
                "the server at --url is what it is: --offline and engine flags do not "
                "go with it (only --model, which says what it serves)"
            )
        metrics_url = flags.metrics_url or _default_metrics_url(flags.url)
        yield from _served(flags, flags.url, metrics_url, None, {"kind": "running server"})
    else:
        yield from _started(flags, given, console)


def _offline(
    flags: BenchFlags, given: dict[str, Any], console: Console
) -> Iterator[tuple[Target, Server]]:
    from pagestream.config import EngineConfig

    config = EngineConfig.from_dict(given)
    with Phase(console, "Loading the engine"):
        from pagestream.bench.offline import OfflineTarget

        target = OfflineTarget(config, ignore_eos=flags.ignore_eos, seed=flags.seed)
    try:
        yield target, {"kind": "engine in the load generator's process", "engine": _public(config)}
    finally:
        target.close()


def _started(
    flags: BenchFlags, given: dict[str, Any], console: Console
) -> Iterator[tuple[Target, Server]]:
    from pagestream.cli.server_process import StartError, start_server

    with tempfile.NamedTemporaryFile("w", suffix=".json", encoding="utf-8") as config:
        json.dump(given, config)
        config.flush()
        try:
            with Phase(console, "Starting the server"):
                server = start_server(config=config.name)
        except StartError as error:
            raise ValueError(str(error)) from None
        with server:
            engine = json.loads(server.config.read_text(encoding="utf-8"))
            about = {"kind": "server started for this run", "engine": engine}
            del engine["control_secret"]
            pid = server.tritonserver_pid
            yield from _served(flags, server.grpc_url, server.metrics_url, pid, about)


def _served(
    flags: BenchFlags, url: str, metrics_url: str | None, pid: int | None, about: Server
) -> Iterator[tuple[Target, Server]]:
    from pagestream.bench.served import ServedTarget

    target = ServedTarget(
        url, metrics_url, pid, stream=flags.stream, ignore_eos=flags.ignore_eos, seed=flags.seed
    )
    try:
        if not target.is_ready:
            raise ValueError(
                f"no server with an `ensemble` at {url}: start one with `pagestream serve`"
            )
        yield target, {**about, "url": url, "tritonserver": target.server_version()}
    finally:
        target.close()


def _default_metrics_url(url: str) -> str | None:
    """Only for the usual port: another one's neighbour may be another server's."""
    host, _, port = url.rpartition(":")
    return f"http://{host}:8002/metrics" if port == str(DEFAULT_GRPC_PORT) else None


def _public(config: Any) -> dict[str, Any]:
    values = dataclasses.asdict(config)
    del values["control_secret"]
    return values


def _info(flags: BenchFlags, model: Path, points: list[Point], server: Server) -> dict[str, Any]:
    from pagestream.bench import environment

    kind, values = flags.sweep
    return {
        "name": flags.name or flags.output.name,
        "tool": "pagestream bench",
        "command": shlex.join(["pagestream", *sys.argv[1:]]),
        "started": time.strftime("%Y-%m-%d %H:%M:%S %z"),
        "workload": {
            "load": kind,
            "values": list(values),
            "trace": str(flags.trace or ""),
            "input_tokens": _text(flags.input_tokens),
            "output_tokens": _text(flags.output_tokens),
            "shared_prefix": flags.shared_prefix,
            "prompts": "random token ids, the same for the same seed",
            "seed": flags.seed,
            "warm_up_requests": flags.warm_up,
            "stream": flags.stream,
            "ignore_eos": flags.ignore_eos,
            "temperature": 0,
            "timeout_s": flags.timeout_s,
        },
        "points": [{"kind": p.kind, "value": p.value, "label": p.label} for p in points],
        "slo": dataclasses.asdict(flags.slo),
        "server": server,
        "model": environment.model_revision(model),
        "versions": environment.versions(),
        "hardware": environment.hardware(),
    }


def _text(lengths: Lengths) -> str:
    if lengths.spread is not None:
        return f"{lengths.mean:g}±{lengths.spread:g}, within {lengths.low} to {lengths.high}"
    return str(lengths.low) if lengths.low == lengths.high else f"{lengths.low} to {lengths.high}"
