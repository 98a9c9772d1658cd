"""Norms, gated products, RoPE with KV write, and input preparation, in the sizes of the models."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from compile_kernels import Compiled
from configuration import Configuration, loads_16_bytes, nothing_more, tensor

from pagestream_kernels import triton as kernels

TOKENS = 64
HIDDEN = [576, 1024, 4096]
"""Of SmolLM2-135M, Qwen3-0.6B and Llama-3.1-8B."""
INTERMEDIATE = [1536, 3072, 14336]
HEADS = [(9, 3, 64), (16, 8, 128), (32, 8, 128), (32, 32, 80), (8, 4, 256)]
"""Query heads, KV heads, head size."""
STATES, MAX_LEN, PAGE = 256, 8192, 64
INT32, INT64 = torch.int32, torch.int64


def rms_norm(hidden: int, *, with_residual: bool) -> None:
    x, weight = tensor(TOKENS, hidden), tensor(hidden)
    if with_residual:
        kernels.rms_norm.fused_add_rms_norm(x, tensor(TOKENS, hidden), weight, 1e-5)
    else:
        kernels.rms_norm.rms_norm(x, weight, 1e-5)


def rope_kv_write(num_heads: int, kv_heads: int, head_dim: int, *, with_norm: bool) -> None:
    qkv = tensor(TOKENS, num_heads + 2 * kv_heads, head_dim)
    q, k, v = qkv.split([num_heads, kv_heads, kv_heads], dim=1)
    cache = tensor(1000, PAGE, kv_heads, head_dim)
    norms = (tensor(head_dim), tensor(head_dim)) if with_norm else (None, None)
    kernels.rope_kv_write.rope_kv_write(
        *(q, k, v, tensor(MAX_LEN, 2, head_dim // 2, dtype=torch.float32)),
        *(tensor(TOKENS, dtype=INT64), cache, cache, tensor(TOKENS, dtype=INT64), *norms, 1e-6),
    )


def prepare_inputs(*, advance: bool) -> None:
    tokens = [tensor(TOKENS, dtype=INT64) for _ in range(3)]
    kernels.input_prep.prepare_inputs(
        tensor(TOKENS, dtype=INT64),
        tensor(TOKENS, dtype=INT64),
        tensor(STATES, MAX_LEN, dtype=INT32),
        tensor(STATES, dtype=INT64),
        tensor(STATES, MAX_LEN // PAGE, dtype=INT32),
        PAGE,
        advance,
        (*tokens, tensor(TOKENS + 1, dtype=INT32), tensor(TOKENS, dtype=INT32)),
    )


def gather_logits_rows(hidden: int) -> None:
    rows = [tensor(TOKENS, dtype=INT64) for _ in range(2)]
    kernels.input_prep.gather_logits_rows(
        tensor(TOKENS, hidden),
        tensor(TOKENS + 1, dtype=INT32),
        *(tensor(TOKENS, dtype=INT64) for _ in range(3)),
        (tensor(TOKENS, hidden), *rows),
    )


def append_tokens() -> None:
    kernels.input_prep.append_tokens(
        *(tensor(TOKENS, dtype=INT64) for _ in range(3)), tensor(STATES, MAX_LEN, dtype=INT32)
    )


def staged_write(dtype: torch.dtype, *shape: int) -> None:
    kernels.input_prep.staged_write(
        tensor(STATES, *shape, dtype=dtype),
        *(tensor(TOKENS, dtype=INT64) for _ in range(2)),
        tensor(TOKENS + 1, dtype=INT64),
        tensor(1000, dtype=dtype),
    )


def rotates_in_16_bytes(kernel: Compiled, capability: int) -> None:
    assert kernel.wide_loads == 6, "two halves each of q, k and v"


def _configurations() -> Iterator[Configuration]:
    for hidden in HIDDEN:
        for name, with_residual in (("rms_norm", False), ("add + rms_norm", True)):
            run = partial(rms_norm, hidden, with_residual=with_residual)
            yield Configuration(
                f"{name} {hidden}", run, {"_rms_norm": loads_16_bytes}, hidden == 576
            )
    for heads in HEADS:
        for name, with_norm in (("rope + kv write", False), ("qk-norm + rope + kv write", True)):
            run = partial(rope_kv_write, *heads, with_norm=with_norm)
            shape = "/".join(map(str, heads))
            yield Configuration(f"{name} {shape}", run, {"_rope_kv_write": rotates_in_16_bytes})
    for width in INTERMEDIATE:
        for op in ("silu_and_mul", "gelu_tanh_and_mul"):
            run = partial(getattr(kernels.silu_and_mul, op), tensor(TOKENS, 2 * width))
            yield Configuration(f"{op} {width}", run, {"_gated_product": loads_16_bytes})
    for name, run, kernel in (
        ("prepare_inputs", partial(prepare_inputs, advance=False), "_prepare_inputs"),
        ("prepare_inputs advance", partial(prepare_inputs, advance=True), "_prepare_inputs"),
        ("gather_logits_rows 576", partial(gather_logits_rows, 576), "_gather_logits_rows"),
        ("gather_logits_rows 4096", partial(gather_logits_rows, 4096), "_gather_logits_rows"),
        ("append_tokens", append_tokens, "_append_tokens"),
        ("staged_write rows int32", partial(staged_write, INT32, MAX_LEN), "_staged_write"),
        ("staged_write int64", partial(staged_write, INT64), "_staged_write"),
    ):
        yield Configuration(name, run, {kernel: nothing_more}, quick=name == "prepare_inputs")


CONFIGURATIONS = list(_configurations())
