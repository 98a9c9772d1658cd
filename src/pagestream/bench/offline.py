"""OfflineTarget: the engine in this process, without a server and without text.

Owns an EngineLoop; its reports, one per step, are handed to the queues of the requests they
concern. What the load generator's own threads take of the CPU, the engine does not get: for small
models this measures both.
"""

from __future__ import annotations

import os
import queue
import threading
import time
from collections.abc import Iterator

from pagestream.bench.driver import RequestTimedOut, Response
from pagestream.bench.served import peak_memory_of
from pagestream.bench.workload import PlannedRequest
from pagestream.config import EngineConfig
from pagestream.engine.engine_loop import (
    AbortRequest,
    AddRequest,
    EngineLoop,
    Shutdown,
    StepReport,
)
from pagestream.request import FinishReason, RequestOutput
from pagestream.sampling_params import SamplingParams, validate_prompt

_Outputs = queue.SimpleQueue[tuple[float, RequestOutput]]
_JOIN_TIMEOUT_S = 30.0


class OfflineTarget:
    """Loads and warms up; raises ValueError or FileNotFoundError for what cannot work."""

    def __init__(self, config: EngineConfig, *, ignore_eos: bool, seed: int) -> None:
        self._ignore_eos = ignore_eos
        self._seed = seed
        self._queues: dict[str, _Outputs] = {}
        self._lock = threading.Lock()
        self._num_sent = 0
        self._waiting: float | None = None
        self._loop = EngineLoop(config, self._report)
        self._limits = self._loop.start()

    def send(self, request: PlannedRequest, timeout_s: float) -> Iterator[Response]:
        params = SamplingParams(
            max_tokens=request.max_tokens,
            temperature=0.0,
            ignore_eos=self._ignore_eos,
            seed=self._seed,
        )
        prompt = list(request.prompt_token_ids)
        validate_prompt(prompt, self._limits, "the prompt")
        params.validate(self._limits)
        started = time.monotonic()
        outputs: _Outputs = queue.SimpleQueue()
        with self._lock:
            self._num_sent += 1
            request_id = str(self._num_sent)
            self._queues[request_id] = outputs
        self._loop.submit(AddRequest(request_id, prompt, params, started))
        finished = False
        try:
            while not finished:
                received_at, output = self._next(outputs, started + timeout_s)
                finished = output.finish_reason is not None
                yield Response(
                    received_at,
                    len(output.token_ids),
                    len(prompt),
                    output.num_cached_tokens,
                    output.finish_reason.value if output.finish_reason else "",
                )
        finally:
            with self._lock:
                del self._queues[request_id]
            if not finished:
                self._loop.submit(AbortRequest(request_id))

    def queue_depth(self) -> float | None:
        return self._waiting

    def peak_memory_bytes(self) -> int | None:
        """Of this process, which holds the engine and the load generator."""
        return peak_memory_of(os.getpid())

    def close(self) -> None:
        self._loop.submit(Shutdown())
        self._loop.join(_JOIN_TIMEOUT_S)

    def _next(self, outputs: _Outputs, deadline: float) -> tuple[float, RequestOutput]:
        try:
            received_at, output = outputs.get(timeout=max(0.0, deadline - time.monotonic()))
        except queue.Empty:
            raise RequestTimedOut("no complete answer within the time limit") from None
        if output.finish_reason is FinishReason.ERROR:
            raise RuntimeError(output.error)
        return received_at, output

    def _report(self, report: StepReport) -> None:
        """Called in the engine's thread."""
        now = time.monotonic()
        self._waiting = float(report.stats.requests_waiting)
        with self._lock:
            outputs = list(report.outputs)
            if report.failure is not None:
                outputs = [
                    RequestOutput(each, [], 0, FinishReason.ERROR, error=report.failure)
                    for each in self._queues
                ]
            for output in outputs:
                if output.request_id in self._queues:
                    self._queues[output.request_id].put((now, output))
