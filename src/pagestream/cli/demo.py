"""`pagestream demo`: one chat answer through a real server, from start to stop.

Starts the server on free ports, streams the answer through `chat` over gRPC while printing it,
prints what it took, and stops the server. What the numbers mean is the client's to know.
"""

from __future__ import annotations

from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from pagestream.cli.progress import Phase
from pagestream.cli.server_process import StartError, start_server
from pagestream.model_store import DEFAULT_MODEL
from pagestream_client import Completion, PagestreamClient, ServerError, TokenStream

QUESTION = "Why is the sky blue? Answer in a few sentences."
TIMEOUT_S = 300.0


def register(app: typer.Typer) -> None:
    app.command("demo")(demo)


def demo(
    question: Annotated[str, typer.Argument(help="What to ask the model.")] = QUESTION,
    model: Annotated[
        str, typer.Option(help="Checkpoint directory, pulled model or hub id.")
    ] = DEFAULT_MODEL,
    max_tokens: Annotated[int, typer.Option(help="Longest answer, in tokens.")] = 160,
    temperature: Annotated[float, typer.Option(help="0 always takes the best token.")] = 0.0,
) -> None:
    """Start a server on free ports, stream one chat answer, show what it took, stop the server."""
    console = Console(highlight=False, soft_wrap=True)
    try:
        with Phase(console, "Starting a server on free ports"):
            server = start_server(model)
        with server, PagestreamClient(server.grpc_url) as client:
            console.print(f"[bold cyan]you>[/] {question}")
            with client.stream(
                "chat",
                messages=[{"role": "user", "content": question}],
                max_tokens=max_tokens,
                temperature=temperature,
                timeout_s=TIMEOUT_S,
            ) as stream:
                completion = _print_answer(stream)
            console.print(_table(completion))
            with Phase(console, "Stopping the server"):
                server.stop()
    except (StartError, ServerError) as error:
        console.print(f"[red]error:[/] {error}")
        raise typer.Exit(1) from None


def _print_answer(stream: TokenStream) -> Completion:
    chunks = []
    for chunk in stream:
        chunks.append(chunk)
        print(chunk.text_output, end="", flush=True)
    print("\n")
    return Completion.from_chunks(chunks, stream.started_at)


def _table(completion: Completion) -> Table:
    table = Table(show_header=False, box=None, pad_edge=False)
    table.add_column()
    table.add_column(justify="right")
    table.add_row("time to first token", f"{completion.ttft_s * 1000:.0f} ms")
    if completion.tpot_s is not None:
        table.add_row("time per output token", f"{completion.tpot_s * 1000:.1f} ms")
    table.add_row("prompt tokens", str(completion.num_input_tokens))
    table.add_row("output tokens", str(completion.num_output_tokens))
    table.add_row("responses", str(completion.num_chunks))
    table.add_row("finish reason", completion.finish_reason)
    return table
