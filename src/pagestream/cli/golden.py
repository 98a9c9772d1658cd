"""`pagestream golden`: the served token ids against a reference file, prompt by prompt.

Starts the server in each configuration, sends the reference's prompts streamed and whole, alone
and sixteen at once, and compares every token id. The offline half of the check is a test of the
engine. `compare_ids` is the rule; the tests of the server use it too.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pagestream_client import PagestreamClient

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
