"""SpecialTokenGuard: text from users that spells a special token stays text.

A user who may write <|im_end|> can end their turn and speak as the system. So before a template is
rendered, what spells a special token is hidden behind numbers that cannot be guessed; afterwards
every special token in the rendered text is the template's own. The text between them is then
encoded, with the numbers replaced, by a copy of the tokenizer that knows no special tokens. Used by
Tokenizer, only for chats that need it: all others are encoded as transformers does.
"""

from __future__ import annotations

import json
import re
import secrets
from functools import cached_property
from typing import Any

import tokenizers

_NUM_DIGITS = 24
"""Digits, because templates may change the case of letters."""


class SpecialTokenGuard:
    """``tokenizer``: transformers', a fast one."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        special = {
            token_id: token
            for token_id, token in tokenizer.added_tokens_decoder.items()
            if token.special and token.content
        }
        self._contents = {token_id: token.content for token_id, token in special.items()}
        contents = sorted(self._contents.values(), key=len, reverse=True)
        self._spelled = re.compile("|".join(map(re.escape, contents)) or r"(?!)")
        self._begun = {text[:length] for text in contents for length in range(1, len(text))}
        self._longest = max(map(len, contents), default=0)
        backend = tokenizer.backend_tokenizer
        # Tokens that are looked for after normalization may be spelled in other characters.
        normalized = any(token.normalized for token in special.values())
        self._normalizer = backend.normalizer if normalized else None

    def hide(self, value: Any, hidden: dict[str, str]) -> Any:
        """A copy of JSON-like ``value`` that spells no special token; ``hidden`` gains what each
        number stands for."""
        if isinstance(value, str):
            return self._hide_text(value, hidden)
        if isinstance(value, dict):
            return {self.hide(key, hidden): self.hide(item, hidden) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [self.hide(item, hidden) for item in value]
        return value

    def encode(self, text: str, hidden: dict[str, str]) -> list[int]:
        """The ids of a rendered text: special tokens where it spells them, not where they hide."""
        encoded = self._tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        ids: list[int] = []
        done = 0
        for token_id, (start, end) in zip(encoded.input_ids, encoded.offset_mapping, strict=True):
            if self._is_spelled(token_id, text[start:end]):
                ids += self._encode_plain(text[done:start], hidden, is_first=done == 0)
                ids.append(token_id)
                done = end
        return ids + self._encode_plain(text[done:], hidden, is_first=done == 0)

    def encode_inside(self, text: str) -> list[int]:
        """The ids of a text that goes on with another: with no space put before it."""
        return list(self._inner_copy.encode(text, add_special_tokens=False).ids)

    def _is_spelled(self, token_id: int, text: str) -> bool:
        """Whether the id is a special token that the text spells: unknown characters become <unk>
        without spelling it."""
        if token_id not in self._contents:
            return False
        is_unknown = token_id == self._tokenizer.unk_token_id
        return not is_unknown or text.strip() == self._contents[token_id]

    def _hide_text(self, text: str, hidden: dict[str, str]) -> str:
        def number(match: re.Match[str]) -> str:
            return _hide(match[0], hidden)

        shown = self._spelled.sub(number, text)
        if self._normalizer and self._spelled.search(self._normalizer.normalize_str(shown)):
            return _hide(text, hidden)
        # A template may join two texts, and so what one begins and the other ends.
        for length in range(min(self._longest - 1, len(shown)), 0, -1):
            if shown[-length:] in self._begun:
                return shown[:-length] + _hide(shown[-length:], hidden)
        return shown

    def _encode_plain(self, text: str, hidden: dict[str, str], *, is_first: bool) -> list[int]:
        if not text:
            return []
        for number, original in hidden.items():
            text = text.replace(number, original)
        return self._encode_without_special(
            text, self._first_copy if is_first else self._later_copy
        )

    def _encode_without_special(self, text: str, copy: tokenizers.Tokenizer) -> list[int]:
        encoding = copy.encode(text, add_special_tokens=False)
        for token_id, (start, end) in zip(encoding.ids, encoding.offsets, strict=True):
            if self._is_spelled(token_id, text[start:end]) and end > start + 1:
                # An ordinary piece of some vocabularies too: only its parts may be used.
                parts = (text[: start + 1], copy), (text[start + 1 :], self._inner_copy)
                return [i for part in parts for i in self._encode_without_special(*part)]
        return list(encoding.ids)

    @cached_property
    def _first_copy(self) -> tokenizers.Tokenizer:
        return _without_special(self._tokenizer.backend_tokenizer.to_str())

    @cached_property
    def _later_copy(self) -> tokenizers.Tokenizer:
        """For what follows a special token: some put a space before a whole text only."""
        spec = json.loads(self._tokenizer.backend_tokenizer.to_str())
        _never_prepend(spec, schemes={"first"})
        return _without_special(json.dumps(spec))

    @cached_property
    def _inner_copy(self) -> tokenizers.Tokenizer:
        """For what goes on with a text, which has no space before it."""
        spec = json.loads(self._tokenizer.backend_tokenizer.to_str())
        _never_prepend(spec, schemes={"first", "always"})
        normalizer = spec["normalizer"] or {}
        if normalizer.get("type") == "Prepend":
            spec["normalizer"] = None
        elif normalizer.get("type") == "Sequence":
            steps = normalizer["normalizers"]
            normalizer["normalizers"] = [step for step in steps if step["type"] != "Prepend"]
        return _without_special(json.dumps(spec))


def _hide(text: str, hidden: dict[str, str]) -> str:
    number = str(secrets.randbelow(9 * 10**_NUM_DIGITS) + 10**_NUM_DIGITS)
    hidden[number] = text
    return number


def _without_special(spec: str) -> tokenizers.Tokenizer:
    copy = tokenizers.Tokenizer.from_str(spec)
    copy.encode_special_tokens = True
    copy.no_truncation()
    copy.no_padding()
    return copy


def _never_prepend(spec: dict[str, Any], schemes: set[str]) -> None:
    pre_tokenizer = spec["pre_tokenizer"] or {}
    for part in pre_tokenizer.get("pretokenizers", [pre_tokenizer]):
        if part.get("type") == "Metaspace" and part["prepend_scheme"] in schemes:
            part["prepend_scheme"] = "never"
