"""`pagestream trace`: step traces in numbers and as a picture.

A trace is what an engine with ``step_trace`` set writes. Only the command line is here: the format
is step_trace's to know, the drawing trace_picture's.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console


def register(app: typer.Typer) -> None:
    app.command("trace")(trace)


def trace(
    traces: Annotated[
        list[Path], typer.Argument(metavar="TRACE...", help="Files that step_trace named.")
    ],
    output: Annotated[
        Path, typer.Option("--output", "-o", help="The picture: an SVG file.")
    ] = Path("trace.svg"),
    first: Annotated[int, typer.Option(min=1, help="First iteration drawn.")] = 1,
    last: Annotated[int | None, typer.Option(min=1, help="Last iteration drawn.")] = None,
) -> None:
    """Draw what ran when: seats of the batch as lanes, iterations as columns.

    Several traces are drawn on one scale, each under its file's name.
    """
    from pagestream.cli.trace_picture import draw, make_panel
    from pagestream.cli.trace_stays import summary
    from pagestream.engine.step_trace import read_trace

    console = Console(stderr=True)
    try:
        panels = [
            make_panel(
                path.stem.replace("-", " ").replace("_", " "),
                read_trace(path),
                first - 1,
                None if last is None else last - 1,
            )
            for path in traces
        ]
        output.write_text(draw(panels), encoding="utf-8")
    except (OSError, ValueError) as error:
        console.print(f"[red]error:[/] {error}", highlight=False, soft_wrap=True)
        raise typer.Exit(1) from None
    for panel in panels:
        typer.echo(f"{panel.title}: {summary(panel.trace)}")
    typer.echo(f"drawn in {output}")
