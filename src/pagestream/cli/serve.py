"""`pagestream serve`: the launcher's flags, named as tritonserver names its own.

Owns the command line only; launch.py does the work.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from rich.console import Console

from pagestream.cli.engine_flags import with_engine_flags
from pagestream.cli.launch import LaunchError, ServeFlags, launch
from pagestream.cli.process import die_with_parent as end_with_parent

Port = Annotated[int, typer.Option(min=0, max=65535, help="0: pick a free one.")]
Seconds = typer.Option(min=0)
_HOST = "Address to listen on; as with tritonserver, all of this machine's unless you say so."
_REPOSITORY = "(default: model_repository here, else beside the source)"
_CONTROL = "explicit: whoever reaches a port may load and unload models."
_READY = "Write the ports and process ids, as JSON, here whenever the server is ready."


def register(app: typer.Typer) -> None:
    app.command("serve")(with_engine_flags(serve))


def serve(
    engine_flags: dict[str, Any],
    http_port: Port = 8000,
    grpc_port: Port = 8001,
    metrics_port: Port = 8002,
    host: Annotated[str, typer.Option(help=_HOST)] = "0.0.0.0",
    model_repository: Annotated[Path | None, typer.Option(help=_REPOSITORY)] = None,
    model_control: Annotated[Literal["none", "explicit"], typer.Option(help=_CONTROL)] = "none",
    config: Annotated[Path | None, typer.Option(help="Engine settings as JSON.")] = None,
    ready_file: Annotated[Path | None, typer.Option(help=_READY)] = None,
    log_file: Annotated[Path | None, typer.Option(help="tritonserver's log.")] = None,
    log_verbose: Annotated[int, typer.Option(min=0, help="tritonserver's log level.")] = 0,
    start_timeout_secs: Annotated[int, typer.Option(min=1, help="To load the model.")] = 1800,
    drain_timeout_secs: Annotated[int, typer.Option(min=0, help="To finish requests.")] = 60,
    exit_timeout_secs: Annotated[int, typer.Option(min=0, help="To stop tritonserver.")] = 10,
    die_with_parent: Annotated[bool, typer.Option("--die-with-parent", hidden=True)] = False,
) -> None:
    """Serve a model through tritonserver until Ctrl-C or SIGTERM."""
    if die_with_parent:
        end_with_parent()
    flags = ServeFlags(
        http_port=http_port,
        grpc_port=grpc_port,
        metrics_port=metrics_port,
        host=host,
        model_repository=model_repository,
        model_control=model_control,
        config=config,
        ready_file=ready_file,
        log_file=log_file,
        log_verbose=log_verbose,
        start_timeout_secs=start_timeout_secs,
        drain_timeout_secs=drain_timeout_secs,
        exit_timeout_secs=exit_timeout_secs,
    )
    console = Console(stderr=True)
    try:
        status = launch(flags, engine_flags, console)
    except LaunchError as error:
        console.print(f"error: {error}", markup=False, highlight=False, soft_wrap=True)
        raise typer.Exit(1) from None
    raise typer.Exit(status)
