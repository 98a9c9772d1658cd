"""transformers with the engine's weights, in the same run: generate, and generate_batch."""

from __future__ import annotations

import gc
import random
import time
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from gpu_engine import GREEDY, make_engine, random_prompt, run_requests
from gpu_models import QWEN3, WORK, model_directory
from gpu_report import Bench, Row, at_least
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    ContinuousBatchingConfig,
    GenerationConfig,
)

from pagestream.config import ModelConfig
from pagestream.models.registry import load_model

SECTION = f"transformers, {QWEN3}"
_TIMES_BATCH = 3.0


def transformers(bench: Bench) -> None:
    """The same prompts, all of one length and with answers of one length, in each."""
    directory = model_directory(WORK, QWEN3, smoke=bench.smoke)
    count, length, max_tokens = (3, 12, 6) if bench.smoke else (128, 256, 256)
    generator, config = random.Random(0), ModelConfig.from_hf(directory)
    prompts = [random_prompt(generator, config, length) for _ in range(count)]
    ours: dict[str, float] = {}
    bench.run(SECTION, "ours", partial(_ours, bench, directory, prompts, max_tokens, ours))
    gc.collect()
    if bench.cuda:
        torch.cuda.empty_cache()
    twin = transformers_twin(directory, bench.device, bench.dtype)
    for batch in (1, 2) if bench.smoke else (1, 32):
        measure = partial(_generate, bench, twin, prompts[:batch], max_tokens, ours)
        bench.run(SECTION, f"generate, B {batch}", measure)
    # On a GPU it sizes itself; on CPU, to gigabytes that it fills.
    settings = ContinuousBatchingConfig(num_blocks=8, max_batch_tokens=64) if bench.smoke else None
    measure = partial(_generate_batch, twin, prompts, max_tokens, ours, settings)
    bench.run(SECTION, "generate_batch", measure)


def transformers_twin(directory: Path, device: torch.device, dtype: torch.dtype) -> Any:
    """transformers' model with the weights that the engine makes for this directory."""
    config = AutoConfig.from_pretrained(directory)
    with torch.device(device):
        twin = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="sdpa")
    ours = ModelConfig.from_hf(directory)
    weights = load_model(ours, directory, 16, dtype, device, load_format="dummy").targets()
    with torch.no_grad():
        for name, parameter in twin.named_parameters():
            parameter.copy_(weights[name])
    return twin.eval()


def _ours(
    bench: Bench,
    directory: Path,
    prompts: list[list[int]],
    max_tokens: int,
    found: dict[str, float],
) -> Iterator[Row]:
    """tok/s by number of requests, kept for the ratios of the other rows."""
    engine = make_engine(directory, bench.device)
    params = replace(GREEDY, max_tokens=max_tokens)
    for batch in (1, 2 if bench.smoke else 32, len(prompts)):
        elapsed, num_tokens = run_requests(engine, [(p, params) for p in prompts[:batch]])
        found[str(batch)] = num_tokens / elapsed
        yield Row(SECTION, f"ours, {batch} requests", num_tokens / elapsed, "tok/s")


def _generate(
    bench: Bench, twin: Any, prompts: list[list[int]], max_tokens: int, ours: dict[str, float]
) -> Iterator[Row]:
    input_ids = torch.tensor(prompts, device=bench.device)
    wanted = GenerationConfig(
        max_new_tokens=max_tokens, min_new_tokens=max_tokens, do_sample=False, pad_token_id=0
    )
    mask = torch.ones_like(input_ids)
    twin.generate(input_ids, attention_mask=mask, max_new_tokens=2, do_sample=False, pad_token_id=0)
    start = time.perf_counter()
    answer = twin.generate(input_ids, attention_mask=mask, generation_config=wanted)
    if bench.cuda:
        torch.cuda.synchronize()
    elapsed = time.perf_counter() - start
    num_tokens = answer[:, input_ids.shape[1] :].numel()
    name = f"generate, B {len(prompts)}"
    yield from _rows(name, num_tokens / elapsed, ours.get(str(len(prompts))), None)


def _generate_batch(
    twin: Any,
    prompts: list[list[int]],
    max_tokens: int,
    ours: dict[str, float],
    settings: ContinuousBatchingConfig | None,
) -> Iterator[Row]:
    wanted = GenerationConfig(
        max_new_tokens=max_tokens, do_sample=False, pad_token_id=0, eos_token_id=-1
    )
    answers = twin.generate_batch(
        inputs=prompts,
        generation_config=wanted,
        continuous_batching_config=settings,
        record_timestamps=True,
    )
    num_tokens = sum(len(answer.generated_tokens) for answer in answers.values())
    if num_tokens != len(prompts) * max_tokens:
        raise RuntimeError(f"{num_tokens} tokens came, not {len(prompts) * max_tokens}")
    # From the requests to the last token: setting up and recording graphs is no part of it.
    start = min(answer.created_time for answer in answers.values())
    elapsed = max(answer.timestamps[-1] for answer in answers.values()) - start
    name = f"generate_batch, {len(prompts)} requests"
    yield from _rows(name, num_tokens / elapsed, ours.get(str(len(prompts))), _TIMES_BATCH)


def _rows(name: str, rate: float, ours: float | None, least: float | None) -> Iterator[Row]:
    yield Row(SECTION, name, rate, "tok/s")
    if ours is not None:
        ratio = ours / rate
        yield Row(SECTION, f"  ours, of {name}", ratio, "times", **at_least(ratio, least, "times"))
