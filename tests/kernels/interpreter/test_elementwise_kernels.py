"""Norms and gated products in the interpreter, against their twins and float64."""

import pytest
import torch
from accuracy import DTYPES, check

from pagestream_kernels import (
    fused_add_rms_norm,
    gelu_tanh_and_mul,
    reference,
    rms_norm,
    silu_and_mul,
)

EPS = 1e-5


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(1, 64), (7, 100), (3, 1023), (0, 64), (2, 3, 576), (5, 2048)])
def test_norms(shape, dtype):
    x, residual = torch.randn(shape).to(dtype), torch.randn(shape).to(dtype)
    weight = torch.randn(shape[-1]).to(dtype)
    exact = reference.rms_norm(x.double(), weight.double(), EPS)
    check(rms_norm(x, weight, EPS), reference.rms_norm(x, weight, EPS), exact)

    total = x + residual  # in the tensors' dtype: what the norm is defined on
    exact = reference.rms_norm(total.double(), weight.double(), EPS)
    twin, _ = reference.fused_add_rms_norm(x, residual.clone(), weight, EPS)
    normed, added = fused_add_rms_norm(x, residual, weight, EPS)
    assert added is residual
    torch.testing.assert_close(added, total, rtol=0, atol=0)
    check(normed, twin, exact)


def test_norm_of_a_view():
    x = torch.randn(4, 3, 64).transpose(0, 1)
    torch.testing.assert_close(
        rms_norm(x, torch.ones(64), EPS), reference.rms_norm(x, torch.ones(64), EPS)
    )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(1, 128), (5, 198), (3, 2 * 2049), (0, 64)])
@pytest.mark.parametrize(
    ("op", "twin", "activation"),
    [
        (silu_and_mul, reference.silu_and_mul, torch.nn.functional.silu),
        (
            gelu_tanh_and_mul,
            reference.gelu_tanh_and_mul,
            lambda x: torch.nn.functional.gelu(x, approximate="tanh"),
        ),
    ],
    ids=["silu", "gelu"],
)
def test_gated_products(op, twin, activation, shape, dtype):
    gate_up = (torch.randn(shape) * 4).to(dtype)
    gate, up = gate_up.double().chunk(2, dim=-1)
    check(op(gate_up), twin(gate_up), activation(gate) * up)


def test_activations_of_huge_gates_are_finite():
    gate_up = torch.tensor([[-1e30, -200.0, 200.0, 1e30, 1.0, 1.0, 1.0, 1.0]])
    for op in (silu_and_mul, gelu_tanh_and_mul):
        torch.testing.assert_close(op(gate_up)[0], torch.tensor([0.0, 0.0, 200.0, 1e30]))
