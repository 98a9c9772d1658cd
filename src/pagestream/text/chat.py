"""ChatTemplate: a chat's messages -> the prompt's text, by the model's own template.

The rendering is transformers' (a sandboxed Jinja environment). This file checks what a template
would stumble over, so that a client learns which field is wrong rather than which expression of the
template failed. Knows no tokens and no requests. Used by Tokenizer.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

_PROBE = "a1b2c3"


@dataclass(frozen=True, slots=True)
class ChatOptions:
    """How a chat is rendered, beside its messages."""

    tools: list[dict[str, Any]] = field(default_factory=list)
    """Passed to the template as it is."""
    add_generation_prompt: bool | None = None
    """None: on, unless the final message is continued."""
    continue_final_message: bool = False
    """Go on with the last message rather than answer it."""
    chat_template_kwargs: dict[str, Any] = field(default_factory=dict)
    """More variables of the template."""
    parse_special_tokens: bool = False
    """Let text that spells a special token become that token."""


class ChatTemplate:
    """``tokenizer``: transformers'."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        parameters = inspect.signature(tokenizer.apply_chat_template).parameters
        self._reserved = parameters.keys() - {"documents", "kwargs"} | {"messages"}

    def check(self, messages: Sequence[Mapping[str, Any]], options: ChatOptions) -> None:
        """ValueError naming the field, for what no template could render."""
        if not self._tokenizer.chat_template:
            raise ValueError("messages: this model has no chat template; send text_input")
        for index, message in enumerate(messages):
            _check_message(f"messages[{index}]", message)
        if options.continue_final_message and options.add_generation_prompt:
            raise ValueError(
                "add_generation_prompt and continue_final_message exclude each other: one begins "
                "a new message, the other goes on with the last"
            )
        for name in options.chat_template_kwargs:
            if name in self._reserved:
                raise ValueError(f"chat_template_kwargs may not set {name!r}")

    def render(self, messages: Sequence[Mapping[str, Any]], options: ChatOptions) -> str:
        """ValueError carrying the template's own words when it refuses the messages."""
        add_generation_prompt = options.add_generation_prompt
        if add_generation_prompt is None:
            add_generation_prompt = not options.continue_final_message
        prepared = [_with_parsed_arguments(message) for message in messages]
        if not self._takes_parts:
            prepared = [_with_joined_parts(message) for message in prepared]
        try:
            return str(
                self._tokenizer.apply_chat_template(
                    prepared,
                    tools=options.tools or None,
                    add_generation_prompt=add_generation_prompt,
                    continue_final_message=options.continue_final_message,
                    tokenize=False,
                    **options.chat_template_kwargs,
                )
            )
        except Exception as error:  # jinja raises whatever the template's expressions raise
            raise ValueError(f"messages: the chat template refused them: {error}") from error

    @cached_property
    def _takes_parts(self) -> bool:
        """Whether the template renders content that is a list of parts, found by trying."""
        content = [{"type": "text", "text": _PROBE}]
        try:
            text = self._tokenizer.apply_chat_template(
                [{"role": "user", "content": content}], tokenize=False
            )
        except Exception:  # any error of any expression says no
            return False
        return _PROBE in text and "'text'" not in text


def _check_message(name: str, message: Mapping[str, Any]) -> None:
    role = message.get("role")
    if not isinstance(role, str) or not role:
        raise ValueError(f"{name}.role must be a string such as 'user', got {role!r:.80}")
    content = message.get("content")
    if content is None:
        if not message.get("tool_calls"):
            raise ValueError(f"{name}.content is required, as a string or a list of text parts")
    elif isinstance(content, list):
        for index, part in enumerate(content):
            _check_part(f"{name}.content[{index}]", part)
    elif not isinstance(content, str):
        raise ValueError(
            f"{name}.content must be a string or a list of text parts, got {content!r:.80}"
        )


def _check_part(name: str, part: Any) -> None:
    if not isinstance(part, dict) or part.get("type") != "text":
        kind = part.get("type") if isinstance(part, dict) else part
        raise ValueError(f"{name}.type must be 'text', this model takes no other, got {kind!r:.80}")
    if not isinstance(part.get("text"), str):
        raise ValueError(f"{name}.text must be a string, got {part.get('text')!r:.80}")


def _with_joined_parts(message: Mapping[str, Any]) -> Mapping[str, Any]:
    content = message.get("content")
    if not isinstance(content, list):
        return message
    return {**message, "content": "\n".join(part["text"] for part in content)}


def _with_parsed_arguments(message: Mapping[str, Any]) -> Mapping[str, Any]:
    """Templates expect a call's arguments as an object; OpenAI's clients send it as JSON text."""
    calls = message.get("tool_calls")
    if not isinstance(calls, list):
        return message
    return {**message, "tool_calls": [_parsed_call(call) for call in calls]}


def _parsed_call(call: Any) -> Any:
    function = call.get("function") if isinstance(call, dict) else None
    arguments = function.get("arguments") if isinstance(function, dict) else None
    if not isinstance(arguments, str):
        return call
    try:
        parsed = json.loads(arguments)
    except ValueError:
        return call  # a model may have written it
    return {**call, "function": {**function, "arguments": parsed}} if function else call
