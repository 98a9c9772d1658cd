"""SamplingParams: what a user may ask of one request, and the one place that refuses it.

Imported everywhere; knows neither tensors nor the server. ``__post_init__`` refuses values that
no model accepts; ``validate`` refuses those that this model and pool cannot serve. Both serving
gates (preprocessing and the engine bridge) call the same two.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

MAX_STOP_TOKEN_IDS = 128
MAX_STOP_STRINGS = 64
MAX_CACHE_SALT_CHARS = 256
MAX_STOP_STRING_CHARS = 1024
TEXT_FIELDS = frozenset({"stop", "include_stop_str_in_output", "skip_special_tokens"})
"""Fields about text: they concern whoever decodes, not the engine."""
MAX_TOKENS_FLOOR = 4096
"""Client frameworks send max_tokens of a few thousand by default, so no smaller limit refuses."""


@dataclass(frozen=True)
class Limits:
    """What one loaded engine can serve; lengths in tokens."""

    vocab_size: int
    max_model_len: int
    pool_tokens: int | None = None
    """Tokens that the whole KV cache holds; None where it is not known (preprocessing)."""

    @property
    def max_tokens(self) -> int:
        return max(self.max_model_len, MAX_TOKENS_FLOOR)


@dataclass(frozen=True)
class SamplingParams:
    """How to choose and when to stop. Every field's range is in its comment.

    Raises ValueError naming the field, the value and the limit.
    """

    max_tokens: int | None = None
    """Output limit, 1 to max(max_model_len, 4096); None: the engine's default_max_tokens."""
    temperature: float | None = None
    """0 (greedy; so is anything below 1e-5) to 100; None: generation_config's, else 1."""
    top_k: int | None = None
    """0 or -1: off; None: generation_config's, else off."""
    top_p: float | None = None
    """0 (greedy) to 1 (off); None: generation_config's, else 1."""
    seed: int | None = None
    """0 to 2**64 - 1; None: a fresh one per request."""
    min_tokens: int = 0
    """No stop of any kind before this many output tokens."""
    stop_token_ids: tuple[int, ...] = ()
    """Ids that end the request beside the model's end-of-sequence ids."""
    ignore_eos: bool = False
    """Go on after an end-of-sequence id (stop_token_ids still stop)."""
    priority: int = 0
    """-100 (urgent) to 100: as if it had come that many priority_aging_s later."""
    deadline_ms: int | None = None
    """Time from its arrival after which it ends, waiting or running, with what it has: 1 to a day;
    None: none."""
    prefix_cache: bool = True
    """Use KV that other requests left for the same tokens, and leave its own."""
    cache_salt: str = ""
    """KV is shared only between requests with the same salt, of at most 256 characters."""
    stop: tuple[str, ...] = ()
    """Texts that end the request, at most 64 of 1024 characters; a single string is one of them,
    and empty ones are none."""
    include_stop_str_in_output: bool = False
    """Whether the answer's text ends with the stop string or stop token, or before it."""
    skip_special_tokens: bool = True
    """Leave special tokens out of the text."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "stop_token_ids", _ids("stop_token_ids", self.stop_token_ids))
        _integer("max_tokens", self.max_tokens, 1, None)
        _real("temperature", self.temperature, 0.0, 100.0)
        _integer("top_k", self.top_k, -1, 2**31 - 1)
        _real("top_p", self.top_p, 0.0, 1.0)
        _integer("seed", self.seed, 0, 2**64 - 1)
        _integer("min_tokens", self.min_tokens, 0, None)
        for name in ("min_tokens", "priority"):
            if getattr(self, name) is None:
                raise ValueError(f"{name} must be an integer, got None")
        _integer("priority", self.priority, -100, 100)
        _integer("deadline_ms", self.deadline_ms, 1, 24 * 3600 * 1000)
        if not isinstance(self.cache_salt, str) or len(self.cache_salt) > MAX_CACHE_SALT_CHARS:
            raise ValueError(
                f"cache_salt must be a string of at most {MAX_CACHE_SALT_CHARS} characters, "
                f"got {self.cache_salt!r:.300}"
            )
        for name in _BOOLEANS:
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name} must be true or false, got {getattr(self, name)!r}")
        object.__setattr__(self, "stop", _strings("stop", self.stop))
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise ValueError(
                f"min_tokens is {self.min_tokens}, above max_tokens which is {self.max_tokens}"
            )

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> SamplingParams:
        known = {field.name for field in dataclasses.fields(cls)}
        unknown = sorted(set(values) - known)
        if unknown:
            raise ValueError(
                f"unknown sampling parameter {', '.join(map(repr, unknown))}; "
                f"known: {', '.join(sorted(known))}"
            )
        return cls(**values)

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready, without the fields left at their defaults."""
        values = {
            field.name: getattr(self, field.name)
            for field in dataclasses.fields(self)
            if getattr(self, field.name) != field.default
        }
        return {
            name: list(value) if isinstance(value, tuple) else value
            for name, value in values.items()
        }

    def validate(self, limits: Limits) -> None:
        if self.max_tokens is not None and self.max_tokens > limits.max_tokens:
            raise ValueError(
                f"max_tokens is {self.max_tokens}, above the limit of {limits.max_tokens} "
                f"(max_model_len is {limits.max_model_len})"
            )
        if self.min_tokens > limits.max_model_len:
            raise ValueError(
                f"min_tokens is {self.min_tokens}, above max_model_len "
                f"which is {limits.max_model_len}"
            )
        check_token_ids("stop_token_ids", self.stop_token_ids, limits.vocab_size)


