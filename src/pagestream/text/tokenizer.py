"""Tokenizer: text to ids by transformers' own code, and each id's bytes for the stream decoder.

Loads from a local directory only: no network, no remote code. Knows no requests and no tensors.
Used by preprocessing, postprocessing and LLM.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from pagestream.sampling_params import SamplingParams
from pagestream.text.chat import ChatOptions, ChatTemplate
from pagestream.text.special_token_guard import SpecialTokenGuard
from pagestream.text.token_bytes import TokenBytes, read_token_bytes

_TAIL_TOKENS = 8
_TAIL_LIMIT = 64


class Tokenizer:
    """Raises FileNotFoundError or ValueError for a directory without a usable fast tokenizer."""

    def __init__(self, directory: Path) -> None:
        if not (directory / "tokenizer.json").is_file():
            raise FileNotFoundError(f"no tokenizer.json in {directory}: a fast tokenizer is needed")
        self._tokenizer: Any = AutoTokenizer.from_pretrained(
            str(directory), local_files_only=True, trust_remote_code=False
        )
        self._chat_template = ChatTemplate(self._tokenizer)
        self._guard = SpecialTokenGuard(self._tokenizer)
        self.token_bytes: TokenBytes = read_token_bytes(directory / "tokenizer.json")
        # A longer text cannot fit n tokens, so it can be refused before it is tokenized.
        self.max_bytes_per_token = self.token_bytes.longest

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """A raw prompt's ids, with the special tokens that transformers adds."""
        return list(self._tokenizer(text, add_special_tokens=add_special_tokens)["input_ids"])

    def encode_chat(
        self, messages: Sequence[Mapping[str, Any]], options: ChatOptions | None = None
    ) -> list[int]:
        """Render the chat template and tokenize it without adding further special tokens.

        Special tokens are those that the template writes; text that spells one stays text, unless
        the options say otherwise. Raises ValueError naming a wrong field, or with the template's
        own words when it refuses the messages.
        """
        options = options or ChatOptions()
        self._chat_template.check(messages, options)
        hidden: dict[str, str] = {}
        if not options.parse_special_tokens:
            messages = self._guard.hide(messages, hidden)
            options = dataclasses.replace(
                options,
                tools=self._guard.hide(options.tools, hidden),
                chat_template_kwargs=self._guard.hide(options.chat_template_kwargs, hidden),
            )
        text = self._chat_template.render(messages, options)
        if hidden:
            return self._guard.encode(text, hidden)
        return self.encode(text, add_special_tokens=False)

    def with_bad_words(self, params: SamplingParams) -> SamplingParams:
        """bad_words added to bad_words_token_ids: as a word of its own, after a space, and where
        it goes on with other text."""
        sequences = list(params.bad_words_token_ids)
        for word in params.bad_words:
            text = word.lstrip() or word
            after_space = self.encode(" " + text, add_special_tokens=False)
            alone = self.encode(text, add_special_tokens=False)
            for ids in map(tuple, (alone, after_space, self._guard.encode_inside(text))):
                if ids and ids not in sequences:
                    sequences.append(ids)
        return dataclasses.replace(params, bad_words=(), bad_words_token_ids=tuple(sequences))

    def special_token_id(self, text: str) -> int | None:
        """The id of a text that is one special token, else None."""
        token_id = self._tokenizer.get_added_vocab().get(text)
        return token_id if token_id in self.token_bytes.special_ids else None

    def prompt_tail(self, prompt_token_ids: list[int]) -> list[int]:
        """The last ids of a prompt, enough to decode its continuation correctly.

        At least 8, extended back (to at most 64) to an id that begins a character.
        """
        start = max(0, len(prompt_token_ids) - _TAIL_TOKENS)
        least = max(0, len(prompt_token_ids) - _TAIL_LIMIT)
        while start > least and not self.token_bytes.begins_character(prompt_token_ids[start]):
            start -= 1
        return prompt_token_ids[start:]
