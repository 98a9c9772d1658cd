"""StepFuture: the tokens of a step whose results may still be on the device.

The one named place where the host waits for the device. Made by ModelRunner.sample, resolved by
LLMEngine.
"""

from __future__ import annotations

import torch


class StepFuture:
    def __init__(self, token_ids: torch.Tensor, num_logits: list[int]) -> None:
        self._token_ids = token_ids  # int64 [sum(num_logits)]
        self._num_logits = num_logits

    def result(self) -> list[list[int]]:
        """One list of new tokens per scheduled request, empty inside a prompt."""
        flat = self._token_ids.tolist()
        result, start = [], 0
        for count in self._num_logits:
            result.append(flat[start : start + count])
            start += count
        return result
