"""TokenBytes: the bytes that each token id stands for, read from the tokenizer's files.

Byte-level vocabularies spell bytes as printable characters; metaspace ones spell a space as a
lower block and, with byte fallback, raw bytes as <0xNN>. All become bytes, so that one UTF-8
decoder serves all and a character may be split over any tokens. What a decoder does to the start
of a text, and transformers to all of it, are fields that StreamDecoder follows. Reads files rather
than a loaded tokenizer because postprocessing does without transformers, which is slow to import.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pagestream.text.added_tokens import read_added_tokens

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


@dataclass(frozen=True)
class TokenBytes:
    table: list[bytes]
    """By id; empty for an id that the tokenizer does not name."""
    special_ids: frozenset[int]
    num_stripped: int = 0
    """Spaces that are taken off the start of a text, if it has them (a Strip decoder)."""
    joins_first: bool = False
    """The first token of a text loses its spaces (a Metaspace decoder)."""
    spaced_ids: frozenset[int] = frozenset()
    """Ids whose pieces have spaces of their own, which are never lost."""
    cleans_up: bool = False
    """transformers removes spaces before punctuation (clean_up_tokenization_spaces)."""

    @property
    def longest(self) -> int:
        return max(map(len, self.table))

    def bytes_of(self, token_id: int) -> bytes:
        """Empty for ids outside the vocabulary too; models may have more rows than tokens."""
        return self.table[token_id] if 0 <= token_id < len(self.table) else b""

    def joined_bytes_of(self, token_id: int) -> bytes:
        """The same without the spaces that were lower blocks."""
        data = self.bytes_of(token_id)
        return data if token_id in self.spaced_ids else data.replace(b" ", b"")

    def text(self, token_id: int) -> str:
        """The id's own bytes, with replacement characters where they are not whole characters."""
        return self.bytes_of(token_id).decode("utf-8", errors="replace")

    def begins_character(self, token_id: int) -> bool:
        """Whether the id's bytes start on a character boundary, whatever came before."""
        data = self.bytes_of(token_id)
        return bool(data) and data[0] & 0xC0 != 0x80 and not (len(data) == 1 and data[0] >= 0x80)


def read_token_bytes(tokenizer_json: Path) -> TokenBytes:
    """From tokenizer.json and, where it is beside it, tokenizer_config.json.

    ValueError for a decoder whose text is not a concatenation of its tokens' bytes.
    """
    spec = json.loads(tokenizer_json.read_text(encoding="utf-8"))
    config = _read_config(tokenizer_json.parent)
    decoder = _Decoder.of(spec.get("decoder"))
    pieces = _vocabulary(spec["model"])
    added = read_added_tokens(spec, config, {piece: i for i, piece in pieces.items()})
    pieces |= {token_id: token.content for token_id, token in added.items()}
    table = [b""] * (max(pieces) + 1)
    for token_id, piece in pieces.items():
        table[token_id] = decoder.bytes_of(piece)
    return TokenBytes(
        table=table,
        special_ids=frozenset(i for i, token in added.items() if token.special),
        num_stripped=decoder.num_stripped,
        joins_first=decoder.joins_first,
        spaced_ids=frozenset(i for i, piece in pieces.items() if " " in piece),
        cleans_up=_cleans_up(spec["model"], config),
    )


def _read_config(directory: Path) -> dict[str, Any]:
    """tokenizer_config.json; before that listed the added tokens, the special ones had a file."""
    config = _read_object(directory / "tokenizer_config.json")
    if "added_tokens_decoder" not in config:
        config |= _read_object(directory / "special_tokens_map.json")
    return config


def _read_object(path: Path) -> dict[str, Any]:
    value = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    return value if isinstance(value, dict) else {}


def _vocabulary(model: dict[str, Any]) -> dict[int, str]:
    """Pieces by id; a Unigram vocabulary is a list, in which several ids may have one piece."""
    vocab = model["vocab"]
    if isinstance(vocab, dict):
        return {token_id: piece for piece, token_id in vocab.items()}
    return {token_id: piece for token_id, (piece, _score) in enumerate(vocab)}


def _cleans_up(model: dict[str, Any], config: dict[str, Any]) -> bool:
    """transformers heeds the setting for BPE only if a second one insists."""
    insists = "clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output"
    applies = "merges" not in model or config.get(insists, False)
    return bool(config.get("clean_up_tokenization_spaces", False) and applies)


@dataclass
class _Decoder:
    """What tokenizer.json's decoder does to a piece and to the start of a text."""

    edits: list[Callable[[str], str]]
    encode: Callable[[str], bytes] = str.encode
    num_stripped: int = 0
    joins_first: bool = False

    @classmethod
    def of(cls, spec: dict[str, Any] | None) -> _Decoder:
        decoder = cls([])
        steps = _steps(spec)
        supported = [decoder._add(step) for step in steps]
        if not supported or not all(supported):
            names = sorted({step["type"] for step in steps})
            raise ValueError(f"tokenizer decoder {names} is not supported")
        return decoder

    def bytes_of(self, piece: str) -> bytes:
        for edit in self.edits:
            piece = edit(piece)
        return self.encode(piece)

    def _add(self, step: dict[str, Any]) -> bool:
        """False for a step that no concatenation of tokens can follow."""
        kind = step["type"]
        if kind == "ByteLevel":
            self.encode = _byte_level
        elif kind == "ByteFallback":
            self.encode = _byte_fallback
        elif kind == "Metaspace":
            self.edits.append(lambda piece: piece.replace(step["replacement"], " "))
            self.joins_first = step.get("prepend_scheme", "always") != "never"
        elif kind == "Replace" and "String" in step["pattern"]:
            old, new = step["pattern"]["String"], step["content"]
            self.edits.append(lambda piece: piece.replace(old, new))
        elif kind == "Strip" and step["content"] == " " and step["stop"] == 0:
            self.num_stripped = step["start"]
        elif kind != "Fuse":
            return False
        return True


def _steps(decoder: dict[str, Any] | None) -> list[dict[str, Any]]:
    if decoder is None:
        return []
    if decoder["type"] == "Sequence":
        return [step for part in decoder["decoders"] for step in _steps(part)]
    return [decoder]


def _byte_level(piece: str) -> bytes:
    """A piece with any character outside the byte alphabet stands for itself, as a whole."""
    try:
        return bytes(_BYTE_OF[char] for char in piece)
    except KeyError:
        return piece.encode()


def _byte_fallback(piece: str) -> bytes:
    match = _BYTE_TOKEN.fullmatch(piece)
    return bytes([int(match[1], 16)]) if match else piece.encode()


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's: printable Latin-1 bytes stand for themselves, the rest follow from U+0100."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(0x100) if byte not in set(printable)]
    alphabet = {chr(byte): byte for byte in printable}
    alphabet.update({chr(0x100 + index): byte for index, byte in enumerate(others)})
    return alphabet


_BYTE_OF = _byte_alphabet()
