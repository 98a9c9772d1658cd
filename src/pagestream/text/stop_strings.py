"""StopMatcher: where text first completes a stop string, and how much must wait to know.

A stop string counts at its last character: the first one to be complete wins, and of several
complete at the same character the longest. So the answer depends on the text alone, not on how it
was cut into tokens or responses. The matcher is Knuth-Morris-Pratt's, one per stop string: what it
does per character does not grow with the text or the stop strings, and only text that may still
become a stop string is held. Used by StreamDecoder.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Found:
    stop: str
    end: int
    """Where it ends in the text that completed it, which may have only its last character."""


class StopMatcher:
    """Empty strings are none."""

    def __init__(self, stops: Iterable[str]) -> None:
        self._progress = [_Progress(stop) for stop in dict.fromkeys(stops) if stop]
        self._first_characters = frozenset(progress.stop[0] for progress in self._progress)
        self._held = ""

    def push(self, text: str, since: int = 0) -> tuple[str, Found | None]:
        """The text that no longer waits, and the stop string that ends it, if one does.

        With a stop string, the text is all up to and including it, and nothing may be pushed
        after it. Only one that ends after ``text[:since]`` counts.
        """
        if not self._held and self._first_characters.isdisjoint(text):
            return text, None
        found = self._first_completed(text, since)
        text = self._held + text
        if found is not None:
            return text[: len(self._held) + found.end], found
        num_held = max((progress.matched for progress in self._progress), default=0)
        self._held = text[len(text) - num_held :]
        return text[: len(text) - num_held], None

    def flush(self) -> str:
        """What was held, when no more text comes."""
        text, self._held = self._held, ""
        return text

    def _first_completed(self, text: str, since: int) -> Found | None:
        found: Found | None = None
        for progress in self._progress:
            end = progress.advance(text, since, len(text) if found is None else found.end)
            if end is None:
                continue
            if found is None or (end, -len(progress.stop)) < (found.end, -len(found.stop)):
                found = Found(progress.stop, end)
        return found


class _Progress:
    """How much of one stop string the text so far ends with."""

    def __init__(self, stop: str) -> None:
        self.stop = stop
        self.matched = 0
        self._shorter = _shorter_matches(stop)

    def advance(self, text: str, since: int, limit: int) -> int | None:
        """Where its first match that ends in ``text[since:limit]`` ends, or None."""
        stop, shorter, matched = self.stop, self._shorter, self.matched
        position = 0
        while position < limit:
            if matched == 0:
                position = text.find(stop[0], position, limit)
                if position < 0:
                    break
            character = text[position]
            while matched and character != stop[matched]:
                matched = shorter[matched]
            if character == stop[matched]:
                matched += 1
            position += 1
            if matched == len(stop):
                if position > since:
                    return position
                matched = shorter[matched]
        self.matched = matched
        return None


def _shorter_matches(stop: str) -> list[int]:
    """For each length matched, the next shorter length that is then matched too."""
    shorter = [0, 0]
    matched = 0
    for character in stop[1:]:
        while matched and character != stop[matched]:
            matched = shorter[matched]
        matched += character == stop[matched]
        shorter.append(matched)
    return shorter
