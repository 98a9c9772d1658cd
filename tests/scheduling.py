"""A scheduler with a make-believe runner: tokens come from a function, not from a model."""

from __future__ import annotations

from collections.abc import Callable

from pagestream.kvcache.kv_cache_manager import KVCacheManager
from pagestream.request import Request, RequestOutput
from pagestream.sampling_params import SamplingParams
from pagestream.scheduler.scheduler import Scheduler
from pagestream.scheduler.scheduler_output import SchedulerOutput


def make_request(request_id: str, prompt_len: int, max_tokens: int = 4, **fields) -> Request:
    token_ids = fields.pop("token_ids", [1] * prompt_len)
    values = {
        "request_id": request_id,
        "token_ids": token_ids.copy(),
        "num_prompt_tokens": len(token_ids),
        "sampling_params": SamplingParams(),
        "max_tokens": max_tokens,
        "stop_token_ids": frozenset(),
        "seed": 0,
    }
    return Request(**{**values, **fields})


class Bench:
    """A scheduler, its KV manager, and what each step handed out."""

    def __init__(
        self,
        *,
        num_blocks: int = 100,
        block_size: int = 16,
        max_num_seqs: int = 8,
        max_num_batched_tokens: int = 64,
        max_num_waiting: int = 1000,
        max_seq_len: int = 1000,
        token: Callable[[str], int] = lambda request_id: 7,
        enable_prefix_caching: bool = False,
        **options,
    ) -> None:
        self.kv = KVCacheManager(num_blocks, block_size, enable_prefix_caching)
        self.scheduler = Scheduler(
            self.kv,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            max_num_waiting=max_num_waiting,
            max_seq_len=min(max_seq_len, self.kv.pool_tokens),
            **options,
        )
        self.token = token
        self.outputs: list[RequestOutput] = []

    def step(self) -> SchedulerOutput:
        output = self.scheduler.schedule()
        tokens = [[self.token(s.request_id)] * s.num_logits for s in output.scheduled]
        self.outputs += self.scheduler.update(output, tokens)
        return output

    def run(self, limit: int = 10_000) -> list[SchedulerOutput]:
        steps = []
        while self.scheduler.num_running or self.scheduler.num_waiting:
            steps.append(self.step())
            assert len(steps) < limit, "the scheduler makes no progress"
        return steps

    def tokens_of(self, request_id: str) -> list[int]:
        return [t for o in self.outputs if o.request_id == request_id for t in o.token_ids]

    def finish_reasons(self, request_id: str) -> list[str]:
        return [
            str(o.finish_reason)
            for o in self.outputs
            if o.request_id == request_id and o.finish_reason is not None
        ]
