"""EngineLoop: the thread that drives LLMEngine.step while there is work, and sleeps otherwise.

Owns the engine for its whole life: it is built, warmed up and stepped in this one thread, because
OpenMP keeps a pool of workers per calling thread and they inherit its priority. Commands come in
and reports go out as plain data, one queue operation per step, so that the loop can move to a
process of its own. It knows no responses and no server; EngineBridge does.
"""

from __future__ import annotations

import gc
import logging
import os
import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass

from pagestream.config import EngineConfig
from pagestream.engine.llm_engine import LLMEngine
from pagestream.engine.metrics import EngineStats
from pagestream.request import FinishReason, RequestOutput
from pagestream.runner.model_runner import resolve_device
from pagestream.sampling_params import Limits, SamplingParams

logger = logging.getLogger(__name__)

_COMPUTE_NICENESS = 10
"""On CPU, compute yields to the threads that move tokens; otherwise they starve beside it."""


@dataclass(frozen=True, slots=True)
class AddRequest:
    request_id: str
    prompt_token_ids: list[int]
    sampling_params: SamplingParams
    arrival_time: float
    """time.monotonic() seconds, at preprocessing."""


@dataclass(frozen=True, slots=True)
class AbortRequest:
    request_id: str
    index: int = -1
    """One of its n answers; -1: all."""


@dataclass(frozen=True, slots=True)
class Shutdown:
    """Abort what is running and end the thread."""


@dataclass(frozen=True, slots=True)
class StepReport:
    """What a step produced. ``failure`` is set once, in the last report of a loop that died."""

    outputs: list[RequestOutput]
    stats: EngineStats
    failure: str | None = None


Command = AddRequest | AbortRequest | Shutdown


class EngineLoop:
    """``report`` is called from the loop's thread; it must not block."""

    def __init__(self, config: EngineConfig, report: Callable[[StepReport], None]) -> None:
        self._config = config
        self._report = report
        self._inbox: queue.SimpleQueue[Command] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="engine-loop", daemon=True)
        self._ready = threading.Event()
        self._start_error: BaseException | None = None
        self._limits: Limits | None = None

    def start(self) -> Limits:
        """Load and warm up; returns when requests can run. Raises what loading raised."""
        self._thread.start()
        self._ready.wait()
        if self._start_error is not None:
            raise self._start_error
        assert self._limits is not None
        return self._limits

    def submit(self, command: Command) -> None:
        self._inbox.put(command)

    def join(self, timeout: float | None = None) -> None:
        self._thread.join(timeout)

    def _run(self) -> None:
        try:
            if resolve_device(self._config.device).type == "cpu":
                os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _COMPUTE_NICENESS)
            engine = LLMEngine(self._config)
            engine.warm_up()
            gc.collect()
            gc.freeze()
            self._limits = engine.limits
        except BaseException as error:  # handed to the thread that called start()
            self._start_error = error
            return
        finally:
            self._ready.set()
        try:
            self._loop(engine)
        except Exception:
            logger.exception("the engine loop died")
            self._report(StepReport([], engine.stats, failure="the engine failed"))

    def _loop(self, engine: LLMEngine) -> None:
        self._report(StepReport([], engine.stats))
        running = True
        while running:
            outputs: list[RequestOutput] = []
            for command in self._commands(wait=not engine.has_unfinished_requests()):
                if isinstance(command, AddRequest):
                    outputs += _add(engine, command)
                elif isinstance(command, AbortRequest):
                    engine.abort_request(command.request_id, command.index)
                else:
                    engine.abort_all()
                    running = False
            if engine.has_unfinished_requests():
                outputs += engine.step()
            self._report(StepReport(outputs, engine.stats))

    def _commands(self, wait: bool) -> list[Command]:
        commands = [self._inbox.get()] if wait else []
        while True:
            try:
                commands.append(self._inbox.get_nowait())
            except queue.Empty:
                return commands


def _add(engine: LLMEngine, command: AddRequest) -> list[RequestOutput]:
    """A refusal (a full queue, above all) concerns this request alone."""
    try:
        engine.add_request(
            command.request_id,
            command.prompt_token_ids,
            command.sampling_params,
            command.arrival_time,
        )
    except ValueError as error:
        message = str(error)
        return [
            RequestOutput(command.request_id, [], index, FinishReason.ERROR, error=message)
            for index in range(command.sampling_params.n)
        ]
    return []
