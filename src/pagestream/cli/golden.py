"""`pagestream golden`: the served token ids against a reference file, prompt by prompt.

Starts the server in each configuration, sends the reference's prompts streamed and whole, alone
and sixteen at once, and compares every token id. The offline half of the check is a test of the
engine. `compare_ids` is the rule; the tests of the server use it too.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from pagestream.cli.progress import Phase
from pagestream.cli.server_process import StartError, start_server
from pagestream.model_store import DEFAULT_MODEL
from pagestream_client import PagestreamClient, ServerError
from pagestream_client.metrics import read_metrics

TIE_GAP = 1e-3
"""Where the reference's two best logprobs are closer than this, either token is right."""
LEAST_COMPARED = 750
"""Of the 768 ids in the reference; fewer means that the check says too little."""
AT_ONCE = 16
TIMEOUT_S = 600.0


@dataclass(frozen=True)
class GoldenPrompt:
    name: str
    prompt_token_ids: tuple[int, ...]
    output_ids: tuple[int, ...]
    top_ids: tuple[tuple[int, ...], ...]
    top_logprobs: tuple[tuple[float, ...], ...]
    """top_ids, top_logprobs: the best candidates of every step, best first."""


@dataclass(frozen=True)
class Comparison:
    """How far one answer was compared, and what was wrong with it."""

    name: str
    num_compared: int
    tie_step: int | None = None
    """0-based step at which a tie went the other way; nothing after it is compared."""
    mismatch: str = ""
    """Empty when every compared id is equal."""

    def __str__(self) -> str:
        if self.mismatch:
            return f"[red]{self.num_compared} ({self.mismatch})[/]"
        tie = "" if self.tie_step is None else f" (tie at step {self.tie_step})"
        return f"{self.num_compared}{tie}"


@dataclass(frozen=True)
class Configuration:
    name: str
    engine_flags: dict[str, Any]
    must_preempt: bool = False


CONFIGURATIONS = (
    Configuration("token budget 16", {"max_num_batched_tokens": 16}),
    Configuration("token budget 512", {"max_num_batched_tokens": 512}),
    # The longest prompt takes 52 of these blocks, and the sixteen together over 200.
    Configuration("few blocks", {"block_size": 16, "num_blocks": 72}, must_preempt=True),
)


def load_golden(path: Path) -> list[GoldenPrompt]:
    prompts = json.loads(path.read_text(encoding="utf-8"))["prompts"]
    return [
        GoldenPrompt(
            name=prompt["name"],
            prompt_token_ids=tuple(prompt["prompt_ids"]),
            output_ids=tuple(prompt["output_ids"]),
            top_ids=tuple(tuple(step["ids"]) for step in prompt["top5"]),
            top_logprobs=tuple(tuple(step["logprobs"]) for step in prompt["top5"]),
        )
        for prompt in prompts
    ]


def compare_ids(prompt: GoldenPrompt, output_token_ids: Sequence[int]) -> Comparison:
    """Compare up to the first tie that went the other way; any other difference is a mismatch."""
    for step, expected in enumerate(prompt.output_ids):
        if step >= len(output_token_ids):
            mismatch = f"ended after {step} of {len(prompt.output_ids)} ids"
            return Comparison(prompt.name, step, mismatch=mismatch)
        got = output_token_ids[step]
        if got == expected:
            continue
        best, second = prompt.top_logprobs[step][:2]
        if best - second < TIE_GAP and got == prompt.top_ids[step][1]:
            return Comparison(prompt.name, step, tie_step=step)
        mismatch = f"step {step}: {got} where the reference has {expected}"
        return Comparison(prompt.name, step, mismatch=mismatch)
    if len(output_token_ids) > len(prompt.output_ids):
        mismatch = f"{len(output_token_ids)} ids where the reference has {len(prompt.output_ids)}"
        return Comparison(prompt.name, len(prompt.output_ids), mismatch=mismatch)
    return Comparison(prompt.name, len(prompt.output_ids))


def served_ids(client: PagestreamClient, prompt: GoldenPrompt, *, stream: bool) -> tuple[int, ...]:
    """The ids that the server answers a reference prompt with."""
    completion = client.generate(
        prompt_token_ids=prompt.prompt_token_ids,
        max_tokens=len(prompt.output_ids),
        temperature=0.0,
        ignore_eos=True,
        return_token_ids=True,
        stream=stream,
        timeout_s=TIMEOUT_S,
    )
    return completion.output_token_ids


