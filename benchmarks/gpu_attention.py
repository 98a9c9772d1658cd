"""Inputs of the attention kernels, as an engine in use would have them, and their timing.

Each set of inputs is a batch whose requests own random blocks of one cache; sets own different
blocks, so that going round among them misses the L2 cache without a cache for each.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial

import torch
import torch.nn.functional as F
from gpu_models import LLAMA, QWEN3, SMOLLM2, Heads, heads_of
from gpu_report import COPY, MATMUL, Bench, Row, at_least, rate_row
from gpu_timing import Call, rotations, time_calls

from pagestream_kernels import AttentionMetadata, paged_attention, plan_attention

BLOCK_SIZE = 64
MODELS = (SMOLLM2, QWEN3, LLAMA)
SECTION = "attention"
_DECODE_SHARE, _PREFILL_TFLOPS = 0.85, 450.0
_TABLE_TOKENS = 16384
"""Of the block tables' width: what max_model_len would be."""


@dataclass(frozen=True)
class Inputs:
    q: torch.Tensor  # [batch * query_len, query heads, dim]
    k_cache: torch.Tensor  # [num_blocks, BLOCK_SIZE, kv heads, dim]
    v_cache: torch.Tensor
    batches: list[AttentionMetadata]

    def calls(self) -> list[Call]:
        scale = self.q.shape[-1] ** -0.5
        return [
            partial(paged_attention, self.q, self.k_cache, self.v_cache, batch, scale)
            for batch in self.batches
        ]


def make_inputs(
    bench: Bench, heads: Heads, batch: int, query_len: int, seq_len: int, count: int
) -> Inputs:
    """``count`` batches, each of ``batch`` requests that are ``seq_len`` long and add
    ``query_len`` tokens."""
    device, dtype = bench.device, bench.dtype
    per_request = -(-seq_len // BLOCK_SIZE)
    num_blocks = count * batch * per_request
    shape = (2, num_blocks, BLOCK_SIZE, heads.kv, heads.dim)
    k_cache, v_cache = torch.empty(shape, device=device, dtype=dtype).normal_()
    order = torch.randperm(num_blocks, device=device).to(torch.int32)
    width = max(per_request, _TABLE_TOKENS // BLOCK_SIZE)
    starts = torch.arange(batch + 1, device=device, dtype=torch.int32) * query_len
    lengths = torch.full((batch,), seq_len, device=device, dtype=torch.int32)
    batches = []
    for blocks in order.view(count, batch, per_request):
        tables = torch.zeros(batch, width, device=device, dtype=torch.int32)
        tables[:, :per_request] = blocks
        metadata = plan_attention(starts, lengths, tables, BLOCK_SIZE, max_query_len=query_len)
        batches.append(metadata)
    q = torch.randn(batch * query_len, heads.query, heads.dim, device=device).to(dtype)
    return Inputs(q, k_cache, v_cache, batches)


def attention(bench: Bench) -> None:
    """Decode and verify as a share of the copy bandwidth, prefill of the matrix rate."""
    contexts = (64,) if bench.smoke else (1024, 8192)
    batches = (1, 3) if bench.smoke else (1, 8, 64, 256)
    for model in MODELS:
        heads = heads_of(model, smoke=bench.smoke)
        for context in contexts:
            for batch in batches:
                name = f"decode, {model}, B {batch}, {context}"
                bench.run(SECTION, name, partial(_decode, bench, name, heads, batch, context, 1))
        name = f"verify 5, {model}, B {batches[-2]}, {contexts[0]}"
        bench.run(SECTION, name, partial(_decode, bench, name, heads, batches[-2], contexts[0], 5))
        for length in contexts if bench.smoke else (1024, 4096, 8192):
            name = f"prefill, {model}, {length}"
            bench.run(SECTION, name, partial(_prefill, bench, name, heads, length))


def _decode(
    bench: Bench, name: str, heads: Heads, batch: int, context: int, query_len: int
) -> Iterator[Row]:
    num_bytes = 2 * batch * context * heads.kv * heads.dim * bench.dtype.itemsize
    count = 2 if bench.smoke else rotations(num_bytes)
    inputs = make_inputs(bench, heads, batch, query_len, context, count)
    runs = time_calls(bench, inputs.calls())
    aimed_at = query_len == 1 and batch >= 8 and context >= 8192
    least = _DECODE_SHARE if aimed_at else None
    yield rate_row(bench, SECTION, name, num_bytes, runs, COPY, least)


def _prefill(bench: Bench, name: str, heads: Heads, length: int) -> Iterator[Row]:
    """Beside torch's own attention on the same keys, laid out densely."""
    operations = 2 * heads.query * heads.dim * length**2
    inputs = make_inputs(bench, heads, 1, length, length, 2)
    row = rate_row(bench, SECTION, name, operations, time_calls(bench, inputs.calls()), MATMUL)
    if length >= 8192:
        row = replace(row, **at_least(row.value, _PREFILL_TFLOPS, "TFLOP/s"))
    yield row
    q, k, v = (
        torch.randn(1, count, length, heads.dim, device=bench.device).to(bench.dtype)
        for count in (heads.query, heads.kv, heads.kv)
    )
    dense = partial(F.scaled_dot_product_attention, q, k, v, is_causal=True, enable_gqa=True)
    runs = time_calls(bench, [dense])
    yield rate_row(bench, SECTION, f"  the same by torch, {length}", operations, runs, MATMUL)
