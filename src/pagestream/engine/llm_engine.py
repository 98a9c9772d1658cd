"""LLMEngine: requests in, one step at a time, tokens out. No threads, no text, no server.

Owns the scheduler, the KV manager and the runner, and is the only place where they meet. Driven by
LLM offline and by EngineLoop in the server, through the same calls.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable
from pathlib import Path

from pagestream.config import EngineConfig, ModelConfig, resolve_max_model_len
from pagestream.engine.metrics import EngineStats
from pagestream.kvcache.kv_cache_manager import KVCacheManager
from pagestream.model_store import resolve_model
from pagestream.request import Request, RequestOutput
from pagestream.runner.model_runner import ModelRunner
from pagestream.sampling_params import Limits, SamplingParams, validate_prompt
from pagestream.scheduler.scheduler import Scheduler


class LLMEngine:
    """Load the model and be ready to step. ``progress(done, total)`` follows the weights.

    Raises ValueError or FileNotFoundError for a configuration or checkpoint that cannot work.
    """

    def __init__(
        self, config: EngineConfig, progress: Callable[[int, int], None] | None = None
    ) -> None:
        directory = resolve_model(config.model)
        self.model_config = ModelConfig.from_hf(directory)
        self.config = config
        max_model_len = resolve_max_model_len(config, self.model_config)
        self._runner = ModelRunner(
            config, self.model_config, Path(directory), max_model_len, progress
        )
        self._kv = KVCacheManager(self._runner.num_blocks, config.block_size)
        self.limits = Limits(self.model_config.vocab_size, max_model_len, self._kv.pool_tokens)
        self._scheduler = Scheduler(
            self._kv,
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
            max_num_waiting=config.max_num_waiting,
            max_seq_len=min(max_model_len, self._kv.pool_tokens),
        )
        self._ended: list[RequestOutput] = []
        self._step_batch_size = 0
        self._generated_tokens = 0
        self._cancelled = 0

    def add_request(
        self, request_id: str, prompt_token_ids: list[int], sampling_params: SamplingParams
    ) -> None:
        """Queue a request. Raises ValueError (QueueFullError among them), naming the field."""
        validate_prompt(prompt_token_ids, self.limits)
        sampling_params.validate(self.limits)
        room = min(self.limits.max_model_len, self._kv.pool_tokens) - len(prompt_token_ids)
        max_tokens = sampling_params.max_tokens or self.config.default_max_tokens
        stop_token_ids = frozenset(sampling_params.stop_token_ids)
        if not sampling_params.ignore_eos:
            stop_token_ids |= self.model_config.eos_token_ids
        seed = sampling_params.seed
        self._scheduler.add_request(
            Request(
                request_id=request_id,
                prompt_token_ids=prompt_token_ids,
                sampling_params=sampling_params,
                max_tokens=min(max_tokens, room),
                stop_token_ids=stop_token_ids,
                seed=secrets.randbits(64) if seed is None else seed,
            )
        )

    def abort_request(self, request_id: str) -> None:
        """End a request; the next step reports it. Nothing happens if it has ended already."""
        ended = self._scheduler.abort_request(request_id)
        if ended is not None:
            self._cancelled += 1
            self._ended.append(ended)

    def abort_all(self) -> None:
        for request_id in self._scheduler.request_ids:
            self.abort_request(request_id)

    def warm_up(self) -> None:
        """Run one full-budget prefill and a decode step, so that the first user does not pay for
        first-touch memory, thread pools and operator caches. Counters start after it."""
        most = min(self.limits.max_model_len, self._kv.pool_tokens) - 2
        length = max(1, min(self.config.max_num_batched_tokens, most))
        params = SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True)
        self.add_request("warm-up", [0] * length, params)
        while self.has_unfinished_requests():
            self.step()
        self._generated_tokens = self._step_batch_size = 0

    def has_unfinished_requests(self) -> bool:
        scheduler = self._scheduler
        return bool(scheduler.num_running or scheduler.num_waiting or self._ended)

    def has_room(self) -> bool:
        """Whether a further request would soon run, rather than only wait in the queue."""
        return self._scheduler.num_waiting < min(
            self.config.max_num_seqs, self.config.max_num_waiting
        )

    def step(self) -> list[RequestOutput]:
        """Run one step and return what it added, per request."""
        outputs, self._ended = self._ended, []
        scheduled = self._scheduler.schedule()
        self._step_batch_size = len(scheduled.scheduled)
        if not scheduled.scheduled:
            # Nothing runs, yet the runner must hear of released rows.
            self._runner.release(scheduled.released_request_ids)
            return outputs
        self._runner.forward(scheduled)
        future = self._runner.sample()
        stepped = self._scheduler.update(scheduled, future.result())
        self._generated_tokens += sum(len(output.token_ids) for output in stepped)
        return outputs + stepped

    @property
    def stats(self) -> EngineStats:
        return EngineStats(
            requests_running=self._scheduler.num_running,
            requests_waiting=self._scheduler.num_waiting,
            kv_blocks_free=self._kv.num_free_blocks,
            kv_blocks_total=self._kv.num_blocks,
            step_batch_size=self._step_batch_size,
            generated_tokens_total=self._generated_tokens,
            preemptions_total=self._scheduler.num_preemptions,
            cancelled_total=self._cancelled,
        )
