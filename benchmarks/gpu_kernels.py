"""Every other kernel as a share of the copy bandwidth, and the compilation of all of them.

The bytes of a kernel are those it cannot do without: each input read once, each output written
once. What stays under some megabytes is bound by the launch, not by bandwidth; it has no target.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch
from gpu_attention import MODELS, make_inputs
from gpu_models import Heads, heads_of, hidden_sizes
from gpu_report import COPY, Bench, Row, rate_row
from gpu_timing import Call, rotations, time_calls

from pagestream_kernels import (
    apply_penalties,
    argmax_tokens,
    filter_thresholds,
    fused_add_rms_norm,
    gather_logprobs,
    gumbel_argmax,
    rms_norm,
    rope_kv_write,
    rope_table,
    silu_and_mul,
)

ELEMENTWISE, SAMPLING, COMPILE = "norms, activations, rope", "sampling", "compile"
_SHARE = 0.85
_VOCAB = 151936
_EPS = 1e-6

Maker = Callable[[], Call]
"""Makes one set of inputs, and the call that reads them."""


def elementwise(bench: Bench) -> None:
    for model in MODELS:
        for num_tokens in (4,) if bench.smoke else (64, 8192):
            for kernel, num_bytes, make in _elementwise_cases(bench, model, num_tokens):
                # Norms and activations of many tokens have a target.
                least = _SHARE if num_tokens >= 8192 and kernel != "rope_kv_write" else None
                name = f"{kernel}, {model}, {num_tokens} tokens"
                measure = partial(_measure, bench, ELEMENTWISE, name, num_bytes, make, least)
                bench.run(ELEMENTWISE, name, measure)


def sampling(bench: Bench) -> None:
    vocab = 512 if bench.smoke else _VOCAB
    for num_rows in (2,) if bench.smoke else (1, 64, 256):
        for kernel, num_bytes, make in _sampling_cases(bench, num_rows, vocab):
            name = f"{kernel}, {num_rows} x {vocab}"
            measure = partial(_measure, bench, SAMPLING, name, num_bytes, make, None)
            bench.run(SAMPLING, name, measure)


def compile_all(bench: Bench) -> None:
    """Compile what later sections launch, into Triton's cache on disk. Run by many processes at
    once, each of which takes its part."""
    index, count = bench.part
    for _, launch in [*_launches(bench)][index::count]:
        launch()
    if bench.cuda:
        torch.cuda.synchronize()


def _measure(
    bench: Bench, section: str, name: str, num_bytes: int, make: Maker, least: float | None
) -> Iterator[Row]:
    calls = [make() for _ in range(2 if bench.smoke else rotations(num_bytes))]
    yield rate_row(bench, section, name, num_bytes, time_calls(bench, calls), COPY, least)


def _elementwise_cases(
    bench: Bench, model: str, num_tokens: int
) -> Iterator[tuple[str, int, Maker]]:
    """(kernel, bytes, maker)"""
    hidden, inner = hidden_sizes(model, smoke=bench.smoke)
    heads = heads_of(model, smoke=bench.smoke)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device=bench.device).to(bench.dtype)

    def norm() -> Call:
        return partial(rms_norm, random(num_tokens, hidden), random(hidden), _EPS)

    def add_norm() -> Call:
        x, residual = random(2, num_tokens, hidden)
        return partial(fused_add_rms_norm, x, residual, random(hidden), _EPS)

    def silu() -> Call:
        return partial(silu_and_mul, random(num_tokens, 2 * inner))

    row = hidden * bench.dtype.itemsize
    yield "rms_norm", 2 * num_tokens * row, norm
    yield "add + rms_norm", 4 * num_tokens * row, add_norm
    yield "silu_and_mul", 3 * num_tokens * inner * bench.dtype.itemsize, silu
    moved = 2 * (heads.query + 2 * heads.kv) * heads.dim * bench.dtype.itemsize
    yield "rope_kv_write", num_tokens * moved, partial(_rope, bench, heads, num_tokens)


def _rope(bench: Bench, heads: Heads, num_tokens: int) -> Call:
    device = bench.device
    counts = [heads.query, heads.kv, heads.kv]
    qkv = torch.randn(num_tokens, sum(counts), heads.dim, device=device).to(bench.dtype)
    shape = (2, -(-num_tokens // 64), 64, heads.kv, heads.dim)
    k_cache, v_cache = torch.zeros(shape, device=device, dtype=bench.dtype)
    table = rope_table(num_tokens, heads.dim, 10000.0, device)
    at = torch.arange(num_tokens, device=device)
    norms = {"q_norm": qkv[0, 0], "k_norm": qkv[0, 1], "eps": _EPS}
    q, k, v = qkv.split(counts, dim=1)
    return partial(rope_kv_write, q, k, v, table, at, k_cache, v_cache, at, **norms)


def _sampling_cases(bench: Bench, num_rows: int, vocab: int) -> Iterator[tuple[str, int, Maker]]:
    device = bench.device

    def logits() -> torch.Tensor:
        return torch.randn(num_rows, vocab, device=device) * 4

    def full(value: float) -> torch.Tensor:
        return torch.full((num_rows,), value, device=device)

    def indices() -> torch.Tensor:
        return torch.arange(num_rows, device=device)

    def filters(top_k: int, top_p: float, min_p: float) -> Call:
        parameters = (full(1.0), full(top_k).long(), full(top_p), full(min_p))
        return partial(filter_thresholds, logits(), indices(), *parameters)

    def draws() -> Call:
        return partial(gumbel_argmax, logits(), indices(), indices(), full(1.0), indices())

    def penalties() -> Call:
        seen = torch.rand(num_rows, vocab, device=device) < 0.01
        states = (seen, seen.to(torch.int32), full(1.1), full(0.1), full(0.1))
        return partial(apply_penalties, logits(), indices(), indices(), *states)

    row = num_rows * vocab * 4
    yield "argmax", row, lambda: partial(argmax_tokens, logits())
    yield "draw", row, draws
    yield "top-k 50, top-p 0.9", row, partial(filters, 50, 0.9, 0.0)
    yield "top-p 0.9", row, partial(filters, 1 << 30, 0.9, 0.0)
    yield "min-p 0.05", row, partial(filters, 1 << 30, 1.0, 0.05)
    yield "penalties", 2 * row + row + row // 4, penalties
    yield "log-probabilities, best 5", row, lambda: partial(gather_logprobs, logits(), indices(), 5)


def _launches(bench: Bench) -> Iterator[tuple[str, Call]]:
    """(name, one launch of each shape that later sections use), with short contexts."""
    for model in MODELS:
        heads = heads_of(model, smoke=bench.smoke)
        for batch in (1, 2, 4, 8, 16, 32, 64, 128, 256):
            yield f"{model} {batch}", partial(_attend, bench, heads, batch, 1)
        yield f"{model} verify", partial(_attend, bench, heads, 64, 5)
        yield f"{model} prefill", partial(_attend, bench, heads, 1, 128)
        for kernel, _, make in _elementwise_cases(bench, model, 64):
            yield f"{model} {kernel}", partial(_make_and_run, make)
    for kernel, _, make in _sampling_cases(bench, 2, 512 if bench.smoke else _VOCAB):
        yield kernel, partial(_make_and_run, make)


def _attend(bench: Bench, heads: Heads, batch: int, query_len: int) -> None:
    (call,) = make_inputs(bench, heads, batch, query_len, 128, 1).calls()
    call()


def _make_and_run(make: Maker) -> None:
    make()()
