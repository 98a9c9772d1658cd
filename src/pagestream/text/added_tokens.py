"""The added tokens of a tokenizer as transformers loads it: tokenizer.json's and its config's.

transformers adds what tokenizer_config.json lists or names, and makes the named ones special, on
top of what tokenizer.json says. Used by token_bytes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class AddedToken:
    content: str
    special: bool


def read_added_tokens(
    spec: dict[str, Any], config: dict[str, Any], vocab: dict[str, int]
) -> dict[int, AddedToken]:
    """By id. ``spec``: tokenizer.json; ``config``: tokenizer_config.json; ``vocab``: the model's.

    A token that has no id yet gets the next one; a token once special stays so.
    """
    listed = spec.get("added_tokens", [])
    added = {token["id"]: AddedToken(token["content"], token["special"]) for token in listed}
    ids = vocab | {token.content: token_id for token_id, token in added.items()}
    next_id = max(ids.values(), default=-1) + 1
    for token in _from_config(config):
        token_id = ids.setdefault(token.content, next_id)
        next_id = max(next_id, token_id + 1)
        known = added.get(token_id)
        added[token_id] = AddedToken(
            token.content, token.special or (known is not None and known.special)
        )
    return added


def _from_config(config: dict[str, Any]) -> Iterator[AddedToken]:
    decoder = config.get("added_tokens_decoder") or {}
    for _, token in sorted(decoder.items(), key=lambda item: int(item[0])):
        yield AddedToken(token["content"], token.get("special", False))
    extra = config.get("extra_special_tokens") or config.get("additional_special_tokens") or []
    named = [value for name, value in config.items() if name.endswith("_token")]
    named += extra.values() if isinstance(extra, dict) else extra
    for value in named:
        content = value.get("content") if isinstance(value, dict) else value
        # add_bos_token and its like are switches.
        if isinstance(content, str) and content:
            yield AddedToken(content, special=True)
