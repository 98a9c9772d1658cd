"""`pagestream chat`: a conversation with a running server, in the terminal.

Keeps the conversation and sends it whole with every turn; the server keeps nothing. Ctrl-C while
an answer is running cancels that answer, at the prompt it ends the chat.
"""

from __future__ import annotations

from typing import Annotated

import typer
from rich.console import Console

from pagestream_client import Message, PagestreamClient, ServerError


def register(app: typer.Typer) -> None:
    app.command("chat")(chat)


def chat(
    url: Annotated[str, typer.Option(help="host:port of the server's gRPC endpoint.")] = (
        "localhost:8001"
    ),
    system: Annotated[str | None, typer.Option(help="System message.")] = None,
    max_tokens: Annotated[int | None, typer.Option(help="Longest answer, in tokens.")] = None,
    temperature: Annotated[float | None, typer.Option(help="0 always takes the best.")] = None,
) -> None:
    """Chat with a running server; Ctrl-C stops an answer, Ctrl-D ends the chat."""
    console = Console()
    conversation: list[Message] = []
    if system is not None:
        conversation.append({"role": "system", "content": system})
    with PagestreamClient(url) as client:
        if not client.is_ready("chat"):
            console.print(
                f"[red]error:[/] no server with a `chat` model at {url}: "
                "start one with `pagestream serve`, or name its gRPC port with --url",
                highlight=False,
                soft_wrap=True,
            )
            raise typer.Exit(1)
        while (question := _ask(console)) is not None:
            conversation.append({"role": "user", "content": question})
            answer = _answer(client, console, conversation, max_tokens, temperature)
            if answer is None:
                conversation.pop()
            else:
                conversation.append({"role": "assistant", "content": answer})


def _ask(console: Console) -> str | None:
    """The next question; None at Ctrl-C, Ctrl-D or the end of the input."""
    try:
        question = ""
        while not question.strip():
            question = console.input("[bold cyan]you>[/] ")
    except (EOFError, KeyboardInterrupt):
        console.print()
        return None
    return question


def _answer(
    client: PagestreamClient,
    console: Console,
    conversation: list[Message],
    max_tokens: int | None,
    temperature: float | None,
) -> str | None:
    """Print the answer as it comes; the text shown, or None when the server refused."""
    texts = []
    with client.stream(
        "chat", messages=conversation, max_tokens=max_tokens, temperature=temperature
    ) as stream:
        try:
            for chunk in stream:
                texts.append(chunk.text_output)
                print(chunk.text_output, end="", flush=True)
            print()
        except KeyboardInterrupt:
            stream.cancel()
            console.print("\n[yellow]stopped[/]")
        except ServerError as error:
            console.print(f"\n[red]error:[/] {error}", highlight=False, soft_wrap=True)
            return None
    return "".join(texts)
