"""The workload that cpu.py and the peers share: token ids of SmolLM2, made once with a seed."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

FILE = Path(__file__).with_name("data") / "workload.json"


@dataclass(frozen=True)
class Request:
    prompt_token_ids: list[int]
    max_tokens: int


@dataclass(frozen=True)
class Workload:
    prefill: Request
    """512 tokens in, one out."""
    single: Request
    """64 tokens in, 128 out: one stream."""
    concurrent: list[Request]
    """16 requests at once, 64 to 256 tokens in, 64 to 128 out."""


def load_workload() -> Workload:
    values = json.loads(FILE.read_text())
    return Workload(
        Request(values["prefill512"], 1),
        Request(values["decode64"], values["decode_new"]),
        [Request(each["prompt_ids"], each["out"]) for each in values["reqs"]],
    )
