"""LLMEngine: requests in, one step at a time, tokens out. No threads, no text, no server.

Owns the scheduler, the KV manager and the runner, and is the only place where they meet. Driven by
LLM offline and by EngineLoop in the server, through the same calls.

    overlap off:  schedule 1, launch 1, read 1 | schedule 2, launch 2, read 2 | ...
    overlap on:   schedule 1, launch 1         | schedule 2, launch 2, read 1 | ...
"""

from __future__ import annotations

import secrets
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from pathlib import Path

from pagestream.config import EngineConfig, ModelConfig, resolve_max_model_len
from pagestream.engine.answers import Answers, answer_seed
from pagestream.engine.grammars import Grammars
from pagestream.engine.metrics import EngineStats
from pagestream.engine.step_trace import TracedScheduler
from pagestream.kvcache.kv_cache_manager import KVCacheManager, chain_root
from pagestream.model_store import resolve_model
from pagestream.request import FinishReason, Request, RequestOutput, TokenLogprobs
from pagestream.runner.decode_graphs import Recorder
from pagestream.runner.model_runner import ModelRunner
from pagestream.runner.step_future import StepFuture
from pagestream.sampling_params import Limits, SamplingParams, validate_prompt
from pagestream.scheduler.scheduler import QueueFullError, Scheduler
from pagestream.scheduler.scheduler_output import SchedulerOutput
from pagestream_kernels.dispatch import warn_of_compiles

_COMPILE_WAIT_S = 0.02
_WARM_UP = [
    SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True, prefix_cache=False),
    SamplingParams(
        temperature=0.9,
        top_k=10,
        top_p=0.9,
        min_p=0.01,
        repetition_penalty=1.1,
        frequency_penalty=0.1,
        logprobs=2,
        prompt_logprobs=2,
        max_tokens=2,
        ignore_eos=True,
        prefix_cache=False,
    ),
]


