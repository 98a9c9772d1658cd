"""Script model: a tiny Llama checkpoint that says, token by token, what a test has written.

Attention and MLP add nothing, embeddings are one-hot, and column t of the head holds the logits of
whatever may follow token t: greedy decoding walks a chain, and a chain is entered by the last
token of the prompt. The next token depends on the last one only, so every place of every chain has
a token id of its own; that is possible for any text because the vocabulary is a unigram one, a
list, in which several ids may have the same piece. A token that no chain leads on from ends the
answer. Used by the tests of served text; it knows no server.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import (
    AddedToken,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
)

BYTE_LEVEL = "byte_level"
"""As GPT-2, Llama 3, Qwen, SmolLM2: pieces are bytes, spelled as printable characters."""
METASPACE = "metaspace"
"""As Llama 2, Mistral: a space is part of the piece after it, other characters fall back to bytes,
the decoder drops the first space of a text, and transformers cleans up spaces."""

BOS, EOS, TURN_END = "<s>", "</s>", "<|im_end|>"
"""EOS and TURN_END end an answer: the one by the tokenizer, the other by generation_config."""
SPECIAL = (BOS, EOS, TURN_END, "<|im_start|>", "<|mark|>", "<tool>", "</tool>")
PLAIN_ADDED = ("<think>", "</think>")
"""Added tokens that are not special: skip_special_tokens leaves them in the text."""
CERTAIN = 30.0
"""Logit of the one token that follows; those not written have 0."""
_MAX_POSITIONS = 8192

Piece = str | bytes
"""The text of one token (a special token's is that token), or its bytes: any in a byte-level
vocabulary, a single one in a metaspace one."""
Step = Piece | Mapping[Piece, float]
"""One token, or several with a logit each: all lead on to the next step, except that special
tokens among several lead nowhere."""


class Script:
    """Chains to be written into one checkpoint; ValueError for what it could not say."""

    def __init__(self, family: str) -> None:
        self._family = family
        self._pieces = ["<unk>", *SPECIAL, *PLAIN_ADDED]
        self._added = {text: i for i, text in enumerate(self._pieces) if i}
        self._pieces += [_spelled(family, bytes([byte])) for byte in range(256)]
        self._num_base = len(self._pieces)
        self._logits: dict[int, dict[int, float]] = {}
        self._entries: dict[str, int] = {}
        self._chains: dict[str, list[list[int]]] = {}

    def chain(self, name: str, *steps: Step, loop: bool = False) -> None:
        """What the model says after a prompt that ends with ``#name``; then EOS, or (``loop``) the
        same again for ever."""
        entry = self._new_id(f"#{name}")
        alternatives = [self._alternatives(step) for step in steps]
        following = [*alternatives[1:], alternatives[0] if loop else {}]
        self._lead(entry, alternatives[0])
        for step, current, then in zip(steps, alternatives, following, strict=True):
            for token_id in current:
                if then and not (isinstance(step, Mapping) and token_id < self._num_base):
                    self._lead(token_id, then)
        self._entries[name] = entry
        self._chains[name] = [list(step) for step in alternatives]

    def write(self, directory: Path, *, chat_template: str) -> ScriptModel:
        """Make the checkpoint. Its prompts begin with BOS."""
        _write_tokenizer(directory, self._family, self._pieces, self._added, chat_template)
        _write_model(directory, self._head(), self._added)
        return ScriptModel(directory, self._family, self._entries, self._chains)

    def _alternatives(self, step: Step) -> dict[int, float]:
        logits = step if isinstance(step, Mapping) else {step: CERTAIN}
        return {self._id(piece): logit for piece, logit in logits.items()}

    def _id(self, piece: Piece) -> int:
        if isinstance(piece, str) and piece in self._added:
            return self._added[piece]
        return self._new_id(piece)

    def _new_id(self, piece: Piece) -> int:
        self._pieces.append(_spelled(self._family, piece))
        return len(self._pieces) - 1

    def _lead(self, token_id: int, following: dict[int, float]) -> None:
        if token_id in self._logits:
            raise ValueError(f"{self._pieces[token_id]!r} leads on to two different steps")
        self._logits[token_id] = following

    def _head(self) -> torch.Tensor:
        size = len(self._pieces)
        logits = torch.zeros(size, size)
        for token_id in range(size):
            following = self._logits.get(token_id, {self._added[EOS]: CERTAIN})
            for successor, logit in following.items():
                logits[successor, token_id] = logit
        return logits


@dataclass(frozen=True)
class ScriptModel:
    """A written checkpoint, and what it will say."""

    directory: Path
    family: str
    entries: dict[str, int]
    chains: dict[str, list[list[int]]]
    """By name: the ids of every step, alternatives in the order in which they were written."""

    @cached_property
    def tokenizer(self) -> Any:
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(self.directory)

    def prompt(self, name: str) -> str:
        return f"Say #{name}"

    def prompt_token_ids(self, name: str) -> list[int]:
        ids: list[int] = self.tokenizer(self.prompt(name)).input_ids
        assert ids[-1] == self.entries[name], "the prompt does not end with the entry"
        return ids

    def ids(self, name: str) -> list[int]:
        """One pass of the chain, by the first alternative of every step."""
        return [step[0] for step in self.chains[name]]

    def decode(self, name: str, token_ids: list[int], *, skip_special_tokens: bool = True) -> str:
        """The reference's text of ``token_ids`` as the continuation of the chain's prompt."""
        prompt = self.prompt_token_ids(name)
        before = self.tokenizer.decode(prompt, skip_special_tokens=skip_special_tokens)
        whole = self.tokenizer.decode(prompt + token_ids, skip_special_tokens=skip_special_tokens)
        assert whole.startswith(before)
        return str(whole[len(before) :])

    def text(self, name: str, *, skip_special_tokens: bool = True) -> str:
        """The reference's text of one pass of the chain."""
        return self.decode(name, self.ids(name), skip_special_tokens=skip_special_tokens)


def single_bytes(text: str) -> list[bytes]:
    """The bytes of a text, to be said one by one."""
    return [bytes([byte]) for byte in text.encode()]


def _spelled(family: str, piece: Piece) -> str:
    """As the vocabulary writes it."""
    if family == BYTE_LEVEL:
        data = piece.encode() if isinstance(piece, str) else piece
        return "".join(_BYTE_CHARACTERS[byte] for byte in data)
    if isinstance(piece, str):
        return piece.replace(" ", "\u2581")
    if len(piece) != 1:
        raise ValueError(f"a metaspace vocabulary has no piece for {piece!r}")
    return f"<0x{piece[0]:02X}>"


def _byte_characters() -> dict[int, str]:
    """GPT-2's: printable bytes of Latin-1 stand for themselves, the rest follow from U+0100."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    return {byte: chr(byte) for byte in printable} | {
        byte: chr(0x100 + place) for place, byte in enumerate(others)
    }


_BYTE_CHARACTERS = _byte_characters()


def _write_tokenizer(
    directory: Path, family: str, pieces: list[str], added: dict[str, int], chat_template: str
) -> None:
    """Written pieces win over bytes when a prompt is tokenized, the fewest of them."""
    num_base = len(added) + 1 + 256
    scored = [(piece, -10.0 if i < num_base else -1.0) for i, piece in enumerate(pieces)]
    tokenizer = Tokenizer(models.Unigram(scored, unk_id=0, byte_fallback=family == METASPACE))
    if family == BYTE_LEVEL:
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        tokenizer.decoder = decoders.ByteLevel()
    else:
        spaces = [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]
        tokenizer.normalizer = normalizers.Sequence(spaces)
        tokenizer.decoder = decoders.Sequence(
            [
                decoders.Replace("\u2581", " "),
                decoders.ByteFallback(),
                decoders.Fuse(),
                decoders.Strip(" ", 1, 0),
            ]
        )
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", pair=f"{BOS} $A $B", special_tokens=[(BOS, added[BOS])]
    )
    tokenizer.add_special_tokens(list(SPECIAL))
    tokenizer.add_tokens([AddedToken(text, normalized=False) for text in PLAIN_ADDED])
    tokenizer.save(str(directory / "tokenizer.json"))
    _write_json(
        directory / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": BOS,
            "eos_token": EOS,
            "clean_up_tokenization_spaces": family == METASPACE,
            "chat_template": chat_template,
        },
    )


def _write_model(directory: Path, logits: torch.Tensor, added: dict[str, int]) -> None:
    """``logits`` [successor, token]. RMSNorm turns a one-hot row into sqrt(size) times itself."""
    size = len(logits)
    scale = size**0.5
    narrow, layer = 16, "model.layers.0."
    tensors = {
        "model.embed_tokens.weight": torch.eye(size) * scale,
        "model.norm.weight": torch.ones(size),
        "lm_head.weight": logits / scale,
        f"{layer}input_layernorm.weight": torch.ones(size),
        f"{layer}post_attention_layernorm.weight": torch.ones(size),
        f"{layer}self_attn.o_proj.weight": torch.zeros(size, narrow),
        f"{layer}mlp.down_proj.weight": torch.zeros(size, narrow),
    }
    for name in ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"):
        tensors[f"{layer}{name}.weight"] = torch.zeros(narrow, size)
    for name in ("mlp.gate_proj", "mlp.up_proj"):
        tensors[f"{layer}{name}.weight"] = torch.zeros(narrow, size)
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    eos_token_ids = [added[EOS], added[TURN_END]]
    _write_json(directory / "generation_config.json", {"eos_token_id": eos_token_ids})
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": size,
        "hidden_size": size,
        "intermediate_size": narrow,
        "num_hidden_layers": 1,
        "num_attention_heads": 1,
        "num_key_value_heads": 1,
        "head_dim": narrow,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "max_position_embeddings": _MAX_POSITIONS,
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
        "bos_token_id": added[BOS],
        "eos_token_id": added[EOS],
    }
    _write_json(directory / "config.json", config)


def _write_json(path: Path, values: dict[str, Any]) -> None:
    path.write_text(json.dumps(values, indent=2), encoding="utf-8")
