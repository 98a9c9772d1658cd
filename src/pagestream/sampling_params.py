"""SamplingParams: what a user may ask of one request, and the one place that refuses it.

Imported everywhere; knows neither tensors nor the server. ``__post_init__`` refuses values that
no model accepts; ``validate`` refuses those that this model and pool cannot serve. Both serving
gates (preprocessing and the engine bridge) call the same two.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from pagestream import checks

MAX_TOKENS_FLOOR = 4096
"""Client frameworks send max_tokens of a few thousand by default, so no smaller limit refuses."""
MAX_LOGPROBS = 20
MAX_N = 32
TEXT_FIELDS = frozenset({"stop", "include_stop_str_in_output", "skip_special_tokens", "bad_words"})
"""Fields about text: they concern whoever has the tokenizer, not the engine."""


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
    min_tokens: int = 0
    """No stop of any kind before this many output tokens."""
    n: int = 1
    """Answers to the same prompt, 1 to 32, each with draws of its own."""
    seed: int | None = None
    """0 to 2**64 - 1; None: a fresh one per request."""
    temperature: float | None = None
    """0 (greedy; so is anything below 1e-5) to 100; None: generation_config's, else 1."""
    top_k: int | None = None
    """0 or -1: off; None: generation_config's, else off."""
    top_p: float | None = None
    """0 (greedy) to 1 (off); None: generation_config's, else 1."""
    min_p: float = 0.0
    """0 (off) to 1: least probability, as a share of the most likely token's."""
    repetition_penalty: float = 1.0
    """Above 0 to 10; over 1 makes tokens of prompt and output less likely."""
    presence_penalty: float = 0.0
    """-2 to 2, off each token that is in the output."""
    frequency_penalty: float = 0.0
    """-2 to 2, off each token as often as it is in the output."""
    logit_bias: dict[int, float] = field(default_factory=dict)
    """Token id -> what is added to its logit, -100 to 100; at most 1,024 entries."""
    allowed_token_ids: tuple[int, ...] | None = None
    """Nothing else is ever drawn; None: everything is allowed."""
    bad_words: tuple[str, ...] = ()
    """Texts that are never completed, with or without a space before them; at most 64."""
    bad_words_token_ids: tuple[tuple[int, ...], ...] = ()
    """The same as token ids; at most 256 sequences of 64."""
    structured_output: dict[str, Any] | None = None
    """What the answer must be: one of json_schema (an object or its text), regex, grammar (EBNF),
    each of at most 32,768 characters, or choice (a list of texts). Ends when it is complete."""
    stop: tuple[str, ...] = ()
    """Texts that end the request, at most 64 of 1,024 characters; a single string is one of them,
    and empty ones are none."""
    stop_token_ids: tuple[int, ...] = ()
    """Ids that end the request beside the model's end-of-sequence ids; at most 128."""
    ignore_eos: bool = False
    """Go on after an end-of-sequence id (stop_token_ids still stop)."""
    include_stop_str_in_output: bool = False
    """Whether the answer's text ends with the stop string or stop token, or before it."""
    skip_special_tokens: bool = True
    """Leave special tokens out of the text."""
    logprobs: int | None = None
    """Log-probabilities of each output token and of this many best ones, 0 to 20; of the model's
    own distribution, before any processor. None: none."""
    prompt_logprobs: int | None = None
    """The same for the prompt's tokens. Such a request reads nothing from the prefix cache."""
    priority: int = 0
    """-100 (urgent) to 100: as if it had come that many priority_aging_s later."""
    deadline_ms: int | None = None
    """Time from its arrival after which it ends, waiting or running, with what it has: 1 to a day;
    None: none."""
    prefix_cache: bool = True
    """Use KV that other requests left for the same tokens, and leave its own."""
    cache_salt: str = ""
    """KV is shared only between requests with the same salt, of at most 256 characters."""

    def __post_init__(self) -> None:
        for name, check in _CHECKS.items():
            object.__setattr__(self, name, check(name, getattr(self, name)))
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise ValueError(
                f"min_tokens is {self.min_tokens}, above max_tokens which is {self.max_tokens}"
            )
        if self.allowed_token_ids == ():
            raise ValueError("allowed_token_ids is empty: nothing could be drawn")

    @property
    def reads_prefix_cache(self) -> bool:
        return self.prefix_cache and self.prompt_logprobs is None

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> SamplingParams:
        unknown = sorted(set(values) - _CHECKS.keys())
        if unknown:
            raise ValueError(
                f"unknown sampling parameter {', '.join(map(repr, unknown))}; "
                f"known: {', '.join(sorted(_CHECKS))}"
            )
        return cls(**values)

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready, without the fields left at their defaults."""
        default = SamplingParams()
        return {
            item.name: getattr(self, item.name)
            for item in dataclasses.fields(self)
            if getattr(self, item.name) != getattr(default, item.name)
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
        for name in ("stop_token_ids", "allowed_token_ids", "logit_bias"):
            check_token_ids(name, getattr(self, name) or (), limits.vocab_size)
        for sequence in self.bad_words_token_ids:
            check_token_ids("bad_words_token_ids", sequence, limits.vocab_size)


_CHECKS: dict[str, checks.Check] = {
    "max_tokens": checks.integer(1, optional=True),
    "min_tokens": checks.integer(0),
    "n": checks.integer(1, MAX_N),
    "seed": checks.integer(0, 2**64 - 1, optional=True),
    "temperature": checks.real(0.0, 100.0, optional=True),
    "top_k": checks.integer(-1, 2**31 - 1, optional=True),
    "top_p": checks.real(0.0, 1.0, optional=True),
    "min_p": checks.real(0.0, 1.0),
    "repetition_penalty": checks.real(0.0, 10.0, above_least=True),
    "presence_penalty": checks.real(-2.0, 2.0),
    "frequency_penalty": checks.real(-2.0, 2.0),
    "logit_bias": checks.biases(1024, 100.0),
    "allowed_token_ids": checks.ids(1 << 20, optional=True),
    "bad_words": checks.strings(64, 256),
    "bad_words_token_ids": checks.id_sequences(256, 64),
    "structured_output": checks.one_of(
        {
            "json_schema": checks.json_text(32768),
            "regex": checks.text(32768),
            "grammar": checks.text(32768),
            "choice": checks.choices(1024, 1024),
        }
    ),
    "stop": checks.strings(64, 1024),
    "stop_token_ids": checks.ids(128),
    "ignore_eos": checks.boolean,
    "include_stop_str_in_output": checks.boolean,
    "skip_special_tokens": checks.boolean,
    "logprobs": checks.integer(0, MAX_LOGPROBS, optional=True),
    "prompt_logprobs": checks.integer(0, MAX_LOGPROBS, optional=True),
    "priority": checks.integer(-100, 100),
    "deadline_ms": checks.integer(1, 24 * 3600 * 1000, optional=True),
    "prefix_cache": checks.boolean,
    "cache_salt": checks.text(256),
}


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


def check_token_ids(name: str, ids: Iterable[int], vocab_size: int) -> None:
    bad = next((token_id for token_id in ids if not 0 <= token_id < vocab_size), None)
    if bad is not None:
        raise ValueError(f"{name} contains {bad}, outside the vocabulary (0 to {vocab_size - 1})")
