"""StreamDecoder: token ids in, text deltas out; the only place where output text is made.

    ids -> bytes -> whole characters -> cleaned spaces -> text not yet released | released
                                        (some models)     (may begin a stop string)

Owns one request's decoding state and does constant work per token. Joined deltas equal the text of
all ids decoded at once: bytes wait until a character is whole or can no longer become one, and
only what may still turn out to be the start of a stop string is held back. It knows no requests
and no responses. Used by postprocessing and LLM.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from dataclasses import dataclass

from pagestream.text.clean_up import SpaceCleaner
from pagestream.text.stop_strings import StopMatcher
from pagestream.text.token_bytes import TokenBytes

_Utf8Decoder = codecs.getincrementaldecoder("utf-8")


@dataclass(frozen=True, slots=True)
class TextDelta:
    text: str
    stop: str | None = None
    """The stop string that ended the text; nothing follows it."""
    num_tokens: int = 0
    """Tokens taken by the call; fewer than given when a stop string ended the text early."""


class StreamDecoder:
    """``prompt_tail`` primes the decoder: its text is not part of the output.

    A stop string ends the text only if it is complete after the first ``min_tokens`` ids.
    """

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
        self._stops = StopMatcher(stop)
        self._include_stop = include_stop_str_in_output
        self._min_tokens = min_tokens
        self._num_tokens = 0
        self._utf8 = _Utf8Decoder(errors="replace")
        self._cleaner = SpaceCleaner() if token_bytes.cleans_up else None
        self._joins_first = token_bytes.joins_first
        self._num_to_strip = token_bytes.num_stripped
        self._resumes = False
        for token_id in prompt_tail:
            self._text(token_id)
        # The prompt ends inside a character, which the output may complete.
        self._resumes = bool(self._utf8.getstate()[0])

    def append(self, token_ids: list[int], *, last_is_stop: bool = False) -> TextDelta:
        """Text released by these ids.

        With ``last_is_stop`` the last id ended the request as a stop token: it counts, but its
        text is not part of the answer (unless stop strings are to be included).
        """
        hides_last = last_is_stop and not self._include_stop
        shown = token_ids[:-1] if hides_last else token_ids
        texts = [self._clean(self._text(token_id)) for token_id in shown]
        num_early = max(0, self._min_tokens - self._num_tokens)
        delta = self._release(texts, num_early)
        num_tokens = len(token_ids) if delta.stop is None else delta.num_tokens
        self._num_tokens += num_tokens
        return TextDelta(delta.text, delta.stop, num_tokens)

    def finish(self) -> TextDelta:
        """What was held back: a possible stop string that never came, a truncated character.

        That character may be what completes a stop string.
        """
        if self._resumes:
            self._utf8.reset()
        text = self._strip(self._utf8.decode(b"", final=True))
        text = self._clean(text, final=True)
        num_early = 0 if self._num_tokens > self._min_tokens else 1
        delta = self._release([text], num_early)
        if delta.stop is not None:
            return TextDelta(delta.text, delta.stop)
        return TextDelta(delta.text + self._stops.flush())

    def _text(self, token_id: int) -> str:
        """The characters that this id makes whole."""
        if token_id in self._skip:
            return ""
        data = self._tokens.bytes_of(token_id)
        if self._joins_first and data:
            self._joins_first = False
            data = self._tokens.joined_bytes_of(token_id)
        if self._resumes and data:
            self._resume(data)
        return self._strip(self._utf8.decode(data))

    def _resume(self, data: bytes) -> None:
        """A character that the prompt began and the output does not go on with is the prompt's."""
        self._resumes = False
        begun, _ = self._utf8.getstate()
        try:
            _Utf8Decoder().decode(begun + data[:1])
        except UnicodeDecodeError:
            self._utf8.reset()

    def _strip(self, text: str) -> str:
        """Without the spaces that are still to be taken off the start."""
        if not self._num_to_strip or not text:
            return text
        num_spaces = len(text) - len(text.lstrip(" "))
        num_stripped = min(num_spaces, self._num_to_strip)
        all_spaces = num_stripped == len(text)
        self._num_to_strip = self._num_to_strip - num_stripped if all_spaces else 0
        return text[num_stripped:]

    def _clean(self, text: str, *, final: bool = False) -> str:
        return text if self._cleaner is None else self._cleaner.push(text, final=final)

    def _release(self, texts: Sequence[str], num_early: int) -> TextDelta:
        """``texts``: one per token; those of the first ``num_early`` complete no stop string."""
        since = sum(map(len, texts[:num_early]))
        text, found = self._stops.push("".join(texts), since)
        if found is None:
            return TextDelta(text)
        if not self._include_stop:
            text = text[: len(text) - len(found.stop)]
        num_tokens = 0
        end = 0
        while end < found.end:
            end += len(texts[num_tokens])
            num_tokens += 1
        return TextDelta(text, found.stop, num_tokens)
