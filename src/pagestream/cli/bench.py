"""`pagestream bench`: report, table and import; `run` is bench_run's.

Only the command line: what a run holds is bench.records' to know, the page is bench.report's.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from pagestream.bench.records import Run
from pagestream.cli import bench_run

Runs = Annotated[list[Path], typer.Argument(metavar="RUN...", help="Run directories.")]
SHOWN = (
    "requests",
    "errors",
    "timeouts",
    "requests/s",
    "goodput, requests/s",
    "output tokens/s",
    "TTFT median",
    "TTFT p99",
    "TPOT median",
    "TPOT p99",
    "ITL p99",
    "tokens per response",
    "e2e median",
    "cached, %",
    "waiting, most",
    "peak memory, MiB",
)


def register(app: typer.Typer) -> None:
    commands = typer.Typer(help="Load tests: run, compare, report.", no_args_is_help=True)
    bench_run.register(commands)
    commands.command("report")(report)
    commands.command("table")(table)
    commands.command("import")(import_file)
    app.add_typer(commands, name="bench")


@contextmanager
def errors_told() -> Iterator[None]:
    """ValueError, OSError and a missing optional package end the command with their message."""
    try:
        yield
    except (ValueError, OSError) as error:
        message = str(error)
    except ModuleNotFoundError as error:
        message = (
            f"{error}: the report needs the optional packages: pip install 'pagestream[bench]'"
        )
    else:
        return
    console = Console(stderr=True)
    console.print(f"error: {message}", markup=False, highlight=False, soft_wrap=True)
    raise typer.Exit(1)


def report(
    runs: Runs,
    output: Annotated[Path, typer.Option("--output", "-o", help="The page.")] = Path("report.html"),
    pictures: Annotated[
        Path | None,
        typer.Option(metavar="PREFIX", help="Also write each picture, as PREFIX-*.svg."),
    ] = None,
) -> None:
    """Make an HTML report of one run, or of several side by side with ratios to the first."""
    from pagestream.bench.records import read_runs

    with errors_told():
        from pagestream.bench import report as pages

        read = read_runs(runs)
        for run in read:
            if not run.summary:
                raise ValueError(
                    f"{run.directory}: interrupted before a point was done, nothing to report"
                )
        drawn = pages.pictures(read)
        output.write_text(pages.render(read, drawn), encoding="utf-8")
        written = [output]
        if pictures is not None:
            written += pages.write_pictures(drawn, pictures)
    for path in written:
        typer.echo(path)


def table(runs: Runs) -> None:
    """Print the summary of each run."""
    from pagestream.bench.records import read_runs

    with errors_told():
        read = read_runs(runs)
    print_runs(read, Console())


def import_file(
    file: Annotated[
        Path,
        typer.Argument(
            exists=True,
            dir_okay=False,
            help="perf_analyzer's --profile-export-file, or aiperf's profile_export.jsonl.",
        ),
    ],
    output: Annotated[Path, typer.Option("--output", "-o", help="The run directory to make.")],
    name: Annotated[str | None, typer.Option(help="What reports call it.")] = None,
    slo_ttft_ms: Annotated[float | None, typer.Option(help="Limit for goodput.")] = None,
    slo_tpot_ms: Annotated[float | None, typer.Option(help="Limit for goodput.")] = None,
) -> None:
    """Make a run directory of another load generator's results, to compare it with ours."""
    from pagestream.bench.importing import import_run
    from pagestream.bench.records import read_run
    from pagestream.bench.summary import Slo

    with errors_told():
        run = read_run(import_run(file, output, name, Slo(slo_ttft_ms, slo_tpot_ms)))
    print_runs([run], Console())
    for note in run.info["notes"]:
        typer.echo(f"note: {note}")


def print_runs(runs: Sequence[Run], console: Console) -> None:
    """A table of each run: numbers as rows, loads as columns."""
    from pagestream.bench.columns import COLUMNS

    for run in runs:
        shown = Table(run.name, box=None, pad_edge=False)
        for point in run.summary:
            shown.add_column(point["label"], justify="right")
        for column in COLUMNS:
            cells = [column.text(point) for point in run.summary]
            if column.title in SHOWN and set(cells) - {"–"}:
                bad = column.title in ("errors", "timeouts") and set(cells) != {"0"}
                shown.add_row(column.title, *cells, style="red" if bad else None)
        console.print(shown)
        if not run.info.get("complete"):
            console.print("[red]not complete: interrupted before its end[/]")
    console.print("Times in milliseconds; – : not measured.", style="dim", highlight=False)
