"""Every kernel on the device against float64, or exactly where it computes no floats.

Shapes are drawn from a fixed seed. Slots of the cache that no request owns are NaN, so that one
that is read shows; every attention case is run twice and must repeat itself bit for bit. The
limits are those of the interpreter's tests. Divided among processes, since most of it is compiling.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from gpu_report import Bench, Row

import pagestream_kernels
from pagestream_kernels import (
    append_tokens,
    fused_add_rms_norm,
    gather_logits_rows,
    gelu_tanh_and_mul,
    paged_attention,
    plan_attention,
    prepare_inputs,
    reference,
    rms_norm,
    rope_kv_write,
    rope_table,
    silu_and_mul,
    staged_write,
)

SECTION = "correctness"
LIMITS = {torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}
_EPS = 1e-6
_WRONG = float("inf")
_HEADS = [
    *((2, 1, 64, 16), (3, 3, 64, 64), (2, 5, 80, 16), (2, 7, 96, 32)),
    *((8, 4, 128, 64), (1, 8, 128, 32), (8, 2, 128, 64), (1, 4, 256, 64)),
]
"""KV heads, query heads of each, head_dim, tokens of a block. Few: each is another compilation."""

Case = Callable[[random.Random, torch.device, torch.dtype], float]
"""The error of one random case."""


def correctness(bench: Bench) -> None:
    dtypes = list(LIMITS) if bench.cuda else [torch.float32]
    cases: dict[str, tuple[Case, int]] = {
        "attention": (_attention, 40),
        "rms_norm, add + rms_norm": (_norms, 10),
        "silu_and_mul, gelu_tanh_and_mul": (_activations, 10),
        "rope_kv_write": (_rope, 15),
    }
    for name, (case, count) in cases.items():
        for dtype in dtypes:
            label = f"{name}, {str(dtype).removeprefix('torch.')}"
            number = 4 if bench.smoke else count
            measure = partial(_worst, bench, label, case, dtype, LIMITS[dtype], number)
            bench.run(SECTION, label, measure)
    count = 3 if bench.smoke else 15
    for name, case, limit in (
        ("input preparation", _input_prep, 0.0),
        ("sampling, other choices", _sampling, 1e-3),
    ):
        measure = partial(_worst, bench, name, case, torch.float32, limit, count)
        bench.run(SECTION, name, measure)


def _worst(
    bench: Bench, label: str, case: Case, dtype: torch.dtype, limit: float, count: int
) -> Iterator[Row]:
    """Of this process's part of the cases."""
    errors = [0.0]
    for seed in range(bench.part[0], count, bench.part[1]):
        torch.manual_seed(seed)
        error = case(random.Random(seed), bench.device, dtype)
        errors.append(_WRONG if math.isnan(error) else error)
        if errors[-1] > limit:
            yield Row(SECTION, f"{label}, seed {seed}", error=f"error {error:.2e}")
    worst = max(errors)
    name = f"{label}, {count} cases"
    yield Row(SECTION, name, worst, "error", target=f"<= {limit:g}", met=worst <= limit)


def relative_error(actual: torch.Tensor, exact: torch.Tensor) -> float:
    exact = exact.double()
    difference = (actual.double() - exact).norm()
    return float(difference / exact.norm().clamp_min(1e-30))


