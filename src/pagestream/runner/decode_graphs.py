"""DecodeGraphs: steps in which every request adds one token, recorded once and replayed.

At small batches a decode step is bound by launches, not by work; a CUDA graph makes it one launch.
A graph has a fixed batch size, so a batch is padded to the next recorded one with rows of a state
row that belongs to nobody. Owns the recordings and the memory they read; it does not know what a
step computes. Called by ModelRunner.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch

from pagestream_kernels.transfers import to_device

Results = tuple[torch.Tensor, torch.Tensor]
"""Logits [num_reqs, vocab_size], and int64 [num_reqs] positions of the tokens drawn from them."""
Run = Callable[[torch.Tensor], Results]
"""int64 [num_reqs_padded] state rows -> results of so many rows."""


class Recorder(Protocol):
    def record(self, run: Callable[[], Results]) -> tuple[Callable[[], None], Results]:
        """(replay, the tensors that each replay fills) of a call that reads fixed memory."""
        ...


class CudaRecorder:
    """All graphs share one memory pool; record the largest first, so that the others fit in it."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()

    def record(self, run: Callable[[], Results]) -> tuple[Callable[[], None], Results]:
        side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            run()  # compiles kernels and makes library handles, which a capture cannot
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            filled = run()
        return graph.replay, filled


class DirectRecorder:
    """Where there are no graphs: a replay makes the call again, into the same memory."""

    def record(self, run: Callable[[], Results]) -> tuple[Callable[[], None], Results]:
        logits, positions = (result.clone() for result in run())

        def replay() -> None:
            new_logits, new_positions = run()
            logits.copy_(new_logits)
            positions.copy_(new_positions)

        return replay, (logits, positions)


def graph_sizes(max_num_seqs: int) -> list[int]:
    """Denser where padding costs most: 1, 2, 4, then by 8 to 64, by 16 to 256, by 32 above."""
    sizes = [1, 2, 4, *range(8, 64, 8), *range(64, 256, 16), *range(256, max_num_seqs, 32)]
    return [*(size for size in sizes if size < max_num_seqs), max_num_seqs]


class DecodeGraphs:
    """``padding_state``: the state row of padded rows."""

    def __init__(
        self,
        sizes: list[int],
        run: Run,
        padding_state: int,
        device: torch.device,
        recorder: Recorder,
    ) -> None:
        self._padding_state = padding_state
        self._idx_mapping = torch.full((sizes[-1],), padding_state, device=device)
        self._sizes = sizes
        self._run = run
        self._recorder = recorder
        self._graphs: dict[int, tuple[Callable[[], None], Results]] = {}

    @property
    def max_size(self) -> int:
        return self._sizes[-1]

    def record(self, progress: Callable[[int, int], None] | None = None) -> None:
        for done, size in enumerate(reversed(self._sizes), start=1):
            rows = self._idx_mapping[:size]
            self._graphs[size] = self._recorder.record(lambda rows=rows: self._run(rows))  # type: ignore[misc]
            if progress is not None:
                progress(done, len(self._sizes))

    def replay(self, state_rows: list[int]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Logits, positions, and int64 [num_reqs] state rows; all valid until the next replay. At
        most ``max_size`` rows."""
        num_reqs = len(state_rows)
        size = next(size for size in self._sizes if size >= num_reqs)
        padded = state_rows + [self._padding_state] * (size - num_reqs)
        device = self._idx_mapping.device
        self._idx_mapping[:size].copy_(to_device(padded, torch.int64, device))
        replay, (logits, positions) = self._graphs[size]
        replay()
        return logits[:num_reqs], positions[:num_reqs], self._idx_mapping[:num_reqs]
