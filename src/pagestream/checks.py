"""Checks of user-given values: each returns the value in its one internal form, or raises a
ValueError that names the field, the value and the limit.

Leaf module, used by SamplingParams. Nothing here is specific to a model.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

Check = Callable[[str, Any], Any]


def integer(least: int, most: int | None = None, *, optional: bool = False) -> Check:
    def check(name: str, value: Any) -> int | None:
        if value is None and optional:
            return None
        if isinstance(value, bool) or not isinstance(value, int):
            raise ValueError(f"{name} must be an integer, got {_shown(value)}")
        if value < least or (most is not None and value > most):
            upper = "" if most is None else f" and at most {most}"
            raise ValueError(f"{name} must be at least {least}{upper}, got {_shown(value)}")
        return value

    return check


def real(least: float, most: float, *, optional: bool = False, above_least: bool = False) -> Check:
    """``above_least``: the least value itself is not allowed."""

    def check(name: str, value: Any) -> float | None:
        if value is None and optional:
            return None
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise ValueError(f"{name} must be a number, got {_shown(value)}")
        # NaN compares false, and integers of any size compare exactly.
        if not least <= value <= most or (above_least and value == least):
            lower = f"above {least:g} and at most" if above_least else f"between {least:g} and"
            raise ValueError(f"{name} must be {lower} {most:g}, got {_shown(value)}")
        return float(value)

    return check


def boolean(name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise ValueError(f"{name} must be true or false, got {_shown(value)}")
    return value


def text(most: int) -> Check:
    def check(name: str, value: Any) -> str:
        if not isinstance(value, str) or len(value) > most:
            raise ValueError(
                f"{name} must be a string of at most {most} characters, got {_shown(value)}"
            )
        return value

    return check


def ids(most: int, *, optional: bool = False) -> Check:
    """A tuple of token ids; whether they are in the vocabulary is the model's to say."""

    def check(name: str, value: Any) -> tuple[int, ...] | None:
        if value is None and optional:
            return None
        _sequence(name, value, "token ids", most)
        for item in value:
            if isinstance(item, bool) or not isinstance(item, int):
                raise ValueError(f"{name} must hold integers, got {_shown(item)}")
        return tuple(value)

    return check


def id_sequences(most: int, longest: int) -> Check:
    def check(name: str, value: Any) -> tuple[tuple[int, ...], ...]:
        _sequence(name, value, "lists of token ids", most)
        sequences = tuple(ids(longest)(name, item) for item in value)
        if not all(sequences):
            raise ValueError(f"{name} must not hold an empty list")
        return sequences

    return check


def strings(most: int, longest: int) -> Check:
    """A tuple of non-empty strings; a single string is one of them, and empty ones are none."""

    def check(name: str, value: Any) -> tuple[str, ...]:
        value = [value] if isinstance(value, str) else value
        _sequence(name, value, "strings", most)
        for item in value:
            if not isinstance(item, str):
                raise ValueError(f"{name} must hold strings, got {_shown(item)}")
            if len(item) > longest:
                raise ValueError(
                    f"{name} has a string of {len(item)} characters, above the limit {longest}"
                )
        return tuple(item for item in value if item)

    return check


def biases(most: int, bound: float) -> Check:
    """{token id: number}; the ids may be decimal strings, as JSON's keys are."""
    number = real(-bound, bound)

    def check(name: str, value: Any) -> dict[int, float]:
        if not isinstance(value, Mapping):
            raise ValueError(f"{name} must map token ids to numbers, got {_shown(value)}")
        if len(value) > most:
            raise ValueError(f"{name} has {len(value)} entries, above the limit {most}")
        result = {}
        for key, bias in value.items():
            if isinstance(key, str) and key.isascii() and key.isdigit() and len(key) < 16:
                key = int(key)
            if isinstance(key, bool) or not isinstance(key, int):
                raise ValueError(f"{name} must have token ids as keys, got {_shown(key)}")
            result[key] = number(f"{name}[{key}]", bias)
        return result

    return check


def one_of(limits: Mapping[str, Check]) -> Check:
    """{key: value} with exactly one key of ``limits``, or None."""

    def check(name: str, value: Any) -> dict[str, Any] | None:
        if value is None:
            return None
        keys = ", ".join(limits)
        if not isinstance(value, Mapping) or len(value) != 1 or next(iter(value)) not in limits:
            raise ValueError(
                f"{name} must be an object with one key of {keys}, got {_shown(value)}"
            )
        ((key, inner),) = value.items()
        return {key: limits[key](f"{name}.{key}", inner)}

    return check


def json_text(most: int) -> Check:
    """JSON, as text or as the object itself; its text."""
    plain = text(most)

    def check(name: str, value: Any) -> str:
        try:
            return str(plain(name, value if isinstance(value, str) else json.dumps(value)))
        except (TypeError, RecursionError):
            raise ValueError(f"{name} must be JSON, got {_shown(value)}") from None

    return check


def choices(most: int, longest: int) -> Check:
    several = strings(most, longest)

    def check(name: str, value: Any) -> tuple[str, ...]:
        found: tuple[str, ...] = several(name, value)
        if not found:
            raise ValueError(f"{name} must hold at least one text that is not empty")
        return found

    return check


def _sequence(name: str, value: Any, of: str, most: int) -> None:
    if not isinstance(value, (list, tuple)):
        raise ValueError(f"{name} must be a list of {of}, got {_shown(value)}")
    if len(value) > most:
        raise ValueError(f"{name} has {len(value)} entries, above the limit {most}")


def _shown(value: Any) -> str:
    return f"{value!r:.80}"
