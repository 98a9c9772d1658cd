"""ChatOptions: how a chat is rendered, beside its messages."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class ChatOptions:
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
