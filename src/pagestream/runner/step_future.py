"""StepFuture: the results of a step that may still be on their way from the device.

The one place where the host waits for the device. Made by ModelRunner.sample, resolved by
LLMEngine.
"""

from __future__ import annotations

from typing import Any, TypeVar

import torch

from pagestream.request import TokenLogprobs
from pagestream.runner.prompt_logprobs import PromptLogprobs
from pagestream.sampling.sampler import SamplerOutput
from pagestream_kernels import Logprobs
from pagestream_kernels.transfers import HostCopy

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
        parts = [] if sampled.logprobs is None else [sampled.logprobs]
        parts += [part for found in prompt_logprobs.values() for part in found.slices]
        self._copy = HostCopy([sampled.token_ids, *(c for part in parts for c in _columns(part))])
        self._host: list[Any] | None = None

    def result(self) -> list[list[int]]:
        """One list of new tokens per scheduled request, empty inside a prompt."""
        return self._by_request(self._columns(0, 1)[0])

    def logprobs(self) -> list[list[TokenLogprobs | None]]:
        """As ``result``; None for tokens whose request wants none."""
        rows: list[TokenLogprobs | None] = [None] * sum(self._num_logits)
        if self._sampled.logprobs is not None:
            found = _values(self._columns(1, 6), self._sampled.logprob_counts)
            for row, value in zip(self._sampled.logprob_rows, found, strict=True):
                rows[row] = value
        return self._by_request(rows)

    def prompt_logprobs(self) -> dict[int, tuple[int, list[TokenLogprobs]]]:
        """By index of the scheduled request: (position of the first, values)."""
        results = {}
        start = 1 if self._sampled.logprobs is None else 6
        for index, found in self._prompt_logprobs.items():
            values: list[TokenLogprobs] = []
            for part in found.slices:
                columns = self._columns(start, start + 5)
                values += _values(columns, [found.count] * len(part.ranks))
                start += 5
            results[index] = found.position, values
        return results

    def _columns(self, start: int, end: int) -> list[Any]:
        """Of what was copied, as Python lists; the copies are on the host, so only `wait` waits."""
        if self._host is None:
            self._host = [tensor.tolist() for tensor in self._copy.wait()]
        return self._host[start:end]

    def _by_request(self, rows: list[T]) -> list[list[T]]:
        result, start = [], 0
        for count in self._num_logits:
            result.append(rows[start : start + count])
            start += count
        return result


def _columns(found: Logprobs) -> list[torch.Tensor]:
    return [found.token_ids, found.logprobs, found.ranks, found.top_ids, found.top_logprobs]


def _values(columns: list[Any], counts: list[int]) -> list[TokenLogprobs]:
    return [
        TokenLogprobs(token_id, logprob, rank, top_ids[:count], top_logprobs[:count])
        for token_id, logprob, rank, top_ids, top_logprobs, count in zip(
            *columns, counts, strict=True
        )
    ]
