"""`pagestream model pull` and `pagestream model list`.

Only the command line: where models live is model_store's to know, how one is made model_pull's.
"""

from __future__ import annotations

from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from pagestream.cli.model_pull import PullError, pull
from pagestream.model_store import (
    DEFAULT_MODEL,
    PULLED_MODELS,
    is_complete,
    pulled_model_directory,
)


def register(app: typer.Typer) -> None:
    commands = typer.Typer(help="Models that pagestream can fetch itself.", no_args_is_help=True)
    commands.command("pull")(pull_model)
    commands.command("list")(list_models)
    app.add_typer(commands, name="model")


def pull_model(
    name: Annotated[str, typer.Argument(help="See `pagestream model list`.")] = DEFAULT_MODEL,
) -> None:
    """Fetch a model into the user's cache; does nothing when it is there."""
    console = Console(stderr=True)
    try:
        directory = pull(name, console)
    except PullError as error:
        console.print(f"[red]error:[/] {error}", highlight=False, soft_wrap=True)
        raise typer.Exit(1) from None
    typer.echo(directory)


def list_models() -> None:
    """The models that can be pulled, and where they are."""
    table = Table("model", "state", "what it is", box=None, pad_edge=False)
    for model in PULLED_MODELS.values():
        directory = pulled_model_directory(model.name)
        state = str(directory) if is_complete(directory) else "not pulled"
        table.add_row(model.name, state, model.description)
    Console(soft_wrap=True).print(table)
