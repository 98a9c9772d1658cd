"""StreamDecoder: token ids in, text deltas out; the only place where output text is made.

    ids -> bytes -> whole characters -> text not yet released | released
                                        (may begin a stop string)

Owns one request's decoding state and does constant work per token. Joined deltas equal the text of
all ids decoded at once: bytes wait until a character is whole or can no longer become one, and
only what may still turn out to be the start of a stop string is held back. It knows no requests
and no responses. Used by postprocessing and LLM.
"""

from __future__ import annotations

import codecs
from dataclasses import dataclass

from pagestream.text.token_bytes import TokenBytes


@dataclass(frozen=True, slots=True)
class TextDelta:
    text: str
    stop: str | None = None
    """The stop string that ended the text; nothing follows it."""
    num_tokens: int = 0
    """Tokens taken by the call; fewer than given when a stop string ended the text early."""


class StreamDecoder:
    """``prompt_tail`` primes the decoder: its text is not part of the output."""

    def __init__(
        self,
        token_bytes: TokenBytes,
        prompt_tail: list[int],
        *,
        stop: tuple[str, ...] = (),
        skip_special_tokens: bool = True,
        include_stop_str_in_output: bool = False,
        min_tokens: int = 0,
    ) -> None:
        self._tokens = token_bytes
        self._skip = token_bytes.special_ids if skip_special_tokens else frozenset()
        self._stop = stop
        self._include_stop = include_stop_str_in_output
        self._min_tokens = min_tokens
        self._num_tokens = 0
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._strip_space = token_bytes.strips_first_space
        self._held = ""
        for token_id in prompt_tail:
            self._utf8.decode(self._bytes(token_id))

    def append(self, token_ids: list[int], *, last_is_stop: bool = False) -> TextDelta:
        """Text released by these ids.

        With ``last_is_stop`` the last id ended the request as a stop token: it counts, but its
        text is not part of the answer (unless stop strings are to be included).
        """
        released = []
        for index, token_id in enumerate(token_ids):
            hidden = last_is_stop and index + 1 == len(token_ids) and not self._include_stop
            text = "" if hidden else self._utf8.decode(self._bytes(token_id))
            self._num_tokens += 1
            delta = self._release(text)
            released.append(delta.text)
            if delta.stop is not None:
                return TextDelta("".join(released), delta.stop, index + 1)
        return TextDelta("".join(released), None, len(token_ids))

    def finish(self) -> str:
        """What was held back: a possible stop string that never came, a truncated character."""
        text = self._held + self._utf8.decode(b"", final=True)
        self._held = ""
        return text

    def _bytes(self, token_id: int) -> bytes:
        if token_id in self._skip or not 0 <= token_id < len(self._tokens.table):
            return b""
        data = self._tokens.table[token_id]
        if self._strip_space and data:
            self._strip_space = False
            return data.removeprefix(b" ")
        return data

    def _release(self, text: str) -> TextDelta:
        if not self._stop:
            return TextDelta(text)
        text = self._held + text
        if self._num_tokens > self._min_tokens:
            match = self._earliest_stop(text)
            if match is not None:
                start, stop = match
                self._held = ""
                end = start + len(stop) if self._include_stop else start
                return TextDelta(text[:end], stop)
        held = max(_overlap(text, stop) for stop in self._stop)
        self._held = text[len(text) - held :]
        return TextDelta(text[: len(text) - held])

    def _earliest_stop(self, text: str) -> tuple[int, str] | None:
        """Where the first stop string starts; of several there, the longest."""
        found = [(text.find(stop), -len(stop), stop) for stop in self._stop]
        found = [match for match in found if match[0] >= 0]
        if not found:
            return None
        start, _, stop = min(found)
        return start, stop


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of ``text`` that begins ``stop``, without being all of it."""
    for length in range(min(len(text), len(stop) - 1), 0, -1):
        if stop.startswith(text[len(text) - length :]):
            return length
    return 0
