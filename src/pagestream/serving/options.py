"""Reading the options of a request: tensors, request parameters, sampling_parameters JSON.

Turns what each convention allows (numbers as strings, an empty string for no stop words) into one
dict of plainly typed options, and refuses by name what it does not know. Used by Preprocessor.
"""

from __future__ import annotations

import json
from typing import Any

_BOOLS = frozenset({"stream", "ignore_eos", "skip_special_tokens", "return_token_ids"}) | {
    "include_stop_str_in_output"
}
_INTEGERS = frozenset({"max_tokens", "top_k", "seed", "min_tokens"})
_REALS = frozenset({"temperature", "top_p"})
_LISTS = frozenset({"stop_token_ids", "stop", "stop_words"})
_RENAMED = {"stop_words": "stop"}
_KNOWN = _BOOLS | _INTEGERS | _REALS | _LISTS


def parse_options(inputs: dict[str, Any], parameters: dict[str, Any]) -> dict[str, Any]:
    """Merge the three places an option can come from. ValueError for an unknown key, a wrong type
    or an option given twice."""
    options: dict[str, Any] = {}
    sampling_parameters = inputs.get("sampling_parameters")
    sources = (
        ("input", {name: value for name, value in inputs.items() if name in _KNOWN}),
        ("sampling_parameters", parse_object("sampling_parameters", sampling_parameters)),
        ("parameters", {k: v for k, v in parameters.items() if not _reserved(k)}),
    )
    for source, values in sources:
        for name, value in values.items():
            if name not in _KNOWN:
                raise ValueError(
                    f"unknown field {name!r} in {source}; known: {', '.join(sorted(_KNOWN))}"
                )
            field = _RENAMED.get(name, name)
            if field in options:
                raise ValueError(f"{name} is given twice")
            options[field] = _coerce(name, value)
    return options


def parse_messages(text: str) -> list[dict[str, Any]]:
    """A chat as a JSON list of objects with a role and a content, both strings."""
    try:
        messages = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"messages is not valid JSON: {error}") from None
    if not isinstance(messages, list):
        raise ValueError("messages must be a JSON list of objects")
    if not messages:
        raise ValueError("messages is empty: a chat needs at least one message")
    for index, message in enumerate(messages):
        if not isinstance(message, dict):
            raise ValueError(f"messages[{index}] must be an object with role and content")
        for key in ("role", "content"):
            if not isinstance(message.get(key), str):
                raise ValueError(f"messages[{index}].{key} must be a string")
    return messages


def parse_object(name: str, text: str | None) -> dict[str, Any]:
    """A JSON object; None and an empty string are an empty one."""
    if not text:
        return {}
    try:
        values = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{name} is not valid JSON: {error}") from None
    if not isinstance(values, dict):
        raise ValueError(f"{name} must be a JSON object")
    return values


def _reserved(name: str) -> bool:
    """Keys that tritonserver itself puts among the parameters of a request."""
    return name in {"id", "binary_data_output"} or name.startswith("triton_") or is_grpc(name)


def is_grpc(name: str) -> bool:
    """Whether this parameter is a header that the launcher has tritonserver forward from gRPC
    calls (those of HTTP `generate` are never forwarded)."""
    return name.lower() == "user-agent"


def _coerce(name: str, value: Any) -> Any:
    """Load generators send numbers and booleans as strings."""
    if isinstance(value, str) and name not in _LISTS:
        try:
            if name in _BOOLS:
                value = {"true": True, "false": False}[value.lower()]
            else:
                value = int(value) if name in _INTEGERS else float(value)
        except (ValueError, KeyError):
            kind = "true or false" if name in _BOOLS else "a number"
            raise ValueError(f"{name} must be {kind}, got {value!r}") from None
    if name in _BOOLS and not isinstance(value, bool):
        raise ValueError(f"{name} must be true or false, got {value!r}")
    return value