def _attention(generator: random.Random, device: torch.device, dtype: torch.dtype) -> float:
    kv_heads, group, dim, page = generator.choice(_HEADS)
    window, soft_cap = generator.choice([(None, None)] * 4 + [(1, None), (70, 20.0)])
    longest = generator.choice([1, 1, 5, 200])
    query_lens = [generator.randint(1, longest) for _ in range(generator.choice([1, 3, 40]))]
    # Contexts around the ends of blocks, none at all, and long enough to be split.
    contexts = [
        generator.choice([0, page - 1, page, page + 1, generator.randint(0, 2000)])
        for _ in query_lens
    ]
    seq_lens = [query + context for query, context in zip(query_lens, contexts, strict=True)]
    counts = [-(-length // page) for length in seq_lens]
    order = torch.randperm(sum(counts) + 5, device=device).to(torch.int32)
    shape = (2, len(order), page, kv_heads, dim)
    caches = torch.full(shape, float("nan"), device=device, dtype=dtype)
    tables = torch.full((len(counts), max(counts) + 3), 2**30, device=device, dtype=torch.int32)
    start = 0
    for row, (count, length) in enumerate(zip(counts, seq_lens, strict=True)):
        blocks = order[start : start + count]
        start += count
        tables[row, :count] = blocks
        tables[row, count:] = blocks[-1]  # the kernel may load one entry more than it uses
        values = torch.randn(2, count * page, kv_heads, dim, device=device).to(dtype)
        values[:, length:] = float("nan")
        caches[:, blocks.long()] = values.view(2, count, page, kv_heads, dim)
    starts = torch.tensor([0, *query_lens]).cumsum(0).to(device=device, dtype=torch.int32)
    lengths = torch.tensor(seq_lens, dtype=torch.int32).to(device)
    q = torch.randn(sum(query_lens), kv_heads * group, dim, device=device).to(dtype)
    plan = plan_attention(starts, lengths, tables, page, max_query_len=max(query_lens))
    run = partial(paged_attention, q, *caches, plan, dim**-0.5, window=window, soft_cap=soft_cap)
    actual = run()
    if not actual.equal(run()):
        return _WRONG
    exact = _exact_attention(q, caches, tables, query_lens, seq_lens, window, soft_cap)
    return relative_error(actual, exact)


def _exact_attention(
    q: torch.Tensor,
    caches: torch.Tensor,
    tables: torch.Tensor,
    query_lens: list[int],
    seq_lens: list[int],
    window: int | None,
    soft_cap: float | None,
) -> torch.Tensor:
    page = caches.shape[2]
    group = q.shape[1] // caches.shape[3]
    parts, start = [], 0
    for row, (query_len, seq_len) in enumerate(zip(query_lens, seq_lens, strict=True)):
        blocks = tables[row, : -(-seq_len // page)].long()
        k, v = caches[:, blocks].flatten(1, 2)[:, :seq_len].double().repeat_interleave(group, dim=2)
        scores = torch.einsum("qhd,khd->hqk", q[start : start + query_len].double(), k)
        scores *= q.shape[2] ** -0.5
        if soft_cap is not None:
            scores = soft_cap * torch.tanh(scores / soft_cap)
        at = torch.arange(seq_len - query_len, seq_len, device=q.device)[:, None]
        keys = torch.arange(seq_len, device=q.device)[None]
        hidden = keys > at if window is None else (keys > at) | (keys <= at - window)
        weights = scores.masked_fill(hidden, float("-inf")).softmax(-1)
        parts.append(torch.einsum("hqk,khd->qhd", weights, v))
        start += query_len
    return torch.cat(parts)


def _exact_norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    x = x.double()
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + _EPS) * weight.double()


def _norms(generator: random.Random, device: torch.device, dtype: torch.dtype) -> float:
    shape = (generator.randint(1, 300), generator.choice([64, 100, 576, 1023, 1024, 4096]))
    x, residual = torch.randn(2, *shape, device=device).to(dtype)
    weight = torch.randn(shape[1], device=device).to(dtype)
    total = x + residual
    alone = relative_error(rms_norm(x, weight, _EPS), _exact_norm(x, weight))
    normed, added = fused_add_rms_norm(x, residual, weight, _EPS)
    if not added.equal(total):
        return _WRONG
    return max(alone, relative_error(normed, _exact_norm(total, weight)))


def _activations(generator: random.Random, device: torch.device, dtype: torch.dtype) -> float:
    shape = (generator.randint(1, 300), 2 * generator.choice([64, 99, 1536, 2049, 14336]))
    gate_up = (torch.randn(shape, device=device) * 4).to(dtype)
    gate, up = gate_up.double().chunk(2, dim=-1)
    silu, gelu = torch.nn.functional.silu(gate), torch.nn.functional.gelu(gate, approximate="tanh")
    errors = (
        relative_error(silu_and_mul(gate_up), silu * up),
        relative_error(gelu_tanh_and_mul(gate_up), gelu * up),
    )
    return max(errors)


def _rope(generator: random.Random, device: torch.device, dtype: torch.dtype) -> float:
    kv_heads, group = generator.choice([1, 2, 3, 8]), generator.choice([1, 3, 4, 7])
    dim, page, num_tokens = generator.choice([64, 80, 96, 128, 256]), 16, generator.randint(1, 60)
    counts = [kv_heads * group, kv_heads, kv_heads]
    qkv = torch.randn(num_tokens, sum(counts), dim, device=device).to(dtype)
    q, k, v = qkv.split(counts, dim=1)
    q_norm, k_norm = torch.randn(2, dim, device=device).to(dtype)
    norms = {"q_norm": q_norm, "k_norm": k_norm, "eps": _EPS} if generator.random() < 0.5 else {}
    table = rope_table(4096, dim, 10000.0, device)
    at = torch.randint(0, 4096, (num_tokens,), device=device)
    shape = (2, 5, page, kv_heads, dim)
    caches = torch.full(shape, float("nan"), device=device, dtype=dtype)
    slots = torch.randperm(5 * page, device=device)[:num_tokens]
    slots[::3] = -1
    rotated = rope_kv_write(q, k, v, table, at, *caches, slots, **norms)
    owned = slots >= 0
    stored = caches.flatten(1, 2)
    if int((~stored.isnan()).all(-1).all(-1).sum()) != 2 * int(owned.sum()):
        return _WRONG
    if not stored[1, slots[owned]].equal(v[owned]):
        return _WRONG
    exact_q, exact_k = (
        _exact_rotation(_exact_norm(x, norm) if norms else x.double(), table[at])
        for x, norm in ((q, q_norm), (k, k_norm))
    )
    errors = [relative_error(rotated, exact_q)]
    if bool(owned.any()):
        errors.append(relative_error(stored[0, slots[owned]], exact_k[owned]))
    return max(errors)


def _exact_rotation(x: torch.Tensor, turns: torch.Tensor) -> torch.Tensor:
    cos, sin = turns.double().unsqueeze(2).unbind(1)
    low, high = x.chunk(2, dim=-1)
    return torch.cat((low * cos - high * sin, high * cos + low * sin), dim=-1)


def _input_prep(generator: random.Random, device: torch.device, _: torch.dtype) -> float:
    """All four ops, one after the other, on states of their own and on their twins'."""
    query_lens = [generator.randint(1, 90) for _ in range(generator.randint(1, 70))]
    num_states, num_tokens = len(query_lens) + 5, sum(query_lens)
    rows = torch.randperm(num_states, device=device)[: len(query_lens)]
    lens = torch.tensor(query_lens).to(device)
    token_ids = torch.randint(0, 50_000, (num_states, 400), dtype=torch.int32, device=device)
    computed = torch.randint(0, 300, (num_states,), device=device)
    tables = torch.randint(0, 2**30, (num_states, 25), dtype=torch.int32, device=device)
    logits = torch.tensor([generator.randint(0, min(3, n)) for n in query_lens]).to(device)
    hidden = torch.randn(num_tokens, 100, device=device)
    results = []
    for prepare, gather, append, write in (
        (prepare_inputs, gather_logits_rows, append_tokens, staged_write),
        (
            reference.prepare_inputs,
            reference.gather_logits_rows,
            reference.append_tokens,
            reference.staged_write,
        ),
    ):
        ids = token_ids.clone()
        prepared = _values(prepare(rows, lens, num_tokens, ids, computed, tables, 16))
        ends, num_rows = prepared[3], int(logits.sum())
        gathered = _values(gather(hidden, ends, rows, logits, prepared[1], num_rows))
        drawn = (gathered[1] * 7 + 3) % 1000
        append(gathered[1], gathered[2], drawn, ids)
        write(ids, rows, lens * 0, ends, prepared[0].to(torch.int32))
        results.append([*prepared, *gathered, ids])
    return 0.0 if all(map(torch.equal, *results)) else _WRONG


def _values(found: object) -> list[torch.Tensor]:
    if isinstance(found, tuple):
        return list(found)
    return [getattr(found, name) for name in found.__slots__]


def _sampling(generator: random.Random, device: torch.device, _: torch.dtype) -> float:
    """Against the twins on the CPU: the share of choices that differ (logarithms are not the same
    to the last bit on all devices)."""
    shape = num_rows, vocab = generator.randint(1, 40), generator.choice([199, 4096, 50_257])
    logits, seen = torch.randn(shape) * 3, torch.rand(shape) < 0.05
    counts = seen * torch.randint(0, 4, shape, dtype=torch.int32)
    rows, states = torch.randperm(num_rows), torch.randperm(num_rows)
    positions, seeds = torch.randint(0, 9000, (num_rows,)), torch.randint(0, 2**62, (num_rows,))
    temperature, top_p = torch.rand(num_rows) + 0.2, torch.rand(num_rows)
    top_k, min_p = torch.randint(1, vocab, (num_rows,)), torch.rand(num_rows) * 0.1
    factors = [torch.rand(num_rows) + 0.5 for _ in range(3)]

    def run(ops: Any, where: torch.device) -> list[torch.Tensor]:
        def there(*tensors: torch.Tensor) -> list[torch.Tensor]:
            return [tensor.to(where) for tensor in tensors]

        (scores,) = there(logits.clone())
        ops.apply_penalties(scores, *there(rows, states, seen, counts, *factors))
        thresholds = ops.filter_thresholds(scores, *there(states, temperature, top_k, top_p, min_p))
        drawn = ops.gumbel_argmax(scores, *there(states, positions, temperature, seeds), thresholds)
        columns = _values(ops.gather_logprobs(scores, *there(top_k), 5))
        kept = scores.masked_fill(scores < thresholds[:, None], float("-inf"))
        return [tensor.cpu() for tensor in (scores, kept, drawn, *columns)]

    found, expected = run(pagestream_kernels, device), run(reference, torch.device("cpu"))
    return max(map(_difference, found, expected))


def _difference(found: torch.Tensor, expected: torch.Tensor) -> float:
    """The share of ids, or of tokens kept, that differ; of what both keep, values must agree."""
    if not expected.is_floating_point():
        return float((found != expected).double().mean())
    both = found.isfinite() & expected.isfinite()
    if relative_error(found[both], expected[both]) > 1e-5:
        return _WRONG
    return float((found.isfinite() != expected.isfinite()).double().mean())
