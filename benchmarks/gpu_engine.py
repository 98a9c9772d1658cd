"""The engine with random weights: decode, first tokens, a workload of mixed lengths, and its modes.

Sections drive LLMEngine directly: no text, no server. Every share is of the floor that the model's
bytes and operations set with this machine's measured ceilings (gpu_models).
"""

from __future__ import annotations

import gc
import json
import queue
import random
import statistics
import time
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from gpu_idle import idle_share
from gpu_models import (
    LLAMA,
    QWEN3,
    SMOLLM2,
    WORK,
    decode_floor,
    engine_config,
    make_engine,
    model_directory,
    prefill_floor,
)
from gpu_report import COPY, MATMUL, Bench, Row, at_least

from pagestream.config import ModelConfig
from pagestream.engine.engine_loop import AddRequest, EngineLoop, Shutdown, StepReport
from pagestream.engine.engine_process import EngineProcess
from pagestream.engine.llm_engine import LLMEngine
from pagestream.sampling_params import SamplingParams

_DECODE_SHARE, _IDLE_SHARE = 0.60, 0.03
GREEDY = SamplingParams(temperature=0.0, ignore_eos=True, prefix_cache=False)
MIXED = "mixed workload"
"""nano-vllm's: 256 requests, 100 to 1024 tokens in, as many out."""


def smollm2(bench: Bench) -> None:
    _model(bench, SMOLLM2)


def qwen3(bench: Bench) -> None:
    _model(bench, QWEN3)


def llama(bench: Bench) -> None:
    _model(bench, LLAMA)


def _model(bench: Bench, name: str) -> None:
    """Decode and first tokens of one model, in one engine."""
    section = f"engine, {name}"
    directory = model_directory(WORK, name, smoke=bench.smoke)
    bench.run(section, "engine", partial(_measure_model, bench, section, directory))
    gc.collect()


def _measure_model(bench: Bench, section: str, directory: Path) -> Iterator[Row]:
    start = time.perf_counter()
    engine = make_engine(directory, bench.device)
    yield Row(section, "start of the engine", time.perf_counter() - start, "s")
    context, steps = (20, 5) if bench.smoke else (1024, 100)
    for batch in (1, 2, 4) if bench.smoke else (1, 64, 256):
        yield decode_row(bench, section, f"decode, B {batch}", engine, batch, context, steps)
    for length in (50,) if bench.smoke else (1000, 8000):
        yield _first_token_row(bench, section, engine, length)
    if bench.cuda:
        for batch in (1, 64):
            enter_decode(engine, batch, context, 80)
            idle = idle_share(partial(_steps, engine, 50))
            leave(engine)
            target = f"< {_IDLE_SHARE:.0%}"
            name = f"GPU idle in decode, B {batch}"
            yield Row(section, name, idle * 100, "%", target=target, met=idle < _IDLE_SHARE)


