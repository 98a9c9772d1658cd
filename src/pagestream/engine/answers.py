"""Answers: the n answers that one request asks for, each a request of the scheduler's.

Owns the mapping between a user's (request_id, index) and the scheduler's ids. Used by LLMEngine.
"""

from __future__ import annotations

from hashlib import blake2b


class Answers:
    def __init__(self) -> None:
        self._internal: dict[str, dict[int, str]] = {}  # request_id -> index -> internal id
        self._external: dict[str, tuple[str, int]] = {}

    def add(self, request_id: str, n: int) -> list[str]:
        """The internal ids, by index. ValueError for a request_id in use."""
        if request_id in self._internal:
            raise ValueError(f"request_id {request_id!r} is already in use")
        # A length in front: no request_id can spell another one's internal id.
        ids = [f"{len(request_id)}:{request_id}:{index}" for index in range(n)]
        self._internal[request_id] = dict(enumerate(ids))
        for index, internal_id in enumerate(ids):
            self._external[internal_id] = request_id, index
        return ids

    def find(self, request_id: str, index: int = -1) -> list[str]:
        """Internal ids that have not ended: of one answer, or of all with -1."""
        answers = self._internal.get(request_id, {})
        return [i for at, i in answers.items() if index in (-1, at)]

    def external(self, internal_id: str) -> tuple[str, int]:
        return self._external[internal_id]

    def end(self, internal_id: str) -> None:
        request_id, index = self._external.pop(internal_id)
        answers = self._internal[request_id]
        del answers[index]
        if not answers:
            del self._internal[request_id]

    @property
    def request_ids(self) -> list[str]:
        return list(self._internal)


def answer_seed(seed: int, index: int) -> int:
    """64 bits for the answer's draws; the first answer's are those of n = 1."""
    if index == 0:
        return seed
    data = seed.to_bytes(8, "little") + index.to_bytes(8, "little")
    return int.from_bytes(blake2b(data, digest_size=8).digest(), "little")
