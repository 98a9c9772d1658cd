"""`pagestream eval`: what a quantized model loses against float32, as a table with a verdict.

Only the command line is here; engine.quality does the comparing.
"""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table

from pagestream.cli.progress import Phase

if TYPE_CHECKING:
    from pagestream.engine.quality import Quality

LEAST_AGREEMENT = 0.96
MOST_PERPLEXITY = 1.02
MOST_MEAN_KL = 0.05


def register(app: typer.Typer) -> None:
    app.command("eval")(evaluate)


def evaluate(
    model: Annotated[str, typer.Option(help="As in `pagestream serve`.")] = "smollm2-135m-instruct",
    quantization: Annotated[str, typer.Option(help="What to compare with float32.")] = "int8",
    text: Annotated[
        Path | None, typer.Option(help="UTF-8 text to read; default: one that comes along.")
    ] = None,
    window: Annotated[int, typer.Option(min=2, help="Most tokens of context.")] = 512,
) -> None:
    """Compare a quantized model with float32 on a text: perplexity, best tokens, divergence.

    Exits with 1 when a limit is missed. The limits are those of a drop-in replacement: where the
    exact model is sure, so is the quantized one.
    """
    from pagestream.config import QUANTIZATIONS
    from pagestream.engine.quality import compare
    from pagestream.model_store import resolve_model
    from pagestream.text.tokenizer import Tokenizer

    console = Console(stderr=True)
    try:
        if quantization not in QUANTIZATIONS:
            raise ValueError(f"quantization must be one of {', '.join(QUANTIZATIONS)}")
        directory = resolve_model(model)
        held = files("pagestream") / "data" / "held_text.txt" if text is None else text
        token_ids = Tokenizer(directory).encode(held.read_text(encoding="utf-8"))
        with Phase(console, "Loading both models and comparing") as phase:

            def progress(done: int, total: int) -> None:
                phase.update(f"{done} of {total} tokens")

            quality = compare(directory, token_ids, quantization, window, progress)
    except (OSError, ValueError) as error:
        console.print(f"[red]error:[/] {error}", highlight=False, soft_wrap=True)
        raise typer.Exit(1) from None
    if not report(quality, quantization):
        raise typer.Exit(1)


def report(quality: Quality, quantization: str) -> bool:
    """Print the table; whether every limit is kept."""
    table = Table(f"{quantization} against float32", box=None, pad_edge=False)
    for column in ("value", "limit", "verdict"):
        table.add_column(column, justify="right")
    rows = [
        ("perplexity, float32", f"{quality.perplexity:.3f}", "", None),
        (
            f"perplexity, {quantization}",
            f"{quality.quantized_perplexity:.3f} ({quality.perplexity_ratio - 1:+.2%})",
            f"{MOST_PERPLEXITY - 1:+.0%}",
            quality.perplexity_ratio <= MOST_PERPLEXITY,
        ),
        (
            "same best token",
            f"{quality.top1_agreement:.2%}",
            f"{LEAST_AGREEMENT:.0%}",
            quality.top1_agreement >= LEAST_AGREEMENT,
        ),
        (
            "KL divergence, mean, nats",
            f"{quality.mean_kl:.5f}",
            f"{MOST_MEAN_KL}",
            quality.mean_kl <= MOST_MEAN_KL,
        ),
        ("KL divergence, 99th percentile", f"{quality.p99_kl:.5f}", "", None),
    ]
    for name, value, limit, kept in rows:
        verdict = "" if kept is None else "[green]kept[/]" if kept else "[red]missed[/]"
        table.add_row(name, value, limit, verdict)
    console = Console()
    console.print(table)
    console.print(f"over {quality.num_tokens:,} tokens", highlight=False)
    return all(kept is not False for _, _, _, kept in rows)