def decode_row(
    bench: Bench,
    section: str,
    name: str,
    engine: LLMEngine,
    batch: int,
    context: int,
    steps: int,
) -> Row:
    """Output tokens per second while ``batch`` requests decode, and the share of the floor."""
    generated = enter_decode(engine, batch, context, steps)
    times = []
    for _ in range(2):
        start = time.perf_counter()
        _steps(engine, steps // 2)
        times.append((time.perf_counter() - start) / (steps // 2))
    leave(engine)
    step = min(times)
    floor = decode_floor(
        engine.model_config, batch, context + generated + steps / 2, bench.dtype.itemsize
    )
    share = floor_share(bench, floor, step)
    least = _DECODE_SHARE if batch >= 64 else None
    return Row(
        section,
        name,
        batch / step,
        "tok/s",
        share=share,
        of="roofline",
        noise=abs(times[0] - times[1]) / step,
        **at_least(share, least),
    )


def floor_share(bench: Bench, floor: object, seconds: float) -> float | None:
    bandwidth, rate = bench.ceiling(COPY), bench.ceiling(MATMUL)
    if bandwidth is None or rate is None:
        return None
    return floor.seconds(bandwidth, rate) / seconds


def random_prompt(generator: random.Random, config: ModelConfig, length: int) -> list[int]:
    return [generator.randrange(3, min(config.vocab_size, 10_000)) for _ in range(length)]


def enter_decode(engine: LLMEngine, batch: int, context: int, steps: int) -> float:
    """Step until ``batch`` new requests decode together, with room for ``steps`` steps more.

    Returns how many tokens each has on average.
    """
    generator = random.Random(batch)
    prefill_steps = batch * context // engine.config.max_num_batched_tokens + 1
    params = replace(GREEDY, max_tokens=prefill_steps + steps + 32)
    for index in range(batch):
        prompt = random_prompt(generator, engine.model_config, context)
        engine.add_request(f"decode {index}", prompt, params)
    started: set[str] = set()
    generated = 0
    while len(started) < batch:
        for output in engine.step():
            generated += len(output.token_ids)
            started.add(output.request_id)
    for _ in range(8):
        engine.step()
    return generated / batch + 8


def _steps(engine: LLMEngine, count: int) -> None:
    for _ in range(count):
        engine.step()


def leave(engine: LLMEngine) -> None:
    engine.abort_all()
    while engine.has_unfinished_requests():
        engine.step()


def _first_token_row(bench: Bench, section: str, engine: LLMEngine, length: int) -> Row:
    """From an idle engine's taking the request to its having the first token; the median."""
    generator = random.Random(length)
    times = []
    for index in range(2 if bench.smoke else 5):
        prompt = random_prompt(generator, engine.model_config, length)
        start = time.perf_counter()
        engine.add_request(f"first {index}", prompt, replace(GREEDY, max_tokens=1))
        while engine.has_unfinished_requests():
            engine.step()
        times.append(time.perf_counter() - start)
    median = statistics.median(times)
    floor = prefill_floor(engine.model_config, length, bench.dtype.itemsize)
    share = floor_share(bench, floor, median)
    name = f"time to first token, {length} tokens"
    return Row(section, name, median * 1e3, "ms", share=share, of="roofline")


def mixed_workload(config: ModelConfig, *, smoke: bool) -> list[tuple[list[int], SamplingParams]]:
    """All requests at once; lengths and tokens are drawn from seed 0, the longest ids left out."""
    count, least, most = (6, 5, 30) if smoke else (256, 100, 1024)
    generator = random.Random(0)
    vocab = min(config.vocab_size - 1, 10_000)
    prompts = [
        [generator.randint(0, vocab) for _ in range(generator.randint(least, most))]
        for _ in range(count)
    ]
    return [
        (
            prompt,
            SamplingParams(
                temperature=0.6, ignore_eos=True, max_tokens=generator.randint(least, most)
            ),
        )
        for prompt in prompts
    ]


def run_requests(
    engine: LLMEngine, requests: list[tuple[list[int], SamplingParams]]
) -> tuple[float, int]:
    """(seconds, output tokens) of all requests at once."""
    start, num_tokens = time.perf_counter(), 0
    for index, (prompt, params) in enumerate(requests):
        engine.add_request(str(index), prompt, params)
    while engine.has_unfinished_requests():
        num_tokens += sum(len(output.token_ids) for output in engine.step())
    return time.perf_counter() - start, num_tokens


def modes(bench: Bench) -> None:
    """The mixed workload, and decode, as they are by default, launched eagerly, and in step."""
    directory = model_directory(WORK, QWEN3, smoke=bench.smoke)
    for name, options in (
        ("default", {}),
        ("overlap off", {"overlap_scheduling": "off"}),
        ("eager", {"enforce_eager": True}),
    ):
        section = f"modes, {QWEN3}"
        bench.run(section, name, partial(_mode, bench, section, name, directory, options))
        gc.collect()


def _mode(
    bench: Bench, section: str, name: str, directory: Path, options: dict[str, object]
) -> Iterator[Row]:
    engine = make_engine(directory, bench.device, **options)
    context, steps = (20, 6) if bench.smoke else (1024, 60)
    for batch in (2,) if bench.smoke else (1, 64):
        yield decode_row(
            bench, section, f"decode, B {batch}, {name}", engine, batch, context, steps
        )
    if name == "eager" and not bench.smoke:
        return  # long, and the decode rows tell the two apart
    workload = mixed_workload(engine.model_config, smoke=bench.smoke)
    elapsed, num_tokens = run_requests(engine, workload)
    assert num_tokens == sum(params.max_tokens or 0 for _, params in workload)
    yield Row(section, f"{MIXED}, {name}", num_tokens / elapsed, "tok/s")


def loops(bench: Bench) -> None:
    """The engine loop in a process of its own, and in a thread beside a busy one."""
    for name, kind in (("in a process", EngineProcess), ("in a thread", EngineLoop)):
        bench.run("loop", name, partial(_loop, bench, name, kind))
        gc.unfreeze()  # EngineLoop has frozen what it made
        gc.collect()


def _loop(bench: Bench, name: str, kind: type[EngineLoop | EngineProcess]) -> Iterator[Row]:
    """What receives the reports does for each output about what answering a request takes."""
    directory = model_directory(WORK, QWEN3, smoke=bench.smoke)
    config = engine_config(directory, bench.device)
    reports: queue.SimpleQueue[StepReport] = queue.SimpleQueue()
    loop = kind(config, reports.put)
    loop.start()
    count, length, max_tokens = (2, 10, 8) if bench.smoke else (64, 128, 256)
    generator = random.Random(0)
    model = ModelConfig.from_hf(directory)
    prompts = [random_prompt(generator, model, length) for _ in range(count)]
    params = replace(GREEDY, max_tokens=max_tokens)
    start = time.perf_counter()
    for index, prompt in enumerate(prompts):
        loop.submit(AddRequest(str(index), prompt, params, time.monotonic()))
    _receive(reports, count)
    elapsed = time.perf_counter() - start
    loop.submit(Shutdown())
    loop.join(30)
    what = f"{count} requests, {length} in, {max_tokens} out, {name}"
    yield Row("loop", what, count * max_tokens / elapsed, "tok/s")


def _receive(reports: queue.SimpleQueue[StepReport], count: int) -> None:
    while count:
        report = reports.get()
        if report.failure is not None:
            raise RuntimeError(report.failure)
        for output in report.outputs:
            json.dumps({"id": output.request_id, "token_ids": output.token_ids, "text": "x" * 20})
            torch.tensor(output.token_ids).numpy().tobytes()
            count -= output.finish_reason is not None
