"""One run of `pagestream serve`: from checked options to a supervised tritonserver.

Owns the order of the checks (all before anything is started), the log file, the ready file, and
what the operator is told. The flags are serve.py's, the life cycle is the supervisor's.
"""

from __future__ import annotations

import dataclasses
import json
import os
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from pagestream.cli import diagnosis
from pagestream.cli.control import Control, base_url, reachable_host
from pagestream.cli.engine_flags import engine_config
from pagestream.cli.libpython import LibpythonError
from pagestream.cli.ports import PortError, resolve_ports
from pagestream.cli.process import TritonserverProcess
from pagestream.cli.supervisor import ServerDownError, Supervisor, Timeouts
from pagestream.cli.tritonserver import (
    Installation,
    RunDirectory,
    ServerOptions,
    SetupError,
    check_numpy,
    check_stub,
    command_line,
    environment,
    find_installation,
)
from pagestream.config import EngineConfig, ModelConfig
from pagestream.model_store import cache_directory, resolve_model

KEPT_LOGS = 10


class LaunchError(Exception):
    """The server could not be started or kept running; the message says what to do."""


@dataclass(frozen=True)
class ServeFlags:
    """The launcher's own flags, by name; ports may be 0 (pick a free one)."""

    http_port: int
    grpc_port: int
    metrics_port: int
    host: str
    model_repository: Path | None
    model_control: str
    config: Path | None
    ready_file: Path | None
    log_file: Path | None
    log_verbose: int
    start_timeout_secs: int
    drain_timeout_secs: int
    exit_timeout_secs: int


def launch(flags: ServeFlags, engine_flags: Mapping[str, Any], console: Console) -> int:
    """Serve until told to stop; the exit status. Raises LaunchError."""
    try:
        check_numpy()
        installation = find_installation()
        config = engine_config(engine_flags, flags.config, secrets.token_hex(16))
        config = dataclasses.replace(config, model=str(resolve_model(config.model)))
        ModelConfig.from_hf(config.model)
        options = _server_options(flags)
        log_file = _new_log(flags.log_file)
        run = RunDirectory(installation)
    except (SetupError, LibpythonError, PortError, ValueError, OSError) as error:
        raise LaunchError(str(error)) from None
    try:
        check_stub(run)
        run.write_config(config)
        return _supervise(installation, run, options, config, flags, log_file, console)
    except SetupError as error:
        raise LaunchError(str(error)) from None
    finally:
        run.remove()


def _supervise(
    installation: Installation,
    run: RunDirectory,
    options: ServerOptions,
    config: EngineConfig,
    flags: ServeFlags,
    log_file: Path,
    console: Console,
) -> int:
    host = reachable_host(options.host)
    announcer = _Announcer(options, host, config.model, run.config, log_file, flags.ready_file)
    log_start = 0

    def spawn() -> TritonserverProcess:
        nonlocal log_start
        log_start = log_file.stat().st_size if log_file.exists() else 0
        command = command_line(installation, run, options)
        return TritonserverProcess(command, environment(run), log_file, run)

    try:
        return Supervisor(
            spawn,
            Control(host, options.http_port, config.control_secret),
            console,
            Timeouts(flags.start_timeout_secs, flags.drain_timeout_secs, flags.exit_timeout_secs),
            on_ready=announcer.ready,
            on_down=announcer.down,
        ).run()
    except ServerDownError as error:
        lines = "".join(f"\n  {line}" for line in diagnosis.explain(log_file, log_start))
        raise LaunchError(f"{error}\nFrom its log, {log_file}:{lines}") from None


def _server_options(flags: ServeFlags) -> ServerOptions:
    repository = _model_repository(flags.model_repository)
    ports = resolve_ports(
        flags.host,
        {
            "http-port": flags.http_port,
            "grpc-port": flags.grpc_port,
            "metrics-port": flags.metrics_port,
        },
    )
    return ServerOptions(
        http_port=ports["http-port"],
        grpc_port=ports["grpc-port"],
        metrics_port=ports["metrics-port"],
        host=flags.host,
        model_repository=repository,
        model_control=flags.model_control,
        exit_timeout_secs=flags.exit_timeout_secs,
        log_verbose=flags.log_verbose,
    )


def _model_repository(chosen: Path | None) -> Path:
    source_checkout = Path(__file__).resolve().parents[3]
    candidates = [chosen] if chosen else [Path.cwd(), source_checkout]
    for candidate in candidates:
        repository = candidate if chosen else candidate / "model_repository"
        if (repository / "ensemble" / "config.pbtxt").is_file():
            return repository.resolve()
    where = ", ".join(map(str, candidates))
    raise ValueError(
        f"no model repository with an `ensemble` in {where}: "
        "pass --model-repository, the directory model_repository of the source"
    )


def _new_log(chosen: Path | None) -> Path:
    if chosen:
        chosen.parent.mkdir(parents=True, exist_ok=True)
        return chosen.absolute()
    directory = cache_directory() / "logs"
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    logs = sorted(directory.glob("tritonserver-*.log"), key=lambda log: log.stat().st_mtime)
    for old in logs[: max(0, len(logs) - KEPT_LOGS + 1)]:
        old.unlink(missing_ok=True)
    log = directory / f"tritonserver-{os.getpid()}.log"
    log.unlink(missing_ok=True)
    return log


@dataclass(frozen=True)
class _Announcer:
    """Tells people (stdout) and programs (the ready file) where the server is."""

    options: ServerOptions
    host: str
    model: str
    config: Path
    log_file: Path
    ready_file: Path | None

    def ready(self, tritonserver_pid: int) -> None:
        print(self._block(), flush=True)
        if self.ready_file:
            values = {
                "http_port": self.options.http_port,
                "grpc_port": self.options.grpc_port,
                "metrics_port": self.options.metrics_port,
                "pid": os.getpid(),
                "tritonserver_pid": tritonserver_pid,
                "config": str(self.config),
                "log_file": str(self.log_file),
            }
            part = self.ready_file.with_name(f".{self.ready_file.name}.part")
            part.write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")
            part.replace(self.ready_file)

    def down(self) -> None:
        if self.ready_file:
            self.ready_file.unlink(missing_ok=True)

    def _block(self) -> str:
        options = self.options
        http = base_url(self.host, options.http_port)
        grpc = base_url(self.host, options.grpc_port).removeprefix("http://")
        metrics = base_url(self.host, options.metrics_port)
        chat = json.dumps([{"role": "user", "content": "What is the capital of France?"}])
        return f"""
pagestream is ready with {self.model}

  HTTP      {http}
  gRPC      {grpc}
  metrics   {metrics}/metrics
  log       {self.log_file}
{_reach(options.host)}
Try it:

  curl -s {http}/v2/models/chat/generate -d '{json.dumps({"messages": chat, "max_tokens": 64})}'

  curl -sN {http}/v2/models/ensemble/generate_stream -d '{
            json.dumps({"text_input": "Once upon a time", "max_tokens": 64, "stream": True})
        }'

Ctrl-C stops it when the running requests have finished.
"""


def _reach(host: str) -> str:
    if host in ("0.0.0.0", "::"):
        return "\nReachable from other machines; --host 127.0.0.1 keeps it to this one.\n"
    return ""
