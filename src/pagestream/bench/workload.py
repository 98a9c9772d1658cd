"""What is sent, and when: prompts, output lengths and arrivals, all drawn from one seed.

The same workload and seed give the same requests, whatever the server does. Prompts are random
token ids: a dense model's speed does not depend on what they say. Knows neither servers nor clocks;
used by the load generator's command line and driver.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

Kind = Literal["concurrency", "rate", "trace", "imported"]
_LENGTHS = re.compile(r"(\d+)(?:(-|±|\+-)(\d+))?")


@dataclass(frozen=True)
class Lengths:
    """How token counts are drawn. ``spread`` is the standard deviation of a normal distribution,
    cut off at ``low`` and ``high``; None is uniform between the two, both included."""

    low: int
    high: int
    mean: float | None = None
    spread: float | None = None

    @classmethod
    def parse(cls, text: str) -> Lengths:
        """``128``, ``64-256`` (uniform) or ``128±32`` (normal; also ``128+-32``)."""
        match = _LENGTHS.fullmatch(text.strip())
        if not match or int(match[1]) < 1:
            raise ValueError(f"'{text}' is no number of tokens: write 128, 64-256 or 128±32")
        first, second = int(match[1]), int(match[3] or 0)
        if match[2] is None:
            return cls(first, first)
        if match[2] == "-":
            if second < first:
                raise ValueError(f"'{text}' ends before it starts")
            return cls(first, second)
        # What lies beyond three deviations is rare, and would decide about the longest request.
        return cls(max(1, first - 3 * second), first + 3 * second, float(first), float(second))

    def draw(self, rng: random.Random) -> int:
        if self.spread is None or self.mean is None:
            return rng.randint(self.low, self.high)
        return min(self.high, max(self.low, round(rng.gauss(self.mean, self.spread))))


@dataclass(frozen=True)
class PlannedRequest:
    index: int
    """Within its point, from 0."""
    prompt_token_ids: tuple[int, ...]
    max_tokens: int
    arrival_s: float | None = None
    """After the point's start; None: as soon as one of the ``concurrency`` users is free."""


@dataclass(frozen=True)
class Point:
    """One load: its requests, and how they come."""

    kind: Kind
    value: float
    """Users, or requests per second; the number of requests for a trace."""
    requests: tuple[PlannedRequest, ...]

    @property
    def label(self) -> str:
        return point_label(self.kind, self.value)


def point_label(kind: str, value: float) -> str:
    if kind == "concurrency":
        return f"{value:g} concurrent"
    if kind == "rate":
        return f"{value:g} requests/s"
    return f"{kind} of {value:g}"


@dataclass(frozen=True)
class Workload:
    input_tokens: Lengths
    output_tokens: Lengths
    seed: int
    shared_prefix: int
    """So many tokens at the start of every prompt, of all points, are the same; 0: none are."""
    token_ids: Sequence[int]
    """What prompts are drawn from."""

    def __post_init__(self) -> None:
        if self.shared_prefix and self.input_tokens.low <= self.shared_prefix:
            raise ValueError(
                f"the shortest prompt has {self.input_tokens.low} tokens, and "
                f"{self.shared_prefix} are shared: a prompt needs at least one of its own"
            )

    def concurrency_point(self, place: int, users: int, num_requests: int) -> Point:
        """``place`` is the point's in the run: no two points send the same prompts."""
        rng = self._rng(place)
        requests = tuple(self._request(rng, index, None) for index in range(num_requests))
        return Point("concurrency", users, requests)

    def rate_point(self, place: int, rate: float, num_requests: int) -> Point:
        """Poisson arrivals: independent users, however long the answers take."""
        rng = self._rng(place)
        arrival, requests = 0.0, []
        for index in range(num_requests):
            arrival += rng.expovariate(rate)
            requests.append(self._request(rng, index, arrival))
        return Point("rate", rate, tuple(requests))

    def warm_up(self, num_requests: int) -> tuple[PlannedRequest, ...]:
        rng = self._rng(-1)
        return tuple(self._request(rng, index, None) for index in range(num_requests))

    def trace_point(self, path: Path, limit: int | None) -> Point:
        """The requests of a JSON Lines file. Each line has ``arrival_s``, ``max_tokens`` and either
        ``prompt_token_ids`` or ``num_input_tokens``. Raises ValueError with the line's number."""
        rng = self._rng(0)
        requests: list[PlannedRequest] = []
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            if line.strip() and (limit is None or len(requests) < limit):
                try:
                    requests.append(self._traced(json.loads(line), len(requests), rng))
                except (ValueError, KeyError, TypeError, AttributeError) as error:
                    raise ValueError(f"{path} line {number}: not a request: {error!r}") from None
        if not requests:
            raise ValueError(f"{path} has no requests")
        return Point("trace", len(requests), tuple(requests))

    def _traced(self, values: dict[str, Any], index: int, rng: random.Random) -> PlannedRequest:
        ids = values.get("prompt_token_ids")
        prompt = self._prompt(rng, int(values["num_input_tokens"])) if ids is None else tuple(ids)
        arrival, max_tokens = float(values["arrival_s"]), int(values["max_tokens"])
        if arrival < 0 or max_tokens < 1 or not prompt:
            raise ValueError("arrival_s is negative, or a length is not positive")
        return PlannedRequest(index, prompt, max_tokens, arrival)

    def _request(self, rng: random.Random, index: int, arrival: float | None) -> PlannedRequest:
        prompt = self._prompt(rng, self.input_tokens.draw(rng))
        return PlannedRequest(index, prompt, self.output_tokens.draw(rng), arrival)

    def _prompt(self, rng: random.Random, length: int) -> tuple[int, ...]:
        shared = random.Random(f"{self.seed}/shared").choices(self.token_ids, k=self.shared_prefix)
        return (*shared, *rng.choices(self.token_ids, k=length - self.shared_prefix))[:length]

    def _rng(self, place: int) -> random.Random:
        return random.Random(f"{self.seed}/{place}")


def plain_token_ids(model: Path) -> list[int]:
    """The ids of a checkpoint that are ordinary text: special and added tokens are left out.

    Raises ValueError or OSError for a directory that has no readable config.
    """
    config = json.loads((model / "config.json").read_text(encoding="utf-8"))
    size, added = int(config["vocab_size"]), set[int]()
    tokenizer = model / "tokenizer.json"
    if tokenizer.is_file():
        values = json.loads(tokenizer.read_text(encoding="utf-8"))
        added = {int(token["id"]) for token in values.get("added_tokens", ())}
        # A model may have more rows than its tokenizer has tokens.
        size = min(size, len(values["model"]["vocab"]))
    return [token_id for token_id in range(size) if token_id not in added]
