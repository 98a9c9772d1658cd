"""TracedScheduler: a Scheduler that writes down what it does, and the record it leaves.

One JSON object a line: first an ``engine``, then, as they happen, an ``arrival`` for each answer, a
``step`` for each step once its tokens are known, and an ``end`` for what ended outside of a step
(aborts, deadlines). The classes below are the format: ``event`` is the class's name in small
letters, the other keys are its fields. LLMEngine takes this class in the place of Scheduler when
``step_trace`` is set; without it nothing of this runs. Read by the `pagestream trace` command.
"""

from __future__ import annotations

import dataclasses
import json
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pagestream.kvcache.kv_cache_manager import KVCacheManager
from pagestream.request import FinishReason, Request, RequestOutput, TokenLogprobs
from pagestream.scheduler.scheduler import Scheduler
from pagestream.scheduler.scheduler_output import ScheduledRequest, SchedulerOutput


@dataclass(slots=True)
class Engine:
    max_num_seqs: int
    max_num_batched_tokens: int
    num_blocks: int
    block_size: int
    static_batching: bool


@dataclass(slots=True)
class Arrival:
    """An answer came into the queue; times are seconds since the trace began."""

    request: int
    """Its number in this trace, by which all else refers to it."""
    request_id: str
    index: int
    num_prompt_tokens: int
    step: int
    """The next step to start, as is End.step."""
    time_s: float


@dataclass(slots=True)
class Share:
    """One request's part of a step."""

    request: int
    phase: str
    """prefill, decode, or recompute: what a preemption lost."""
    num_scheduled_tokens: int
    num_computed_tokens: int
    """Before the step."""
    num_cached_tokens: int | None = None
    """Found in the prefix cache; only where the request starts, or starts again."""
    num_new_tokens: int = 0
    finish_reason: str | None = None
    surplus: bool = False
    """The request had ended before this step's tokens were read: they are dropped."""


@dataclass(slots=True)
class Step:
    step: int
    start_s: float
    scheduled: list[Share]
    preempted: list[int]
    """Requests that lost their blocks before this step, to others in it."""
    num_waiting: int
    num_blocks_used: int
    """Held by requests, while the step runs."""
    num_blocks_cached: int
    """Free, but can still be found by their content."""
    end_s: float = 0.0


@dataclass(slots=True)
class End:
    """Of a request, outside of a step."""

    request: int
    finish_reason: str
    step: int
    time_s: float


@dataclass(slots=True)
class Trace:
    """A whole file."""

    engine: Engine
    arrivals: list[Arrival] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)
    ends: list[End] = field(default_factory=list)


@dataclass(slots=True)
class _Known:
    """A request that has not ended."""

    request: int
    num_tokens: int = 0
    """Known when it last started: below that it catches up."""
    phase: str = "prefill"