_BOOLEANS = ("ignore_eos", "prefix_cache", "include_stop_str_in_output", "skip_special_tokens")


def validate_prompt(
    prompt_token_ids: list[int], limits: Limits, name: str = "prompt_token_ids"
) -> None:
    """Refuse a prompt that is empty, has unknown ids, or leaves no room for one output token.

    ``name`` is the field that the user sent.
    """
    if not prompt_token_ids:
        raise ValueError(f"{name} is empty: a prompt needs at least one token")
    length = len(prompt_token_ids)
    if length + 1 > limits.max_model_len:
        raise ValueError(
            f"{name} has {length} tokens and needs room for at least one more, "
            f"but max_model_len is {limits.max_model_len}"
        )
    if limits.pool_tokens is not None and length + 1 > limits.pool_tokens:
        raise ValueError(
            f"{name} has {length} tokens and needs room for at least one more, "
            f"but the KV cache holds {limits.pool_tokens} (num_blocks x block_size)"
        )
    check_token_ids(name, prompt_token_ids, limits.vocab_size)


def check_token_ids(name: str, ids: list[int] | tuple[int, ...], vocab_size: int) -> None:
    if ids and (min(ids) < 0 or max(ids) >= vocab_size):
        bad = next(i for i in ids if not 0 <= i < vocab_size)
        raise ValueError(f"{name} contains {bad}, outside the vocabulary (0 to {vocab_size - 1})")


def _integer(name: str, value: Any, least: int, most: int | None) -> None:
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, int):
        raise ValueError(f"{name} must be an integer, got {value!r}")
    if value < least or (most is not None and value > most):
        upper = "" if most is None else f" and at most {most}"
        raise ValueError(f"{name} must be at least {least}{upper}, got {value}")


def _real(name: str, value: Any, least: float, most: float) -> None:
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ValueError(f"{name} must be a number, got {value!r}")
    if not least <= value <= most:  # NaN compares false
        raise ValueError(f"{name} must be between {least:g} and {most:g}, got {value}")


def _ids(name: str, value: Any) -> tuple[int, ...]:
    if not isinstance(value, (list, tuple)):
        raise ValueError(f"{name} must be a list of token ids, got {value!r}")
    if len(value) > MAX_STOP_TOKEN_IDS:
        raise ValueError(f"{name} has {len(value)} entries, above the limit {MAX_STOP_TOKEN_IDS}")
    for item in value:
        if isinstance(item, bool) or not isinstance(item, int):
            raise ValueError(f"{name} must hold integers, got {item!r}")
    return tuple(value)


def _strings(name: str, value: Any) -> tuple[str, ...]:
    value = [value] if isinstance(value, str) else value
    if not isinstance(value, (list, tuple)) or not all(isinstance(item, str) for item in value):
        raise ValueError(f"{name} must be a string or a list of strings, got {value!r}")
    if len(value) > MAX_STOP_STRINGS:
        raise ValueError(f"{name} has {len(value)} strings, above the limit {MAX_STOP_STRINGS}")
    longest = max(map(len, value), default=0)
    if longest > MAX_STOP_STRING_CHARS:
        raise ValueError(
            f"{name} has a string of {longest} characters, above the limit {MAX_STOP_STRING_CHARS}"
        )
    return tuple(item for item in value if item)
