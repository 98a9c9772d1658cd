"""Reading the options of a request: tensors, request parameters, sampling_parameters JSON.

Turns what each convention allows (numbers as strings, an empty string for no stop words) into one
dict of plainly typed options, and refuses by name what it does not know. Used by Preprocessor.
"""

from __future__ import annotations

import json
from typing import Any

from pagestream.serving.tensor_specs import OPTIONS

_RENAMED = {"stop_words": "stop"}
_JSON_ONLY = {"stop": "LIST", "bad_words_token_ids": "LIST"}
_KINDS = {
    **{name: "LIST" if spec.many else spec.datatype for name, spec in OPTIONS.items()},
    **_JSON_ONLY,
}
"""Every option's kind, whichever way it comes."""


def parse_options(inputs: dict[str, Any], parameters: dict[str, Any]) -> dict[str, Any]:
    """Merge the three places an option can come from. ValueError for an unknown key, a wrong type
    or an option given twice."""
    options: dict[str, Any] = {}
    sampling_parameters = inputs.get("sampling_parameters")
    sources = (
        ("input", {name: value for name, value in inputs.items() if name in OPTIONS}),
        ("sampling_parameters", parse_object("sampling_parameters", sampling_parameters)),
        ("parameters", {k: v for k, v in parameters.items() if not _reserved(k)}),
    )
    for source, values in sources:
        for name, value in values.items():
            if name not in _KINDS:
                raise ValueError(
                    f"unknown field {name!r} in {source}; known: {', '.join(sorted(_KINDS))}"
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


def is_grpc(name: str) -> bool:
    """Whether this parameter is a header that the launcher has tritonserver forward from gRPC
    calls (those of HTTP `generate` are never forwarded)."""
    return name.lower() == "user-agent"


def _reserved(name: str) -> bool:
    """Keys that tritonserver itself puts among the parameters of a request."""
    return name in {"id", "binary_data_output"} or name.startswith("triton_") or is_grpc(name)


def _coerce(name: str, value: Any) -> Any:
    """Load generators send numbers and booleans as strings; tensors carry objects as JSON."""
    kind = _KINDS[name]
    if isinstance(value, str):
        if kind == "BOOL":
            value = _boolean(name, value)
        elif kind in ("INT32", "UINT64", "FP32"):
            value = _number(name, value, float if kind == "FP32" else int)
        elif name in ("logit_bias", "structured_output"):
            value = parse_object(name, value)
    return value


def _boolean(name: str, text: str) -> bool:
    try:
        return {"true": True, "false": False}[text.lower()]
    except KeyError:
        raise ValueError(f"{name} must be true or false, got {text!r:.80}") from None


def _number(name: str, text: str, kind: type[int] | type[float]) -> float:
    try:
        return kind(text)
    except ValueError:
        raise ValueError(f"{name} must be a number, got {text!r:.80}") from None
