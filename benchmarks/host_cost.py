"""What scheduling costs on the host: scheduler and KV manager alone, without a model.

A make-believe runner answers each step with one token per request, so what is timed is what
LLMEngine does around the device: ``schedule`` before a step and ``update`` after it. The prefix
cache is on, and garbage is collected as in the engine. Exits with 1 when a bound is missed;
`make bench-host` runs it, benchmarks/README.md says how to read it.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import platform
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table

# Imported for its weight: the collector's full passes walk over all that torch has brought along.
import pagestream.engine.llm_engine  # noqa: F401
from pagestream.kvcache.kv_cache_manager import KVCacheManager, chain_root
from pagestream.request import Request
from pagestream.sampling_params import SamplingParams
from pagestream.scheduler.scheduler import Scheduler

BATCH_SIZES = (64, 256, 1024)
BOUND_AT = 256
STEP_BOUND_MS = 0.5
GROWTH_BOUND = 5.0
"""Of the median, when the requests become four times as many; linear is 4."""
LOOKUP_BOUND_MS = 5.0
LOOKUP_TOKENS = 32 * 1024
BLOCK_SIZE = 64
PROMPT_TOKENS = 256
CHURN_TOKENS = 64
"""Output of each request in the steps in which requests come and go."""
ROOT = chain_root("", "")


@dataclass(frozen=True)
class Row:
    name: str
    times_ms: list[float]
    bound_ms: float | None = None

    @property
    def median_ms(self) -> float:
        return statistics.median(self.times_ms)

    @property
    def p90_ms(self) -> float:
        return statistics.quantiles(self.times_ms, n=10)[-1]

    @property
    def missed(self) -> bool:
        return self.bound_ms is not None and self.median_ms >= self.bound_ms


def make_request(index: int, prompt: list[int], max_tokens: int) -> Request:
    return Request(
        request_id=f"4:{index}:0",
        token_ids=prompt.copy(),
        num_prompt_tokens=len(prompt),
        sampling_params=SamplingParams(ignore_eos=True),
        max_tokens=max_tokens,
        stop_token_ids=frozenset(),
        seed=index,
        cache_root=ROOT,
    )


def make_scheduler(num_requests: int, tokens_each: int, budget: int) -> Scheduler:
    num_blocks = num_requests * -(-tokens_each // BLOCK_SIZE)
    return Scheduler(
        KVCacheManager(num_blocks, BLOCK_SIZE, enable_prefix_caching=True),
        max_num_seqs=num_requests,
        max_num_batched_tokens=budget,
        max_num_waiting=num_requests,
        max_seq_len=num_blocks * BLOCK_SIZE,
    )


def step(scheduler: Scheduler) -> float:
    """Milliseconds that the host spends on one step; making the tokens up is not part of it."""
    start = time.perf_counter()
    output = scheduler.schedule(start)
    scheduled = time.perf_counter()
    token_ids = [[7] * share.num_logits for share in output.scheduled]
    answered = time.perf_counter()
    scheduler.update(output, token_ids)
    return (time.perf_counter() - answered + scheduled - start) * 1000


def collect_as_the_engine_does() -> None:
    """What EngineLoop does when it is warm."""
    gc.unfreeze()
    gc.collect()
    gc.freeze()


def collect_without_freezing() -> None:
    gc.unfreeze()
    gc.collect()


def decoding(
    num_requests: int,
    num_steps: int,
    prepare_gc: Callable[[], None] = collect_as_the_engine_does,
) -> list[float]:
    """Each step while all requests decode, each at another place in its block."""
    max_tokens = num_steps + 10
    longest = PROMPT_TOKENS + BLOCK_SIZE
    # The budget has room for all prompts in the first step: from the second on, all decode.
    scheduler = make_scheduler(num_requests, longest + max_tokens, num_requests * longest)
    for index in range(num_requests):
        prompt = [index] * (PROMPT_TOKENS + index % BLOCK_SIZE)
        scheduler.add_request(make_request(index, prompt, max_tokens))
    for _ in range(5):
        step(scheduler)
    prepare_gc()
    times = [step(scheduler) for _ in range(num_steps)]
    assert scheduler.num_running == num_requests, "not all requests were decoding"
    return times


def coming_and_going(num_requests: int, num_steps: int) -> list[float]:
    """Each step while one request in CHURN_TOKENS ends and another, with a new prompt, starts."""
    per_step = num_requests // CHURN_TOKENS
    tokens_each = PROMPT_TOKENS + CHURN_TOKENS
    scheduler = make_scheduler(num_requests, tokens_each, num_requests + per_step * PROMPT_TOKENS)
    times = []
    for number in range(2 * CHURN_TOKENS + num_steps):
        for index in range(number * per_step, (number + 1) * per_step):
            scheduler.add_request(make_request(index, [index] * PROMPT_TOKENS, CHURN_TOKENS))
        if number == 2 * CHURN_TOKENS:
            collect_as_the_engine_does()
            assert scheduler.num_running >= num_requests - per_step
        times.append(step(scheduler))
    return times[2 * CHURN_TOKENS :]


def lookup(block_size: int, hit: bool, repeats: int) -> list[float]:
    """Admitting a long prompt: hashing it, looking its blocks up, and taking or sharing them."""
    kv = KVCacheManager(LOOKUP_TOKENS // block_size, block_size, enable_prefix_caching=True)
    times = []
    for index in range(repeats):
        prompt = [0 if hit else index, *range(1, LOOKUP_TOKENS)]
        start = time.perf_counter()
        admitted = kv.admit(str(index), prompt, ROOT, read_cache=True)
        elapsed = time.perf_counter() - start
        assert admitted is not None
        found = LOOKUP_TOKENS - block_size if hit and index > 0 else 0
        assert admitted[1] == found, f"{admitted[1]} tokens found in the cache, not {found}"
        kv.cache_blocks(str(index), prompt, LOOKUP_TOKENS)
        kv.free(str(index))
        times.append(elapsed * 1000)
    return times[1:]  # before the first, there is nothing to hit


def measure(num_steps: int) -> list[Row]:
    rows = [
        Row(
            f"step, {number} decoding",
            decoding(number, num_steps),
            STEP_BOUND_MS if number == BOUND_AT else None,
        )
        for number in BATCH_SIZES
    ]
    for number in BATCH_SIZES:
        name = f"step, {number} running, {number // CHURN_TOKENS} come and go"
        rows.append(Row(name, coming_and_going(number, num_steps)))
    rows.append(
        Row(
            f"step, {BOUND_AT} decoding, without gc.freeze",
            decoding(BOUND_AT, 4 * num_steps, collect_without_freezing),
        )
    )
    collect_as_the_engine_does()
    for block_size in (64, 16):
        for hit, what in ((False, "nothing cached"), (True, "all cached")):
            name = f"{LOOKUP_TOKENS // 1024}k-token prompt, blocks of {block_size}, {what}"
            rows.append(Row(name, lookup(block_size, hit, 50), LOOKUP_BOUND_MS))
    return rows


def problems(rows: list[Row]) -> list[str]:
    found = [
        f"{row.name}: median {row.median_ms:.3f} ms, the bound is {row.bound_ms} ms"
        for row in rows
        if row.missed
    ]
    for small, large in itertools.pairwise(rows[: len(BATCH_SIZES)]):
        growth = large.median_ms / small.median_ms
        print(f"{small.name} to {large.name}: {growth:.1f} times the cost")
        if growth > GROWTH_BOUND:
            found.append(f"{large.name}: {growth:.1f} times {small.name}, over {GROWTH_BOUND}")
    return found


def show(rows: list[Row]) -> None:
    table = Table("milliseconds", box=None, pad_edge=False)
    for column in ("median", "p90", "worst", "bound"):
        table.add_column(column, justify="right")
    for row in rows:
        bound = "" if row.bound_ms is None else f"{row.bound_ms}"
        times = (f"{value:.3f}" for value in (row.median_ms, row.p90_ms, max(row.times_ms)))
        table.add_row(row.name, *times, bound)
    Console(width=100).print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description="Host cost of scheduling, without a model.")
    parser.add_argument("--steps", type=int, default=500, help="timed steps per row (500)")
    rows = measure(parser.parse_args().steps)
    print(f"Python {platform.python_version()} on {platform.machine()}, block size {BLOCK_SIZE}\n")
    show(rows)
    print()
    missed = problems(rows)
    if missed:
        sys.exit("\n".join(missed))
    print("within the bounds")


if __name__ == "__main__":
    main()
