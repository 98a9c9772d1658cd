"""Scheduler: which requests run in the next step, and with how many tokens.

There are no phases. Each request has ``num_computed_tokens`` chasing its known tokens; a step hands
out a token budget in one order over running and waiting requests. Chunked prefill, prefix hits and
recomputation after a preemption are the same case: a request that is behind.

    order = arrival_time + priority * priority_aging_s, then arrival

so a priority counts for ever less against those that waited longer, and nobody starves. The last
in order is preempted first; the first in order progresses in every step.

Owns every Request's mutable state and the two queues. It never sees tensors, text or the server.
Called by LLMEngine: ``schedule`` before a step, ``update`` with the step's tokens. Steps may
overlap: what a step in flight may still write is not given away before its update.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from dataclasses import dataclass, field

from pagestream.kvcache.kv_cache_manager import NEVER, KVCacheManager
from pagestream.request import (
    FinishReason,
    Request,
    RequestOutput,
    RequestStatus,
    TokenLogprobs,
)
from pagestream.scheduler.scheduler_output import NewRequest, ScheduledRequest, SchedulerOutput

_NOTHING_ALLOWED = (
    "no token is allowed: allowed_token_ids, bad_words, structured_output and the like leave none"
)


class QueueFullError(ValueError):
    """The waiting queue is at max_num_waiting."""


@dataclass(slots=True)
class _Step:
    """A step being put together."""

    budget: int
    now: float
    scheduled: list[ScheduledRequest] = field(default_factory=list)
    new_requests: list[NewRequest] = field(default_factory=list)
    admitting: bool = True
    """False once a waiting request did not fit, or one was preempted: blocks are short."""
    blocked: bool = False
    """The next in order needs blocks that a step in flight still holds."""


class Scheduler:
    """Token-budget scheduler over one KV cache."""

    def __init__(
        self,
        kv_cache_manager: KVCacheManager,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_num_waiting: int,
        max_seq_len: int,
        priority_aging_s: float = 10.0,
        static_batching: bool = False,
    ) -> None:
        """``static_batching``: start a batch only when the one before has ended altogether, as
        engines did before continuous batching; for comparison."""
        self._kv = kv_cache_manager
        self._max_num_seqs = max_num_seqs
        self._max_num_batched_tokens = max_num_batched_tokens
        self._max_num_waiting = max_num_waiting
        self._max_seq_len = max_seq_len
        self._priority_aging_s = priority_aging_s
        self._static_batching = static_batching
        self._requests: dict[str, Request] = {}
        self._leaving: dict[str, Request] = {}  # ended, with a step in flight
        self._waiting: list[Request] = []  # by order, as is the next
        self._running: list[Request] = []
        self._deadlines: list[tuple[float, str, Request]] = []  # a heap
        self._released: list[str] = []
        self._arrivals = 0
        self.num_preemptions = 0
        self.num_prefix_queries = 0
        """Tokens of admitted prompts looked up in the prefix cache, and found there (next)."""
        self.num_prefix_hits = 0

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def request_ids(self) -> list[str]:
        """Of all that have not ended, in no order."""
        return list(self._requests)

    def first_in_order(self) -> Request | None:
        heads = [queue[0] for queue in (self._running, self._waiting) if queue]
        return min(heads, key=lambda request: request.order, default=None)

    def add_request(self, request: Request) -> None:
        """Queue a request that fits the pool when alone. Raises QueueFullError, or ValueError
        for an id in use."""
        request_id = request.request_id
        if request_id in self._requests or request_id in self._leaving:
            raise ValueError(f"request_id {request_id!r} is already in use")
        if len(self._waiting) >= self._max_num_waiting:
            raise QueueFullError(
                f"the queue is full: {len(self._waiting)} requests are waiting and "
                f"max_num_waiting is {self._max_num_waiting}"
            )
        self._arrivals += 1
        delay = request.sampling_params.priority * self._priority_aging_s
        request.order = (request.arrival_time + delay, self._arrivals)
        self._requests[request_id] = request
        insort(self._waiting, request, key=_order)
        if request.deadline is not None:
            heapq.heappush(self._deadlines, (request.deadline, request_id, request))

    def abort_request(self, request_id: str) -> RequestOutput | None:
        """End a request now; None if it has ended already."""
        request = self._requests.get(request_id)
        if request is None:
            return None
        self._finish(request)
        return RequestOutput(request_id, [], finish_reason=FinishReason.ABORT)

    def expire(self, now: float) -> list[RequestOutput]:
        """End every request whose deadline has passed, waiting or running."""
        outputs = []
        while self._deadlines and self._deadlines[0][0] <= now:
            _, request_id, request = heapq.heappop(self._deadlines)
            if request.status is not RequestStatus.FINISHED:
                self._finish(request)
                outputs.append(RequestOutput(request_id, [], 0, FinishReason.ABORT, "deadline"))
        return outputs

    def schedule(self, now: float = 0.0) -> SchedulerOutput:
        """Hand out the token budget. Token counts advance here, before the step has run, so that
        the next step can be scheduled while this one is in flight.

        The result may be empty although requests run: then a step in flight must be updated first.
        ``now``: time.monotonic() seconds, for what requests report of their waiting.
        """
        step = _Step(self._max_num_batched_tokens, now)
        running = self._running.copy()
        step.admitting = not (self._static_batching and running)
        position = 0
        while step.budget > 0 and not step.blocked:
            current = running[position] if position < len(running) else None
            waiting = self._waiting[0] if step.admitting and self._waiting else None
            if waiting is not None and (current is None or waiting.order < current.order):
                step.admitting = self._admit(waiting, step)
            elif current is not None:
                position += 1
                if current.status is RequestStatus.RUNNING:
                    self._advance(current, step)
            else:
                break
        released, self._released = self._released, []
        return SchedulerOutput(released, step.new_requests, step.scheduled)

    def update(
        self,
        output: SchedulerOutput,
        token_ids: list[list[int]],
        logprobs: list[list[TokenLogprobs | None]] | None = None,
    ) -> list[RequestOutput]:
        """Absorb a step's tokens, one list per scheduled request, and end what has ended.

        A negative token means that the request's own controls leave nothing to draw.
        """
        results = []
        for index, share in enumerate(output.scheduled):
            request = self._requests.get(share.request_id)
            if request is None:
                self._leave(share.request_id)
                continue
            request.num_steps_in_flight -= 1
            result = None
            if token_ids[index]:
                request.num_output_placeholders -= share.num_logits
                result = self._append(request, token_ids[index])
                if logprobs is not None and request.sampling_params.logprobs is not None:
                    found = logprobs[index][: len(result.token_ids)]
                    result.logprobs = [item for item in found if item is not None]
                results.append(result)
            if request.num_computed_tokens >= request.next_cached_at:
                request.next_cached_at = self._kv.cache_blocks(
                    request.request_id, request.token_ids, request.num_computed_tokens
                )
            if result is not None and result.finish_reason is not None:
                self._finish(request)
        return results

    def _append(self, request: Request, new_token_ids: list[int]) -> RequestOutput:
        result = RequestOutput(request.request_id, new_token_ids)
        token_ids = request.token_ids
        if len(token_ids) == request.num_prompt_tokens:
            result.num_cached_tokens = request.num_cached_tokens
            result.queued_s = request.queued_s
        for count, token_id in enumerate(new_token_ids, 1):
            if token_id < 0:
                result.token_ids = new_token_ids[: count - 1]
                result.finish_reason, result.error = FinishReason.ERROR, _NOTHING_ALLOWED
                break
            token_ids.append(token_id)
            # The sampler draws no stop token before min_tokens.
            if token_id in request.stop_token_ids:
                named = request.sampling_params.stop_token_ids
                result.finish_reason = FinishReason.STOP
                result.stop_reason = token_id if token_id in named else None
            elif (
                len(token_ids) - request.num_prompt_tokens >= request.max_tokens
                or len(token_ids) >= self._max_seq_len
            ):
                result.finish_reason = FinishReason.LENGTH
            if result.finish_reason is not None:
                result.token_ids = new_token_ids[:count]
                break
        return result

    def _admit(self, request: Request, step: _Step) -> bool:
        """Start the first waiting request, at the cost of those later in order if need be."""
        while True:
            if len(self._running) < self._max_num_seqs:
                # Room for all its known tokens at once, not for the first chunk only: otherwise
                # several long prompts start, run out of blocks together and undo one another.
                admitted = self._kv.admit(
                    request.request_id,
                    request.token_ids,
                    request.cache_root,
                    read_cache=request.sampling_params.reads_prefix_cache,
                )
                if admitted is not None:
                    break
            if not self._worth_preempting_for(request) or not self._preempt_last(step):
                return False
        self._waiting.pop(0)
        self._start(request, *admitted, step)
        return step.admitting

    def _worth_preempting_for(self, request: Request) -> bool:
        """Whether those later in order hold enough for it; all would be lost for nothing if not."""
        later = self._running[bisect_left(self._running, request.order, key=_order) :]
        room = self._kv.num_free_blocks * self._kv.block_size
        room += sum(running.num_slots for running in later)
        return bool(later) and len(request.token_ids) <= room

    def _start(
        self, request: Request, block_ids: list[int], num_cached_tokens: int, step: _Step
    ) -> None:
        request.status = RequestStatus.RUNNING
        request.num_computed_tokens = num_cached_tokens
        request.num_slots = len(block_ids) * self._kv.block_size
        request.next_cached_at = self._kv.next_cached_at(num_cached_tokens)
        if not request.sampling_params.prefix_cache:
            request.next_cached_at = NEVER
        if request.num_cached_tokens is None:
            request.num_cached_tokens = num_cached_tokens
            request.queued_s = step.now - request.arrival_time
            self.num_prefix_queries += len(request.token_ids)
            self.num_prefix_hits += num_cached_tokens
        insort(self._running, request, key=_order)
        step.new_requests.append(
            NewRequest(
                request_id=request.request_id,
                token_ids=request.token_ids.copy(),
                num_prompt_tokens=request.num_prompt_tokens,
                num_computed_tokens=num_cached_tokens,
                sampling_params=request.sampling_params,
                stop_token_ids=request.stop_token_ids,
                seed=request.seed,
            )
        )
        num_behind = len(request.token_ids) - num_cached_tokens
        self._take(request, min(num_behind, step.budget), num_behind, block_ids, step)

    def _advance(self, request: Request, step: _Step) -> None:
        """Give a running request its share, at the cost of those later in order if need be."""
        placeholders = request.num_output_placeholders
        num_known = len(request.token_ids) + placeholders
        if placeholders and (
            num_known - request.num_prompt_tokens >= request.max_tokens
            or num_known >= self._max_seq_len
        ):
            return  # the token in flight is its last
        num_behind = num_known - request.num_computed_tokens
        if num_behind == 0:
            return
        num_tokens = min(num_behind, step.budget)
        target = request.num_computed_tokens + num_tokens
        new_block_ids: list[int] = []
        if target > request.num_slots:
            while (added := self._kv.allocate_slots(request.request_id, target)) is None:
                if not self._preempt_last(step) or request.status is not RequestStatus.RUNNING:
                    return
            new_block_ids = added
            request.num_slots += len(added) * self._kv.block_size
        self._take(request, num_tokens, num_behind, new_block_ids, step)

    def _take(
        self,
        request: Request,
        num_tokens: int,
        num_behind: int,
        new_block_ids: list[int],
        step: _Step,
    ) -> None:
        step.budget -= num_tokens
        num_logits = 1 if num_tokens == num_behind else 0
        num_computed_tokens = request.num_computed_tokens
        request.num_computed_tokens += num_tokens
        request.num_output_placeholders += num_logits
        request.num_steps_in_flight += 1
        step.scheduled.append(
            ScheduledRequest(
                request.request_id, num_tokens, num_logits, new_block_ids, num_computed_tokens
            )
        )

    def _preempt_last(self, step: _Step) -> bool:
        """Take the blocks of the last in order; False if a step in flight still uses them."""
        request = self._running[-1]
        if request.num_steps_in_flight:
            step.blocked = True
            return False
        self._running.pop()
        self._kv.free(request.request_id)
        self._released.append(request.request_id)
        request.status = RequestStatus.PREEMPTED
        request.num_computed_tokens = request.num_slots = 0
        self.num_preemptions += 1
        step.admitting = False
        insort(self._waiting, request, key=_order)
        return True

    def _finish(self, request: Request) -> None:
        del self._requests[request.request_id]
        queue = self._waiting
        if request.status is RequestStatus.RUNNING:
            queue = self._running
            self._released.append(request.request_id)
        del queue[bisect_left(queue, request.order, key=_order)]
        request.status = RequestStatus.FINISHED
        if request.num_steps_in_flight:
            self._leaving[request.request_id] = request
        else:
            self._kv.free(request.request_id)

    def _leave(self, request_id: str) -> None:
        """A step in flight of an ended request is over: its token is surplus."""
        request = self._leaving[request_id]
        request.num_steps_in_flight -= 1
        if request.num_steps_in_flight == 0:
            del self._leaving[request_id]
            self._kv.free(request_id)


def _order(request: Request) -> tuple[float, int]:
    return request.order
