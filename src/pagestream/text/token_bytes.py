"""TokenBytes: the bytes that each token id stands for, read from tokenizer.json.

Byte-level vocabularies spell bytes as printable characters; metaspace ones spell a space as a
lower block and raw bytes as <0xNN>. Both become bytes, so that one UTF-8 decoder serves both and a
character may be split over any tokens. Used by StreamDecoder.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


@dataclass(frozen=True)
class TokenBytes:
    table: list[bytes]
    """By id; empty for an id that the tokenizer does not name."""
    special_ids: frozenset[int]
    strips_first_space: bool
    """The decoder drops one leading space of a whole text (metaspace vocabularies)."""

    @property
    def longest(self) -> int:
        return max(map(len, self.table))

    def text(self, token_id: int) -> str:
        """The id's own bytes, with replacement characters where they are not whole characters."""
        return self.table[token_id].decode("utf-8", errors="replace")

    def begins_character(self, token_id: int) -> bool:
        """Whether the id's bytes start on a character boundary, whatever came before."""
        if not 0 <= token_id < len(self.table):
            return False
        data = self.table[token_id]
        return bool(data) and data[0] & 0xC0 != 0x80 and not (len(data) == 1 and data[0] >= 0x80)


def read_token_bytes(tokenizer_json: Path) -> TokenBytes:
    """ValueError for a decoder whose text is not a concatenation of its tokens' bytes."""
    spec = json.loads(tokenizer_json.read_text(encoding="utf-8"))
    vocab = _vocabulary(spec["model"])
    added = {token["id"]: token for token in spec.get("added_tokens", [])}
    kinds = _decoder_steps(spec.get("decoder"))
    names = {step["type"] for step in kinds}
    byte_level = "ByteLevel" in names
    metaspace = "Metaspace" in names or any(_replaces_metaspace(step) for step in kinds)
    if not byte_level and not metaspace:
        raise ValueError(f"tokenizer decoder {sorted(names)} is not supported")
    size = max([*vocab, *added]) + 1
    table = [b""] * size
    for token_id, piece in vocab.items():
        table[token_id] = _byte_level(piece) if byte_level else _metaspace(piece, names)
    for token_id, token in added.items():
        content = token["content"]
        table[token_id] = _byte_level(content) if byte_level else _metaspace(content, names)
    return TokenBytes(
        table=table,
        special_ids=frozenset(i for i, token in added.items() if token["special"]),
        strips_first_space=not byte_level and _strips(kinds),
    )


def _vocabulary(model: dict[str, Any]) -> dict[int, str]:
    """By id; in a unigram vocabulary several ids may have the same piece."""
    vocab = model["vocab"]
    if isinstance(vocab, dict):
        return {token_id: piece for piece, token_id in vocab.items()}
    return {index: piece for index, (piece, _score) in enumerate(vocab)}


def _decoder_steps(decoder: dict[str, Any] | None) -> list[dict[str, Any]]:
    if decoder is None:
        return []
    if decoder["type"] == "Sequence":
        return [step for part in decoder["decoders"] for step in _decoder_steps(part)]
    return [decoder]


def _replaces_metaspace(step: dict[str, Any]) -> bool:
    return bool(step["type"] == "Replace" and step["pattern"].get("String") == "\u2581")


def _strips(steps: list[dict[str, Any]]) -> bool:
    return any(
        (step["type"] == "Strip" and step.get("start", 0) > 0)
        or (step["type"] == "Metaspace" and step.get("prepend_scheme", "always") != "never")
        for step in steps
    )


def _byte_level(piece: str) -> bytes:
    """A piece with any character outside the byte alphabet stands for itself, as a whole."""
    try:
        return bytes(_BYTE_OF[char] for char in piece)
    except KeyError:
        return piece.encode()


def _metaspace(piece: str, names: set[str]) -> bytes:
    match = _BYTE_TOKEN.fullmatch(piece)
    if match and "ByteFallback" in names:
        return bytes([int(match[1], 16)])
    return piece.replace("\u2581", " ").encode()


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's: printable Latin-1 bytes stand for themselves, the rest follow from U+0100."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(0x100) if byte not in set(printable)]
    alphabet = {chr(byte): byte for byte in printable}
    alphabet.update({chr(0x100 + index): byte for index, byte in enumerate(others)})
    return alphabet


_BYTE_OF = _byte_alphabet()
