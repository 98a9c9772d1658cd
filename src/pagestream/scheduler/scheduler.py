"""Scheduler: which requests run in the next step, and with how many tokens.

There are no phases. Each request has ``num_computed_tokens`` chasing ``num_tokens``; a step hands
out a token budget, running requests first, then waiting ones, each in order of arrival. Chunked
prefill and recomputation after a preemption are the same case: a request that is behind.

Owns every Request's mutable state and the two queues. It never sees tensors, text or the server.
Called by LLMEngine: ``schedule`` before a step, ``update`` with the step's tokens.
"""

from __future__ import annotations

from bisect import insort
from collections import deque

from pagestream.kvcache.kv_cache_manager import KVCacheManager
from pagestream.request import FinishReason, Request, RequestOutput, RequestStatus
from pagestream.scheduler.scheduler_output import NewRequest, ScheduledRequest, SchedulerOutput


class QueueFullError(ValueError):
    """The waiting queue is at max_num_waiting."""


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
    ) -> None:
        self._kv = kv_cache_manager
        self._max_num_seqs = max_num_seqs
        self._max_num_batched_tokens = max_num_batched_tokens
        self._max_num_waiting = max_num_waiting
        self._max_seq_len = max_seq_len
        self._requests: dict[str, Request] = {}
        self._waiting: deque[Request] = deque()
        self._running: list[Request] = []  # by arrival_order
        self._released: list[str] = []
        self._arrivals = 0
        self.num_preemptions = 0

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def request_ids(self) -> list[str]:
        return list(self._requests)

    def add_request(self, request: Request) -> None:
        """Queue a request that fits the pool when alone. Raises QueueFullError, or ValueError
        for an id in use."""
        if request.request_id in self._requests:
            raise ValueError(f"request_id {request.request_id!r} is already in use")
        if len(self._waiting) >= self._max_num_waiting:
            raise QueueFullError(
                f"the queue is full: {len(self._waiting)} requests are waiting and "
                f"max_num_waiting is {self._max_num_waiting}"
            )
        self._arrivals += 1
        request.arrival_order = self._arrivals
        self._requests[request.request_id] = request
        self._waiting.append(request)

    def abort_request(self, request_id: str) -> RequestOutput | None:
        """End a request now; None if it has ended already."""
        request = self._requests.get(request_id)
        if request is None:
            return None
        self._finish(request)
        return RequestOutput(request_id, [], FinishReason.ABORT)

    def schedule(self) -> SchedulerOutput:
        """Hand out the token budget. Token counts advance here, before the step has run, so that
        the next step can be scheduled while this one is in flight."""
        new_requests: list[NewRequest] = []
        scheduled: list[ScheduledRequest] = []
        budget = self._max_num_batched_tokens
        budget, preempted = self._schedule_running(budget, scheduled)
        if not preempted:
            self._schedule_waiting(budget, scheduled, new_requests)
        released, self._released = self._released, []
        return SchedulerOutput(released, new_requests, scheduled)

    def update(self, output: SchedulerOutput, token_ids: list[list[int]]) -> list[RequestOutput]:
        """Absorb a step's tokens, one list per scheduled request, and end what has ended."""
        results = []
        for share, new_token_ids in zip(output.scheduled, token_ids, strict=True):
            request = self._requests.get(share.request_id)
            if request is None or not new_token_ids:
                continue
            request.num_output_placeholders -= share.num_logits
            result = RequestOutput(request.request_id, [])
            for token_id in new_token_ids:
                request.output_token_ids.append(token_id)
                result.token_ids.append(token_id)
                result.finish_reason, result.stop_reason = self._check_stop(request, token_id)
                if result.finish_reason is not None:
                    self._finish(request)
                    break
            results.append(result)
        return results

    def _schedule_running(self, budget: int, scheduled: list[ScheduledRequest]) -> tuple[int, bool]:
        """Returns what is left of the budget, and whether a request lost its blocks."""
        preempted = False
        index = 0
        while index < len(self._running) and budget > 0:
            request = self._running[index]
            num_tokens = min(self._num_behind(request), budget)
            if num_tokens == 0:
                index += 1
                continue
            new_block_ids = self._kv.allocate_slots(
                request.request_id, request.num_computed_tokens + num_tokens
            )
            if new_block_ids is None:
                # The last in order pays, which may be the request itself: the first in order
                # therefore always progresses, and every request gets to be first.
                self._preempt(self._running[-1])
                preempted = True
                continue
            scheduled.append(self._take(request, num_tokens, new_block_ids))
            budget -= num_tokens
            index += 1
        return budget, preempted

    def _schedule_waiting(
        self, budget: int, scheduled: list[ScheduledRequest], new_requests: list[NewRequest]
    ) -> None:
        while self._waiting and budget > 0 and len(self._running) < self._max_num_seqs:
            request = self._waiting[0]
            # Room for all its known tokens at once, not for the first chunk only: otherwise
            # several long prompts start, run out of blocks together and undo one another.
            new_block_ids = self._kv.allocate_slots(request.request_id, request.num_tokens)
            if new_block_ids is None:
                break
            self._waiting.popleft()
            request.status = RequestStatus.RUNNING
            insort(self._running, request, key=lambda r: r.arrival_order)
            new_requests.append(
                NewRequest(
                    request_id=request.request_id,
                    token_ids=request.all_token_ids,
                    num_prompt_tokens=len(request.prompt_token_ids),
                    num_computed_tokens=request.num_computed_tokens,
                    sampling_params=request.sampling_params,
                    stop_token_ids=request.stop_token_ids,
                    seed=request.seed,
                )
            )
            num_tokens = min(self._num_behind(request), budget)
            scheduled.append(self._take(request, num_tokens, new_block_ids))
            budget -= num_tokens

    def _num_behind(self, request: Request) -> int:
        return request.num_tokens + request.num_output_placeholders - request.num_computed_tokens

    def _take(
        self, request: Request, num_tokens: int, new_block_ids: list[int]
    ) -> ScheduledRequest:
        num_logits = int(self._num_behind(request) == num_tokens)
        request.num_computed_tokens += num_tokens
        request.num_output_placeholders += num_logits
        return ScheduledRequest(request.request_id, num_tokens, num_logits, new_block_ids)

    def _preempt(self, request: Request) -> None:
        self._running.remove(request)
        self._kv.free(request.request_id)
        self._released.append(request.request_id)
        request.status = RequestStatus.PREEMPTED
        request.num_computed_tokens = 0
        request.num_preemptions += 1
        self.num_preemptions += 1
        self._waiting.appendleft(request)

    def _check_stop(
        self, request: Request, token_id: int
    ) -> tuple[FinishReason | None, int | None]:
        num_output_tokens = len(request.output_token_ids)
        params = request.sampling_params
        if token_id in request.stop_token_ids and num_output_tokens > params.min_tokens:
            named = token_id in params.stop_token_ids
            return FinishReason.STOP, token_id if named else None
        if num_output_tokens >= request.max_tokens or request.num_tokens >= self._max_seq_len:
            return FinishReason.LENGTH, None
        return None, None

    def _finish(self, request: Request) -> None:
        del self._requests[request.request_id]
        self._kv.free(request.request_id)
        if request.status is RequestStatus.RUNNING:
            self._running.remove(request)
            self._released.append(request.request_id)
        else:
            self._waiting.remove(request)
        request.status = RequestStatus.FINISHED
