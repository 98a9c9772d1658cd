"""Paged attention: its launches for the models that are run, and for other sizes of head.

A configuration's name has the launch, head size and query heads per KV head, and what is special.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from compile_kernels import Compiled
from configuration import CONSUMER, SERVERS, Check, Configuration, nothing_more, tensor

from pagestream_kernels import triton as kernels

KV_HEADS = {(64, 3): 3}
"""By head size and group, where not 8."""
MODELS = [(64, 3), (128, 2), (128, 4)]
"""SmolLM2-135M, Qwen3-0.6B, Llama-3.1-8B."""
OTHERS = [(128, 8), (80, 4), (96, 4), (256, 4)]
BAR = {64: 3.07, 80: 2.24, 96: 2.24, 128: 2.24, 256: 1.72}
"""``loop_cost`` on sm_90 by head size of vLLM 0.32's kernel without splits, at its better of pages
of 16 and 64. With splits, which it takes for few requests, it is from 5.15 down to 2.96."""
MAX_LEN = 8192
PAGE = 64


def launch(
    head_dim: int,
    group: int,
    num_reqs: int,
    query_len: int,
    dtype: torch.dtype = torch.bfloat16,
    window: int | None = None,
    soft_cap: float | None = None,
    page: int = PAGE,
) -> None:
    kv_heads = KV_HEADS.get((head_dim, group), 8)
    qkv = tensor(num_reqs * query_len, kv_heads * (group + 2), head_dim, dtype=dtype)
    cache = tensor(1000, page, kv_heads, head_dim, dtype=dtype)
    kernels.paged_attention.paged_attention(
        qkv[:, : kv_heads * group],
        cache,
        cache,
        tensor(num_reqs + 1, dtype=torch.int32),
        tensor(num_reqs, dtype=torch.int32),
        tensor(300, MAX_LEN // page, dtype=torch.int32),
        tensor(num_reqs, dtype=torch.int64),
        query_len,
        head_dim**-0.5,
        window,
        soft_cap,
    )


def _reads_keys_well(kernel: Compiled, capability: int) -> None:
    assert kernel.wide_copies > 0
    assert kernel.narrow_copies == 0, "copies of keys or values of less than 16 bytes a thread"


def decodes(kernel: Compiled, capability: int) -> None:
    _reads_keys_well(kernel, capability)
    assert kernel.mma + kernel.warpgroup_mma > 0, "no tensor cores"
    assert kernel.stages >= 2, "fewer than two tiles of keys and values in flight"


def decodes_frugally(head_dim: int) -> Check:
    def check(kernel: Compiled, capability: int) -> None:
        decodes(kernel, capability)
        if capability == 90:
            assert kernel.loop_cost < BAR[head_dim], "more instructions per byte than the bar"

    return check


def prefills(kernel: Compiled, capability: int) -> None:
    _reads_keys_well(kernel, capability)
    assert kernel.stages >= 2, "fewer than two tiles of keys and values in flight"
    if capability in (90, 100):
        assert kernel.warpgroup_mma > 0, "no tensor cores' large instructions"
        assert kernel.mma == 0, "some products by the small instructions"
    else:
        assert kernel.mma > 0, "no tensor cores"


def works(kernel: Compiled, capability: int) -> None:
    """float32 has no tensor cores, and is there to compare with rather than for speed."""
    _reads_keys_well(kernel, capability)


SPLIT = {"_attend": decodes, "_combine": nothing_more}
PREFILL = {"_attend": prefills}
SPLIT_FLOAT32 = {"_attend": works, "_combine": nothing_more}


def _configurations() -> Iterator[Configuration]:
    for head_dim, group in MODELS + OTHERS:
        run = partial(launch, head_dim, group)
        quick = (head_dim, group) in [(64, 3), (128, 4)]
        parts = SERVERS + CONSUMER if head_dim == 256 or (head_dim, group) == (128, 4) else SERVERS
        frugal = {"_attend": decodes_frugally(head_dim)}
        for name, settings, launched, in_short in (
            ("decode", (256, 1), frugal, quick),
            ("decode split", (1, 1), SPLIT | frugal, quick),
            ("verify", (1, 5), SPLIT, False),
            ("prefill", (1, 1024), PREFILL, quick),
        ):
            yield Configuration(
                f"{name} {head_dim}/{group}", partial(run, *settings), launched, in_short, parts
            )
    yield Configuration("verify 128/2 long", partial(launch, 128, 2, 1, 9), SPLIT)
    for head_dim, name, options in (
        (128, "window", {"window": 4096}),
        (128, "window cap", {"window": 4096, "soft_cap": 50.0}),
        (256, "window cap", {"window": 4096, "soft_cap": 50.0}),
        (128, "page 16", {"page": 16}),
        (128, "float16", {"dtype": torch.float16}),
    ):
        run = partial(launch, head_dim, 4, 1, **options)
        yield Configuration(f"decode {head_dim}/4 {name}", partial(run, 1), SPLIT)
        yield Configuration(f"prefill {head_dim}/4 {name}", partial(run, 1024), PREFILL)
    for head_dim, group in ((64, 3), (128, 4), (256, 4)):
        run = partial(launch, head_dim, group, 1, dtype=torch.float32)
        name = f"{head_dim}/{group} float32"
        for launch_name, query_len, launched in (
            ("decode", 1, SPLIT_FLOAT32),
            ("verify", 5, SPLIT_FLOAT32),
            ("prefill", 1024, {"_attend": works}),
        ):
            yield Configuration(
                f"{launch_name} {name}", partial(run, query_len), launched, False, (90,)
            )


CONFIGURATIONS = list(_configurations())
