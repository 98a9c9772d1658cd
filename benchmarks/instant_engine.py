"""`engine` without a model: every request is answered at once, with its own prompt over and over.

text_path.py copies this file over the engine's shim in a copy of the model repository. All of
EngineModel and EngineBridge is the real thing; only the loop that would run the model is replaced,
so what is left to measure is what moving tokens and text costs. ``top_k`` of a request is how many
tokens each of its responses has.
"""

from __future__ import annotations

import dataclasses
import itertools
import queue
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from pagestream.config import EngineConfig, ModelConfig, resolve_max_model_len
from pagestream.engine.engine_loop import AbortRequest, AddRequest, Command, StepReport
from pagestream.engine.metrics import EngineStats
from pagestream.model_store import resolve_model
from pagestream.request import FinishReason, RequestOutput
from pagestream.sampling_params import Limits
from pagestream.serving import engine_bridge
from pagestream.serving.engine_model import EngineModel as TritonPythonModel

__all__ = ["TritonPythonModel"]


@dataclass
class Running:
    token_ids: Iterator[int]
    num_left: int
    tokens_per_step: int


class InstantLoop:
    """Stands in for EngineLoop, one thread as well. A request's n is taken as 1."""

    def __init__(self, config: EngineConfig, report: Callable[[StepReport], None]) -> None:
        model_config = ModelConfig.from_hf(resolve_model(config.model))
        max_model_len = resolve_max_model_len(config, model_config)
        self._limits = Limits(model_config.vocab_size, max_model_len, max_model_len)
        self._report = report
        self._inbox: queue.SimpleQueue[Command] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="instant-loop", daemon=True)
        self._running: dict[str, Running] = {}
        self._stats = EngineStats(kv_blocks_total=1, kv_blocks_free=1)

    def start(self) -> Limits:
        self._thread.start()
        return self._limits

    def submit(self, command: Command) -> None:
        self._inbox.put(command)

    def join(self, timeout: float | None = None) -> None:
        self._thread.join(timeout)

    def _run(self) -> None:
        self._report(StepReport([], self._stats))
        while True:
            outputs: list[RequestOutput] = []
            for command in self._commands():
                if isinstance(command, AddRequest):
                    self._running[command.request_id] = _start(command)
                elif isinstance(command, AbortRequest):
                    if self._running.pop(command.request_id, None) is not None:
                        outputs.append(_aborted(command.request_id))
                else:
                    outputs += map(_aborted, self._running)
                    self._report(StepReport(outputs, self._stats))
                    return
            outputs += [self._step(*item) for item in list(self._running.items())]
            self._stats = dataclasses.replace(
                self._stats,
                requests_running=len(self._running),
                step_batch_size=len(outputs),
                generated_tokens_total=self._stats.generated_tokens_total
                + sum(len(output.token_ids) for output in outputs),
            )
            self._report(StepReport(outputs, self._stats))

    def _commands(self) -> Iterator[Command]:
        if not self._running:
            yield self._inbox.get()
        while not self._inbox.empty():
            yield self._inbox.get()

    def _step(self, request_id: str, running: Running) -> RequestOutput:
        size = min(running.tokens_per_step, running.num_left)
        running.num_left -= size
        if running.num_left == 0:
            del self._running[request_id]
        return RequestOutput(
            request_id,
            list(itertools.islice(running.token_ids, size)),
            finish_reason=None if running.num_left else FinishReason.LENGTH,
            num_cached_tokens=0,
            queued_s=0.0,
        )


def _start(command: AddRequest) -> Running:
    params = command.sampling_params
    return Running(
        itertools.cycle(command.prompt_token_ids), params.max_tokens or 1, params.top_k or 1
    )


def _aborted(request_id: str) -> RequestOutput:
    return RequestOutput(request_id, [], finish_reason=FinishReason.ABORT)


engine_bridge.EngineLoop = InstantLoop  # type: ignore[assignment,misc]
