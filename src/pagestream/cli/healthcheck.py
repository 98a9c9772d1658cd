"""`pagestream healthcheck`: is the server at these ports able to answer?

By inference, because tritonserver's own health endpoints stay green when a model's process is
dead. For container health checks and load balancers' command checks.
"""

from __future__ import annotations

from typing import Annotated

import typer

from pagestream.cli.control import Control, ControlError, reachable_host


def register(app: typer.Typer) -> None:
    app.command("healthcheck")(healthcheck)


def healthcheck(
    http_port: Annotated[int, typer.Option(help="The server's HTTP port.")] = 8000,
    host: Annotated[str, typer.Option(help="The server's address.")] = "127.0.0.1",
    timeout_secs: Annotated[float, typer.Option(help="Longest wait for the answer.")] = 10.0,
) -> None:
    """Exit with 0 if one token can be generated, with 1 and the reason if not."""
    try:
        Control(reachable_host(host), http_port).infer(timeout_secs)
    except ControlError as error:
        typer.echo(f"unhealthy: {error}", err=True)
        raise typer.Exit(1) from None
    typer.echo("healthy")