class LLMEngine:
    """Load the model and be ready to step. ``progress(done, total)`` follows the weights;
    ``recorder`` is ModelRunner's.

    Raises ValueError or FileNotFoundError for a configuration or checkpoint that cannot work.
    """

    def __init__(
        self,
        config: EngineConfig,
        progress: Callable[[int, int], None] | None = None,
        recorder: Recorder | None = None,
    ) -> None:
        directory = resolve_model(config.model)
        self.model_config = ModelConfig.from_hf(directory)
        self.config = config
        max_model_len = resolve_max_model_len(config, self.model_config)
        self._runner = ModelRunner(
            config, self.model_config, Path(directory), max_model_len, progress, recorder
        )
        self._kv = KVCacheManager(
            self._runner.num_blocks, config.block_size, config.enable_prefix_caching
        )
        self.limits = Limits(self.model_config.vocab_size, max_model_len, self._kv.pool_tokens)
        self._answers = Answers()
        make_scheduler: Callable[..., Scheduler] = Scheduler
        if config.step_trace is not None:
            make_scheduler = partial(TracedScheduler, config.step_trace, self._answers.external)
        self._scheduler = make_scheduler(
            self._kv,
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=self._runner.max_num_batched_tokens,
            max_num_waiting=config.max_num_waiting,
            max_seq_len=min(max_model_len, self._kv.pool_tokens),
            priority_aging_s=config.priority_aging_s,
            static_batching=config.static_batching,
        )
        overlap = config.overlap_scheduling
        self._overlap = overlap == "on" or (
            overlap == "auto" and self._runner.device.type == "cuda"
        )
        self._in_flight: deque[tuple[SchedulerOutput, StepFuture]] = deque()
        self._ended: list[RequestOutput] = []
        self._grammars = Grammars(Path(directory), self.model_config)
        self._prompt_logprobs: dict[str, list[TokenLogprobs | None]] = {}  # until the first token
        self._step_batch_size = 0
        self._generated_tokens = 0
        self._cancelled = 0
        self._expired = 0

    def add_request(
        self,
        request_id: str,
        prompt_token_ids: list[int],
        sampling_params: SamplingParams,
        arrival_time: float | None = None,
    ) -> None:
        """Queue a request. Raises ValueError (QueueFullError among them), naming the field.

        ``arrival_time``: time.monotonic() when the user sent it, from which its deadline and its
        place in the order count; None: now.
        """
        validate_prompt(prompt_token_ids, self.limits)
        sampling_params.validate(self.limits)
        n, waiting = sampling_params.n, self.num_waiting
        if waiting + n > self.config.max_num_waiting:
            raise QueueFullError(
                f"the queue is full: {waiting} requests are waiting, {n} came, "
                f"and max_num_waiting is {self.config.max_num_waiting}"
            )
        arrival_time = time.monotonic() if arrival_time is None else arrival_time
        seed = sampling_params.seed
        seed = secrets.randbits(64) if seed is None else seed
        requests = []
        for index, internal_id in enumerate(self._answers.add(request_id, n)):
            request = self._make_request(
                internal_id, prompt_token_ids, sampling_params, arrival_time
            )
            request.seed = answer_seed(seed, index)
            if sampling_params.prompt_logprobs is not None:
                self._prompt_logprobs[internal_id] = [None]
            requests.append(request)
        if sampling_params.structured_output is not None:
            self._grammars.park(requests)
            return
        for request in requests:
            self._scheduler.add_request(request)

    def _make_request(
        self,
        internal_id: str,
        prompt_token_ids: list[int],
        sampling_params: SamplingParams,
        arrival_time: float,
    ) -> Request:
        """With every default resolved."""
        room = min(self.limits.max_model_len, self._kv.pool_tokens) - len(prompt_token_ids)
        max_tokens = sampling_params.max_tokens or self.config.default_max_tokens
        stop_token_ids = frozenset(sampling_params.stop_token_ids)
        # A grammar ends with an end-of-sequence token, whatever else the request says of those.
        if not sampling_params.ignore_eos or sampling_params.structured_output is not None:
            stop_token_ids |= self.model_config.eos_token_ids
        deadline_ms = sampling_params.deadline_ms
        return Request(
            request_id=internal_id,
            token_ids=prompt_token_ids.copy(),
            num_prompt_tokens=len(prompt_token_ids),
            sampling_params=sampling_params,
            max_tokens=min(max_tokens, room),
            stop_token_ids=stop_token_ids,
            seed=0,
            arrival_time=arrival_time,
            deadline=None if deadline_ms is None else arrival_time + deadline_ms / 1000,
            cache_root=chain_root("", sampling_params.cache_salt),
        )

    def abort_request(self, request_id: str, index: int = -1) -> None:
        """End a request, or one of its n answers; the next step reports it. Nothing happens if it
        has ended already."""
        for internal_id in self._answers.find(request_id, index):
            ended = self._scheduler.abort_request(internal_id)
            if self._grammars.unpark(internal_id):
                ended = RequestOutput(internal_id, [], finish_reason=FinishReason.ABORT)
            if ended is not None:
                self._cancelled += 1
                self._ended.append(ended)

    def abort_all(self) -> None:
        for request_id in self._answers.request_ids:
            self.abort_request(request_id)

    def warm_up(self) -> None:
        """Run one full-budget prefill, and beside its decode steps a request with every control of
        sampling, so that no user pays for first-touch memory, thread pools, operator caches and
        compilations. Counters start after it; kernels that compile after it are warned of."""
        self._runner.warm_up_sampling()
        most = min(self.limits.max_model_len, self._kv.pool_tokens) - 3
        length = max(1, min(self._runner.max_num_batched_tokens, most))
        for index, params in enumerate(_WARM_UP):
            self.add_request(f"warm-up {index}", [0] * length, params)
            self.step()
            length = 1
        while self.has_unfinished_requests():
            self.step()
        self._generated_tokens = self._step_batch_size = 0
        self._scheduler.num_prefix_queries = self._scheduler.num_preemptions = 0
        warn_of_compiles()
        if isinstance(self._scheduler, TracedScheduler):
            self._scheduler.restart_trace()

    def has_unfinished_requests(self) -> bool:
        return bool(
            self._scheduler.num_running or self.num_waiting or self._ended or self._in_flight
        )

    @property
    def num_waiting(self) -> int:
        """In the queue, or waiting for their grammar to be compiled."""
        return self._scheduler.num_waiting + self._grammars.num_parked

    def has_room(self, n: int = 1) -> bool:
        """Whether a further request for n answers would soon run, and fits the queue."""
        waiting = self.num_waiting
        fits = waiting + n <= self.config.max_num_waiting
        # An empty queue is as much room as there will ever be: let add_request say what is wrong.
        return not waiting or (fits and waiting < self.config.max_num_seqs)

    def step(self) -> list[RequestOutput]:
        """Launch one step, read one step (the same, or the one before), return what it added."""
        now = time.monotonic()
        expired = self._scheduler.expire(now)
        self._expired += len(expired)
        if self._grammars.num_parked:
            self._admit_parked()
        outputs, self._ended = self._ended + expired, []
        launched = self._launch(now, outputs)
        # A step in flight is left unread only while another one keeps the device busy behind it.
        keep = 1 if self._overlap and launched else 0
        while len(self._in_flight) > keep:
            outputs += self._read()
        return [self._deliver(output) for output in outputs]

    def _admit_parked(self) -> None:
        """Queue requests whose grammar is compiled; sleep a little if there is nothing else."""
        idle = not (self._scheduler.num_running or self._scheduler.num_waiting or self._in_flight)
        for request, error in self._grammars.ready(_COMPILE_WAIT_S if idle else 0.0):
            try:
                if error is not None:
                    raise ValueError(error)
                self._scheduler.add_request(request)
            except ValueError as refused:
                message = str(refused)
                self._ended.append(
                    RequestOutput(request.request_id, [], 0, FinishReason.ERROR, error=message)
                )

    def _launch(self, now: float, outputs: list[RequestOutput]) -> bool:
        """Start a step, if anything can run. What had to be read before goes to ``outputs``."""
        scheduled = self._scheduler.schedule(now)
        if not scheduled.scheduled:
            # Nothing can run, yet the runner must hear of released rows.
            self._runner.release(scheduled.released_request_ids)
            return False
        self._step_batch_size = len(scheduled.scheduled)
        self._runner.forward(scheduled)
        bitmask = None
        if self._grammars.concern(scheduled):
            # A mask needs every token before it; the forward pass, which runs meanwhile, did not.
            while self._in_flight:
                outputs += self._read()
            bitmask = self._grammars.bitmask(scheduled)
        self._in_flight.append((scheduled, self._runner.sample(bitmask)))
        return True

    def _read(self) -> list[RequestOutput]:
        scheduled, future = self._in_flight.popleft()
        for index, (position, found) in future.prompt_logprobs().items():
            request_id = scheduled.scheduled[index].request_id
            known = self._prompt_logprobs.get(request_id)
            if known is not None:
                known[position:] = found  # a preempted prompt is computed again
        outputs = self._scheduler.update(scheduled, future.result(), future.logprobs())
        for output in outputs:
            self._grammars.accept(output.request_id, output.token_ids)
        self._generated_tokens += sum(len(output.token_ids) for output in outputs)
        return outputs

    def _deliver(self, output: RequestOutput) -> RequestOutput:
        """From the scheduler's terms to the user's."""
        internal_id = output.request_id
        output.request_id, output.index = self._answers.external(internal_id)
        if output.token_ids or output.finish_reason is not None:
            output.prompt_logprobs = self._prompt_logprobs.pop(internal_id, None)
        if output.finish_reason is not None:
            self._answers.end(internal_id)
            self._grammars.end(internal_id)
        return output

    @property
    def stats(self) -> EngineStats:
        scheduler = self._scheduler
        return EngineStats(
            requests_running=scheduler.num_running,
            requests_waiting=self.num_waiting,
            kv_blocks_free=self._kv.num_free_blocks,
            kv_blocks_total=self._kv.num_blocks,
            kv_blocks_cached=self._kv.num_cached_blocks,
            step_batch_size=self._step_batch_size,
            generated_tokens_total=self._generated_tokens,
            preemptions_total=scheduler.num_preemptions,
            cancelled_total=self._cancelled,
            expired_total=self._expired,
            prefix_queries_total=scheduler.num_prefix_queries,
            prefix_hits_total=scheduler.num_prefix_hits,
        )
