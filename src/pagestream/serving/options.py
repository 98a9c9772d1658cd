"""Reading the options of a request: tensors, request parameters, sampling_parameters JSON.

Turns what each convention allows (numbers as strings, an empty string for no stop words) into one
dict of plainly typed options, and refuses by name what it does not know. Used by Preprocessor.
"""

from __future__ import annotations

import difflib
import json
from typing import Any

from pagestream.serving.conventions import JSON_OPTIONS, KNOWN, SYNONYMS
from pagestream.serving.tensor_specs import OPTIONS, PROMPTS

_KINDS = {
    **{name: "LIST" if spec.many else spec.datatype for name, spec in OPTIONS.items()},
    **JSON_OPTIONS,
    **dict.fromkeys(("logit_bias", "structured_output", "chat_template_kwargs"), "OBJECT"),
    "tools": "OBJECTS",
}
"""Every option's kind, whichever way it comes; objects come as JSON text or inside other JSON."""


def parse_options(
    convention: str, inputs: dict[str, Any], parameters: dict[str, Any]
) -> dict[str, Any]:
    """Merge the three places an option can come from. ValueError for an unknown key, a wrong type
    or an option given twice."""
    options: dict[str, Any] = {}
    names: dict[str, str] = {}
    tensors = {name: value for name, value in inputs.items() if name not in PROMPTS}
    sampling_parameters = tensors.pop("sampling_parameters", None)
    sources = (
        ("input", tensors),
        ("sampling_parameters", parse_object("sampling_parameters", sampling_parameters)),
        ("parameters", {k: v for k, v in parameters.items() if not _reserved(k)}),
    )
    for source, values in sources:
        for name, value in values.items():
            if name not in KNOWN[convention] or name in PROMPTS or name == "sampling_parameters":
                raise ValueError(_unknown(name, source, convention))
            coerced = _coerce(name, value)
            if coerced is None:
                continue
            field = SYNONYMS.get(name, name)
            if field in options:
                same = name == names[field]
                raise ValueError(
                    f"{name} is given twice" if same else f"{name} and {names[field]} are the same"
                )
            names[field] = name
            options[field] = coerced
    return options


def parse_messages(text: str) -> list[dict[str, Any]]:
    """A chat as a JSON list of objects with a role; the content is chat.py's to judge."""
    messages = parse_objects("messages", text)
    if not messages:
        raise ValueError("messages is empty: a chat needs at least one message")
    return messages


def parse_objects(name: str, text: str) -> list[dict[str, Any]]:
    """A JSON list of objects; an empty string is an empty one."""
    values = _parse_json(name, text) if text else []
    if not isinstance(values, list):
        raise ValueError(f"{name} must be a JSON list of objects")
    for index, value in enumerate(values):
        if not isinstance(value, dict):
            raise ValueError(f"{name}[{index}] must be an object, got {value!r:.80}")
    return values


def parse_object(name: str, text: str | None) -> dict[str, Any]:
    """A JSON object; None and an empty string are an empty one."""
    values = _parse_json(name, text) if text else {}
    if not isinstance(values, dict):
        raise ValueError(f"{name} must be a JSON object")
    return values


def _parse_json(name: str, text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{name} is not valid JSON: {error}") from None


def _unknown(name: str, source: str, convention: str) -> str:
    known = sorted(KNOWN[convention] - PROMPTS.keys())
    close = difflib.get_close_matches(name, known, n=1)
    hint = f"did you mean {close[0]!r}?" if close else f"known: {', '.join(known)}"
    return f"unknown field {name!r:.80} in {source}; {hint}"


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
        elif kind == "OBJECT":
            value = parse_object(name, value) if value else None
        elif kind == "OBJECTS":
            value = parse_objects(name, value) if value else None
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
