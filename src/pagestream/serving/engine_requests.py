"""What may be sent to the engine model, decoded and refused: the authoritative gate.

``engine`` is a public model, so nothing from preprocessing is trusted here: one token id out of
range would be a device fault for everyone. Used by EngineBridge.
"""

from __future__ import annotations

import secrets
import time
from dataclasses import dataclass
from typing import Any

from pagestream.sampling_params import TEXT_FIELDS, Limits, SamplingParams, validate_prompt
from pagestream.serving.options import parse_object

_COMMANDS = ("stop", "drain", "stats")
_MAX_KEY_CHARS = 256


@dataclass(frozen=True, slots=True)
class Submission:
    """One generation request; ``text_params`` is carried to postprocessing unread."""

    request_key: str
    prompt_token_ids: list[int]
    sampling_params: SamplingParams
    text_params: str | None
    stream: bool
    arrival_time_ns: int
    """time.monotonic_ns() at preprocessing."""


@dataclass(frozen=True, slots=True)
class Control:
    """``index`` -1 means all; ``secret`` authorises drain and stats."""

    command: str
    request_key: str = ""
    index: int = -1
    secret: str = ""


def parse_request(inputs: dict[str, Any], limits: Limits) -> Submission | Control:
    """ValueError names the field, the value and the limit."""
    if "control" in inputs:
        return _parse_control(inputs["control"])
    if "prompt_token_ids" not in inputs:
        raise ValueError("prompt_token_ids is required")
    prompt_token_ids = inputs["prompt_token_ids"]
    validate_prompt(prompt_token_ids, limits)
    values = parse_object("sampling_params", inputs.get("sampling_params"))
    stream = values.pop("stream", False)
    if not isinstance(stream, bool):
        raise ValueError(f"sampling_params.stream must be true or false, got {stream!r}")
    now = time.monotonic_ns()
    arrival_time_ns = values.pop("arrival_time_ns", now)
    if isinstance(arrival_time_ns, bool) or not isinstance(arrival_time_ns, int):
        raise ValueError(f"arrival_time_ns must be an integer, got {arrival_time_ns!r}")
    if not 0 <= arrival_time_ns <= now:
        raise ValueError(f"arrival_time_ns must be between 0 and {now}, got {arrival_time_ns}")
    text_fields = sorted(TEXT_FIELDS & values.keys())
    if text_fields:
        raise ValueError(
            f"sampling_params.{text_fields[0]} is about text, and the engine model answers with "
            f"token ids only; send the request to an ensemble"
        )
    params = SamplingParams.from_dict(values)
    params.validate(limits)
    request_key = inputs.get("request_key") or secrets.token_hex(16)
    if len(request_key) > _MAX_KEY_CHARS:
        raise ValueError(
            f"request_key has {len(request_key)} characters, above the limit {_MAX_KEY_CHARS}"
        )
    return Submission(
        request_key,
        prompt_token_ids,
        params,
        inputs.get("text_params"),
        stream,
        arrival_time_ns,
    )


def _parse_control(text: str) -> Control:
    values = parse_object("control", text)
    command = values.get("command")
    if command not in _COMMANDS:
        raise ValueError(f"control.command must be one of {', '.join(_COMMANDS)}, got {command!r}")
    unknown = sorted(set(values) - {"command", "request_key", "index", "secret"})
    if unknown:
        raise ValueError(f"control has unknown keys: {', '.join(unknown)}")
    request_key, secret = values.get("request_key", ""), values.get("secret", "")
    if not isinstance(request_key, str) or not isinstance(secret, str):
        raise ValueError("control.request_key and control.secret must be strings")
    index = values.get("index", -1)
    if isinstance(index, bool) or not isinstance(index, int):
        raise ValueError(f"control.index must be an integer, got {index!r}")
    if command == "stop" and not request_key:
        raise ValueError("control.request_key is required to stop a request")
    return Control(command, request_key, index, secret)