class TracedScheduler(Scheduler):
    """``external``: from a Request's id to the user's (request_id, index).

    Raises ValueError when ``path`` cannot be written; what it holds is replaced.
    """

    def __init__(
        self,
        path: str,
        external: Callable[[str], tuple[str, int]],
        kv_cache_manager: KVCacheManager,
        **options: Any,
    ) -> None:
        super().__init__(kv_cache_manager, **options)
        self._external = external
        self._engine = Engine(
            max_num_seqs=self._max_num_seqs,
            max_num_batched_tokens=self._max_num_batched_tokens,
            num_blocks=kv_cache_manager.num_blocks,
            block_size=kv_cache_manager.block_size,
            static_batching=self._static_batching,
        )
        self._path = Path(path)
        try:
            self.restart_trace()
        except OSError as error:
            raise ValueError(f"step_trace {path!r} cannot be written: {error.strerror}") from None

    def restart_trace(self) -> None:
        """Forget what was traced so far; for when no request is under way."""
        self._path.write_text("")
        self._began = time.monotonic()
        self._known: dict[str, _Known] = {}
        self._open_steps: deque[Step] = deque()  # not yet read
        self._preempted: list[int] = []  # before the next step
        self._num_arrivals = self._num_steps = 0
        self._write(self._engine)

    def add_request(self, request: Request) -> None:
        super().add_request(request)
        request_id, index = self._external(request.request_id)
        number = self._num_arrivals
        self._num_arrivals += 1
        self._known[request.request_id] = _Known(number)
        self._write(
            Arrival(
                number, request_id, index, request.num_prompt_tokens, self._num_steps, self._now()
            )
        )

    def abort_request(self, request_id: str) -> RequestOutput | None:
        output = super().abort_request(request_id)
        if output is not None:
            self._note_end(output)
        return output

    def expire(self, now: float) -> list[RequestOutput]:
        outputs = super().expire(now)
        for output in outputs:
            self._note_end(output)
        return outputs

    def schedule(self, now: float = 0.0) -> SchedulerOutput:
        start_s = self._now()
        output = super().schedule(now)
        # Released although it has not ended: preempted.
        for request_id in output.released_request_ids:
            known = self._known.get(request_id)
            if known is not None:
                known.phase = "recompute"
                self._preempted.append(known.request)
        if output.scheduled:
            self._open_step(output, start_s)
        return output

    def update(
        self,
        output: SchedulerOutput,
        token_ids: list[list[int]],
        logprobs: list[list[TokenLogprobs | None]] | None = None,
    ) -> list[RequestOutput]:
        results = super().update(output, token_ids, logprobs)
        step = self._open_steps.popleft()
        step.end_s = self._now()
        by_request = {result.request_id: result for result in results}
        for share, scheduled in zip(step.scheduled, output.scheduled, strict=True):
            share.surplus = scheduled.request_id not in self._known
            result = by_request.get(scheduled.request_id)
            if result is not None:
                share.num_new_tokens = len(result.token_ids)
                if result.finish_reason is not None:
                    share.finish_reason = str(result.finish_reason)
                    del self._known[scheduled.request_id]
        self._write(step)
        return results

    def _open_step(self, output: SchedulerOutput, start_s: float) -> None:
        cached = {}
        for new in output.new_requests:
            self._known[new.request_id].num_tokens = len(new.token_ids)
            cached[new.request_id] = new.num_computed_tokens
        self._open_steps.append(
            Step(
                step=self._num_steps,
                start_s=start_s,
                scheduled=[
                    self._share(share, cached.get(share.request_id)) for share in output.scheduled
                ],
                preempted=self._preempted,
                num_waiting=self.num_waiting,
                num_blocks_used=self._kv.num_blocks - self._kv.num_free_blocks,
                num_blocks_cached=self._kv.num_cached_blocks,
            )
        )
        self._preempted = []
        self._num_steps += 1

    def _share(self, share: ScheduledRequest, num_cached_tokens: int | None) -> Share:
        known = self._known[share.request_id]
        return Share(
            known.request,
            known.phase if share.num_computed_tokens < known.num_tokens else "decode",
            share.num_scheduled_tokens,
            share.num_computed_tokens,
            num_cached_tokens,
        )

    def _note_end(self, output: RequestOutput) -> None:
        known = self._known.pop(output.request_id)
        reason = str(output.finish_reason or FinishReason.ABORT)
        self._write(End(known.request, reason, self._num_steps, self._now()))

    def _now(self) -> float:
        return round(time.monotonic() - self._began, 6)

    def _write(self, record: Engine | Arrival | Step | End) -> None:
        values = {"event": type(record).__name__.lower(), **dataclasses.asdict(record)}
        # Opened for each line: whole lines at any time, and nothing to close at the end.
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(values, separators=(",", ":")) + "\n")


def read_trace(path: str | Path) -> Trace:
    """Raises ValueError for a file that is no step trace, naming the line."""
    trace: Trace | None = None
    for number, line in enumerate(Path(path).read_text(encoding="utf-8").splitlines(), 1):
        try:
            values = json.loads(line)
            event = values.pop("event")
            if event == "engine":
                trace = Trace(Engine(**values))
            elif trace is None:
                raise ValueError("no engine record before it")
            elif event == "arrival":
                trace.arrivals.append(Arrival(**values))
            elif event == "step":
                values["scheduled"] = [Share(**share) for share in values["scheduled"]]
                trace.steps.append(Step(**values))
            elif event == "end":
                trace.ends.append(End(**values))
            else:
                raise ValueError(f"unknown event {event!r}")
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{path}, line {number}: not a step trace: {error}") from None
    if trace is None:
        raise ValueError(f"{path} is empty: not a step trace")
    return trace
