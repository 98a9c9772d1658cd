"""The `pagestream` command: puts the subcommands together.

Each subcommand lives in its own module, which exposes `register(app)` and imports torch or
transformers only inside the command that needs them, so that `--help` stays instant.
"""

from __future__ import annotations

import typer

from pagestream.cli import bench, chat, demo, eval, golden, healthcheck, model, serve, trace

app = typer.Typer(
    name="pagestream",
    help="An LLM inference engine in a tritonserver model repository.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
)
for module in (serve, chat, demo, golden, eval, bench, model, trace, healthcheck):
    module.register(app)


if __name__ == "__main__":
    app()
