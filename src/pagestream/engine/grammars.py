"""Grammars: requests whose answers must follow one, parked while it compiles, then led through it.

Owns the compiler (made for the first such request) and every running request's place in its
grammar, by the scheduler's ids. Used by LLMEngine only.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, Future, wait
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from pagestream.config import ModelConfig
from pagestream.request import Request
from pagestream.sampling.grammar import GrammarCompiler, GrammarState
from pagestream.scheduler.scheduler_output import SchedulerOutput
from pagestream.text.token_bytes import read_token_bytes


class Grammars:
    def __init__(self, directory: Path, model_config: ModelConfig) -> None:
        self._directory = directory
        self._model_config = model_config
        self._compiler: GrammarCompiler | None = None
        self._parked: dict[str, tuple[Request, Future[Any]]] = {}
        self._states: dict[str, GrammarState] = {}

    @property
    def num_parked(self) -> int:
        return len(self._parked)

    def park(self, requests: list[Request]) -> None:
        """Compile their common grammar; ``ready`` gives them back. ValueError if this checkpoint's
        vocabulary cannot be read."""
        wanted = requests[0].sampling_params.structured_output
        assert wanted is not None
        future = self._compiler_for_model().submit(wanted)
        for request in requests:
            self._parked[request.request_id] = request, future

    def unpark(self, request_id: str) -> bool:
        """Forget a parked request; whether it was one."""
        return self._parked.pop(request_id, None) is not None

    def ready(self, wait_s: float) -> Iterator[tuple[Request, str | None]]:
        """Requests whose grammar is compiled, with its error if it is a bad one. Waits at most so
        long for the first."""
        futures = {future for _, future in self._parked.values()}
        done = wait(futures, wait_s, FIRST_COMPLETED).done if futures else set()
        for request_id, (request, future) in list(self._parked.items()):
            if future not in done:
                continue
            del self._parked[request_id]
            try:
                self._states[request_id] = GrammarState(
                    future.result(), sorted(request.stop_token_ids)
                )
            except ValueError as error:
                yield request, str(error)
            else:
                yield request, None

    def concern(self, output: SchedulerOutput) -> bool:
        """Whether any token of this step must follow a grammar."""
        return bool(self._states) and any(
            share.num_logits and share.request_id in self._states for share in output.scheduled
        )

    def bitmask(self, output: SchedulerOutput) -> npt.NDArray[np.int32]:
        """Allowed tokens of each logits row: int32 [num_rows, words]."""
        assert self._compiler is not None
        bitmask = self._compiler.empty_bitmask(sum(s.num_logits for s in output.scheduled))
        row = 0
        for share in output.scheduled:
            state = self._states.get(share.request_id)
            if state is not None and share.num_logits:
                state.fill(bitmask, row)
            row += share.num_logits
        return bitmask

    def accept(self, request_id: str, token_ids: list[int]) -> None:
        state = self._states.get(request_id)
        if state is not None:
            for token_id in token_ids:
                state.accept(token_id)

    def end(self, request_id: str) -> None:
        self._states.pop(request_id, None)

    def _compiler_for_model(self) -> GrammarCompiler:
        if self._compiler is None:
            token_bytes = read_token_bytes(self._directory / "tokenizer.json")
            # Special tokens have no place inside an answer; xgrammar never allows an empty one.
            table = [
                b"" if token_id in token_bytes.special_ids else data
                for token_id, data in enumerate(token_bytes.table)
            ]
            config = self._model_config
            self._compiler = GrammarCompiler(
                table[: config.vocab_size], config.vocab_size, sorted(config.eos_token_ids)
            )
        return self._compiler