def worst(comparisons: Sequence[Comparison]) -> Comparison:
    """The one to report of several answers to a prompt: a mismatch, else the least compared."""
    return min(comparisons, key=lambda each: (not each.mismatch, each.num_compared))


@dataclass(frozen=True)
class Pass:
    """One way of asking all the prompts."""

    stream: bool
    at_once: int

    def __str__(self) -> str:
        how = "streamed" if self.stream else "whole"
        return f"{how} alone" if self.at_once == 1 else f"{how} x{self.at_once}"


PASSES = tuple(Pass(stream, at_once) for stream in (True, False) for at_once in (1, AT_ONCE))


def register(app: typer.Typer) -> None:
    app.command("golden")(golden)


def golden(
    reference: Annotated[
        Path, typer.Option(exists=True, dir_okay=False, help="Reference outputs, as JSON.")
    ] = Path("tests/data/smollm2_greedy.json"),
    model: Annotated[str, typer.Option(help="The model that made the reference.")] = DEFAULT_MODEL,
) -> None:
    """Check that served token ids equal the reference's, in several configurations."""
    console = Console(highlight=False, soft_wrap=True)
    prompts = load_golden(reference)
    try:
        failures = [
            failure
            for configuration in CONFIGURATIONS
            for failure in _check_configuration(configuration, prompts, model, console)
        ]
    except (ServerError, StartError) as error:
        console.print(f"[red]error:[/] {error}")
        raise typer.Exit(1) from None
    for failure in failures:
        console.print(f"[red]failed:[/] {failure}")
    if failures:
        raise typer.Exit(1)


def _check_configuration(
    configuration: Configuration, prompts: list[GoldenPrompt], model: str, console: Console
) -> list[str]:
    """What is wrong with the server's answers in one configuration; empty if nothing is."""
    console.rule(configuration.name, align="left")
    answers: dict[Pass, list[Comparison]] = {}
    with Phase(console, "Starting the server"):
        server = start_server(model, **configuration.engine_flags)
    with server, PagestreamClient(server.grpc_url) as client:
        for each in PASSES:
            with Phase(console, f"Asking {len(prompts)} prompts, {each}") as phase:
                answers[each] = _ask_all(client, prompts, each, phase)
        preemptions = int(read_metrics(server.metrics_url)["pagestream_preemptions_total"])
    per_prompt = [worst(column) for column in zip(*answers.values(), strict=True)]
    _print_table(answers, console)
    return _verdict(configuration, per_prompt, preemptions, console)


def _ask_all(
    client: PagestreamClient, prompts: list[GoldenPrompt], each: Pass, phase: Phase
) -> list[Comparison]:
    """One comparison per prompt: the worst of its answers, where it is asked more than once."""
    num_asked = max(len(prompts), each.at_once)
    asked = list(itertools.islice(itertools.cycle(prompts), num_asked))
    compared = []
    with ThreadPoolExecutor(max_workers=each.at_once) as pool:
        answers = pool.map(lambda prompt: served_ids(client, prompt, stream=each.stream), asked)
        for prompt, output_token_ids in zip(asked, answers, strict=True):
            compared.append(compare_ids(prompt, output_token_ids))
            phase.update(f"{len(compared)} of {num_asked} answers")
    return [worst(compared[i :: len(prompts)]) for i in range(len(prompts))]


def _print_table(answers: dict[Pass, list[Comparison]], console: Console) -> None:
    table = Table("ids compared", *map(str, answers), box=None, pad_edge=False)
    for row in zip(*answers.values(), strict=True):
        table.add_row(row[0].name, *map(str, row))
    console.print(table)


def _verdict(
    configuration: Configuration,
    per_prompt: list[Comparison],
    preemptions: int,
    console: Console,
) -> list[str]:
    num_equal = sum(not comparison.mismatch for comparison in per_prompt)
    num_compared = sum(comparison.num_compared for comparison in per_prompt)
    console.print(
        f"[bold]{num_equal} of {len(per_prompt)} prompts equal[/], "
        f"{num_compared} ids compared, {preemptions} preemptions"
    )
    failures = [
        f"{configuration.name}: {comparison.name}: {comparison.mismatch}"
        for comparison in per_prompt
        if comparison.mismatch
    ]
    if num_compared < LEAST_COMPARED:
        failures.append(
            f"{configuration.name}: only {num_compared} ids compared, at least {LEAST_COMPARED} "
            "must be: too many ties went the other way"
        )
    if configuration.must_preempt and not preemptions:
        failures.append(f"{configuration.name}: no request was preempted; use fewer blocks")
    return failures
