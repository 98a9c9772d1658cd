"""StepFuture: the results of a step that may still be on the device.

The one named place where the host waits for the device. Made by ModelRunner.sample, resolved by
LLMEngine.
"""

from __future__ import annotations

from typing import TypeVar

from pagestream.request import TokenLogprobs
from pagestream.runner.prompt_logprobs import PromptLogprobs
from pagestream.sampling.sampler import SamplerOutput
from pagestream_kernels import Logprobs

T = TypeVar("T")


class StepFuture:
    def __init__(
        self,
        sampled: SamplerOutput,
        num_logits: list[int],
        prompt_logprobs: dict[int, PromptLogprobs],
    ) -> None:
        self._sampled = sampled
        self._num_logits = num_logits
        self._prompt_logprobs = prompt_logprobs

    def result(self) -> list[list[int]]:
        """One list of new tokens per scheduled request, empty inside a prompt."""
        return self._by_request(self._sampled.token_ids.tolist())

    def logprobs(self) -> list[list[TokenLogprobs | None]]:
        """As ``result``; None for tokens whose request wants none."""
        rows: list[TokenLogprobs | None] = [None] * sum(self._num_logits)
        if self._sampled.logprobs is not None:
            found = _to_host(self._sampled.logprobs, self._sampled.logprob_counts)
            for row, value in zip(self._sampled.logprob_rows, found, strict=True):
                rows[row] = value
        return self._by_request(rows)

    def prompt_logprobs(self) -> dict[int, tuple[int, list[TokenLogprobs]]]:
        """By index of the scheduled request: (position of the first, values)."""
        results = {}
        for index, found in self._prompt_logprobs.items():
            values: list[TokenLogprobs] = []
            for part in found.slices:
                values += _to_host(part, [found.count] * len(part.ranks))
            results[index] = found.position, values
        return results

    def _by_request(self, rows: list[T]) -> list[list[T]]:
        result, start = [], 0
        for count in self._num_logits:
            result.append(rows[start : start + count])
            start += count
        return result


def _to_host(found: Logprobs, counts: list[int]) -> list[TokenLogprobs]:
    columns = (found.token_ids, found.logprobs, found.ranks, found.top_ids, found.top_logprobs)
    rows = zip(*(column.tolist() for column in columns), counts, strict=True)
    return [
        TokenLogprobs(token_id, logprob, rank, top_ids[:count], top_logprobs[:count])
        for token_id, logprob, rank, top_ids, top_logprobs, count in rows
    ]
