"""SpaceCleaner: transformers' clean_up_tokenization_spaces, on text that comes in pieces.

transformers replaces ten strings in the whole text, one after the other. Here each replacement is
a stage that holds back only the end of its text that may begin its string, so that the pieces
joined are what transformers makes of the whole. Used by StreamDecoder.
"""

from __future__ import annotations

_REPLACEMENTS = (
    (" .", "."),
    (" ?", "?"),
    (" !", "!"),
    (" ,", ","),
    (" ' ", "'"),
    (" n't", "n't"),
    (" 'm", "'m"),
    (" 's", "'s"),
    (" 've", "'ve"),
    (" 're", "'re"),
)
"""From PreTrainedTokenizerBase.clean_up_tokenization, in its order."""


class SpaceCleaner:
    def __init__(self) -> None:
        self._stages = [_Stage(old, new) for old, new in _REPLACEMENTS]

    def push(self, text: str, *, final: bool = False) -> str:
        """The cleaned text that is certain; ``final``: all of it, for no more comes."""
        for stage in self._stages:
            text = stage.push(text, final)
        return text


class _Stage:
    def __init__(self, old: str, new: str) -> None:
        self._old, self._new = old, new
        self._held = ""

    def push(self, text: str, final: bool) -> str:
        parts = (self._held + text).split(self._old)
        rest = parts[-1]
        num_held = 0 if final else self._num_begun(rest)
        self._held = rest[len(rest) - num_held :]
        parts[-1] = rest[: len(rest) - num_held]
        return self._new.join(parts)

    def _num_begun(self, text: str) -> int:
        """How many characters at the end of the text may begin the string."""
        for length in range(min(len(text), len(self._old) - 1), 0, -1):
            if text.endswith(self._old[:length]):
                return length
        return 0
