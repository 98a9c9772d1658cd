"""native.cpp against the torch ops that run where it cannot be compiled."""

import os
import subprocess
import sys

import pytest
import torch

from pagestream_kernels import (
    int8_linear,
    paged_attention,
    plan_attention,
    quantize_int8,
    reference,
)
from pagestream_kernels.cpu import native
from pagestream_kernels.reference import int8_linear as int8_reference

pytestmark = pytest.mark.skipif(native.LIBRARY is None, reason="no C++ compiler here")


def relative(got, expected):
    error = (got.double() - expected.double()).norm() / expected.double().norm()
    assert not torch.isnan(error)
    return float(error)


@pytest.mark.parametrize("num_tokens", [1, 2, 3, 4, 5, 7, 16, 33])
@pytest.mark.parametrize(("out_features", "in_features"), [(96, 64), (33, 32), (576, 1536)])
def test_int8_linear(num_tokens, out_features, in_features):
    torch.manual_seed(num_tokens)
    weight, x = torch.randn(out_features, in_features), torch.randn(num_tokens, in_features)
    x[0, :3] *= 1000  # outliers
    x[-1, 32:] = 0
    dequantized = int8_reference.dequantize(*int8_reference.quantize(weight))
    got = int8_linear(x, quantize_int8(weight))
    assert got.shape == (num_tokens, out_features)
    assert relative(got, int8_reference.int8_linear(x, dequantized)) < 2e-6
    assert relative(got, x.double() @ dequantized.double().T) < 2e-4
    assert relative(got, x @ weight.T) < 1e-2


def test_weights_of_sixteen_levels_are_kept_as_they_are():
    torch.manual_seed(0)
    scale, minimum = (torch.rand(64, 4, 1).half().float() for _ in range(2))
    levels = torch.randint(0, 16, (64, 4, 32))
    levels[..., 0], levels[..., 1] = 0, 15
    weight = (scale * levels - minimum).flatten(1)
    got = int8_reference.dequantize(*int8_reference.quantize(weight))
    torch.testing.assert_close(got, weight, rtol=0, atol=1e-6)


def test_equal_weights_and_zeros_have_no_scale():
    weight = torch.zeros(32, 64)
    weight[:, 32:] = 0.5
    x = torch.randn(2, 64)
    torch.testing.assert_close(
        int8_linear(x, quantize_int8(weight)), x @ weight.T, rtol=0, atol=1e-3
    )


def test_other_widths_are_refused():
    with pytest.raises(ValueError, match="multiples of 32, got 48"):
        quantize_int8(torch.randn(4, 48))


@pytest.mark.parametrize(
    ("num_heads", "kv_heads", "head_dim"), [(9, 3, 64), (4, 4, 32), (7, 1, 80)]
)
def test_decode_attention_reads_only_owned_slots(num_heads, kv_heads, head_dim):
    torch.manual_seed(1)
    seq_lens = torch.tensor([1, 15, 16, 17, 70], dtype=torch.int32)
    k_cache = torch.full((40, 16, kv_heads, head_dim), float("nan"))
    v_cache = k_cache.clone()
    tables = torch.full((5, 8), 2**30, dtype=torch.int32)
    free = torch.randperm(40)
    for row, seq_len in enumerate(seq_lens.tolist()):
        for page in range(-(-seq_len // 16)):
            block, free = free[0], free[1:]
            tables[row, page] = block
            owned = min(16, seq_len - page * 16)
            for cache in (k_cache, v_cache):
                cache[block, :owned] = torch.randn(owned, kv_heads, head_dim)
    q = torch.randn(5, num_heads, head_dim) * 3
    starts = torch.arange(6, dtype=torch.int32)
    expected = reference.paged_attention(q, k_cache, v_cache, starts, seq_lens, tables, 0.2)
    metadata = plan_attention(starts, seq_lens, tables, 16)
    got = paged_attention(q, k_cache, v_cache, metadata, 0.2)
    assert relative(got, expected) < 2e-6


def test_without_the_library_torch_does_the_work():
    code = (
        "from pagestream_kernels.cpu import native; assert native.LIBRARY is None; "
        "import torch; from pagestream_kernels import quantize_int8, int8_linear; "
        "w, x = torch.randn(64, 32), torch.randn(3, 32); "
        "y = int8_linear(x, quantize_int8(w)); assert (y - x @ w.T).abs().max() < 0.1"
    )
    environment = os.environ | {"PAGESTREAM_NATIVE": "0"}
    subprocess.run([sys.executable, "-c", code], check=True, env=environment)
