"""Sampling and processors of logits, for the vocabularies of the models.

Logits come from the head in bfloat16, and in float32 where a processor has changed them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch
from compile_kernels import Compiled
from configuration import Check, Configuration, nothing_more, tensor

from pagestream_kernels import triton as kernels

VOCABS = [49152, 128256, 151936]
"""Of SmolLM2, Llama 3 and Qwen3."""
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
ROWS, STATES, MAX_LEN = 64, 256, 8192
INT32, INT64, FP32 = torch.int32, torch.int64, torch.float32


def rows() -> torch.Tensor:
    return tensor(ROWS, dtype=INT64)


def parameters(count: int, dtype: torch.dtype = FP32) -> list[torch.Tensor]:
    return [tensor(STATES, dtype=dtype) for _ in range(count)]


def argmax(logits: torch.Tensor) -> None:
    kernels.sampling.argmax_tokens(logits)


def draw(logits: torch.Tensor, *, filtered: bool) -> None:
    thresholds = tensor(ROWS, dtype=FP32) if filtered else None
    (temperature,), (seeds,) = parameters(1), parameters(1, INT64)
    kernels.sampling.gumbel_argmax(logits, rows(), rows(), temperature, seeds, thresholds)


def filters(logits: torch.Tensor) -> None:
    temperature, top_p, min_p = parameters(3)
    (top_k,) = parameters(1, INT64)
    kernels.filter_thresholds.filter_thresholds(logits, rows(), temperature, top_k, top_p, min_p)


def logprobs(logits: torch.Tensor) -> None:
    kernels.logprobs.gather_logprobs(logits, rows(), 5)


def grammar(logits: torch.Tensor) -> None:
    bitmask = tensor(ROWS, logits.shape[1] // 32, dtype=INT32)
    kernels.logits_processors.apply_bitmask(logits, bitmask, None, None)


def allowed(logits: torch.Tensor) -> None:
    bitmask = tensor(STATES, logits.shape[1] // 32, dtype=INT32)
    kernels.logits_processors.apply_bitmask(logits, bitmask, rows(), rows())


def endings(logits: torch.Tensor) -> None:
    token_ids, listed = tensor(STATES, MAX_LEN, dtype=INT32), tensor(STATES, 8, 4, dtype=INT32)
    kernels.logits_processors.ban_endings(logits, rows(), rows(), rows(), token_ids, listed)


def stop_tokens(logits: torch.Tensor) -> None:
    stop_ids = tensor(STATES, 4, dtype=INT32)
    kernels.logits_processors.ban_stop_tokens(logits, rows(), rows(), stop_ids)


def bias(logits: torch.Tensor) -> None:
    ids, values = tensor(STATES, 16, dtype=INT32), tensor(STATES, 16, dtype=FP32)
    kernels.logits_processors.add_bias(logits, rows(), rows(), ids, values)


def penalties(logits: torch.Tensor) -> None:
    shape = (STATES, logits.shape[1])
    in_prompt, counts = tensor(*shape, dtype=torch.bool), tensor(*shape, dtype=INT32)
    kernels.logits_processors.apply_penalties(
        logits, rows(), rows(), in_prompt, counts, *parameters(3)
    )


def count_tokens(logits: torch.Tensor) -> None:
    counts = tensor(STATES, logits.shape[1], dtype=INT32)
    kernels.logits_processors.count_tokens(counts, rows(), rows(), rows())


def reads_logits_well(kernel: Compiled, capability: int) -> None:
    assert kernel.wide_loads > 0


def reads_logits_ahead(kernel: Compiled, capability: int, *, itemsize: int) -> None:
    assert kernel.wide_copies > 0
    assert kernel.narrow_copies == 0, "copies of logits of less than 16 bytes a thread"
    in_flight = kernel.shared // (kernels.filter_thresholds.BLOCK * itemsize)
    assert in_flight >= 3, "fewer than three blocks of logits in flight"


Launch = Callable[[torch.Tensor], None]
OF_CHUNKS = {"_best_of_chunk": reads_logits_well, "_best_of_row": nothing_more}
OF_RAW_LOGITS: list[tuple[str, Launch, dict[str, Check]]] = [
    ("argmax", argmax, OF_CHUNKS),
    ("draw", partial(draw, filtered=False), OF_CHUNKS),
    ("filtered draw", partial(draw, filtered=True), OF_CHUNKS),
    ("logprobs", logprobs, {"_sums_of_chunk": reads_logits_well, "_sums_of_row": nothing_more}),
]
OF_SCORES: list[tuple[str, Launch, dict[str, Check]]] = [
    ("grammar", grammar, {"_apply_bitmask": nothing_more}),
    ("allowed ids", allowed, {"_apply_bitmask": nothing_more}),
    ("penalties", penalties, {"_apply_penalties": nothing_more}),
    ("bad words", endings, {"_ban_endings": nothing_more}),
    ("min tokens", stop_tokens, {"_ban_stop_tokens": reads_logits_well}),
    ("bias", bias, {"_add_bias": nothing_more}),
    ("counts", count_tokens, {"_count_tokens": nothing_more}),
]
"""Whose tensors are float32 whatever the model's dtype."""


def _configurations() -> Iterator[Configuration]:
    for vocab in VOCABS:
        for dtype_name, dtype in DTYPES.items():
            logits, of = tensor(ROWS, vocab, dtype=dtype), f"{dtype_name} {vocab}"
            for name, launch, checks in OF_RAW_LOGITS:
                yield Configuration(f"{name} {of}", partial(launch, logits), checks)
            ahead = partial(reads_logits_ahead, itemsize=dtype.itemsize)
            quick = vocab == VOCABS[0] and dtype is FP32
            run, checks = partial(filters, logits), {"_filter_thresholds": ahead}
            yield Configuration(f"filters {of}", run, checks, quick)
    scores = tensor(ROWS, VOCABS[-1], dtype=FP32)
    for name, launch, checks in OF_SCORES:
        yield Configuration(f"{name} {VOCABS[-1]}", partial(launch, scores), checks)


CONFIGURATIONS = list(_configurations())
