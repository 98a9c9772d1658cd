"""Rotation, QK-norm and KV write in the interpreter."""

import pytest
import torch
from accuracy import DTYPES, check
from cases import huge_cache

from pagestream_kernels import reference, rope_kv_write, rope_table

BLOCK_SIZE = 16
EPS = 1e-6


def exact_rotation(x, norm, rope, positions):
    x = x.double()
    if norm is not None:
        x = reference.rms_norm(x, norm.double(), EPS)
    cos, sin = rope[positions].double().unsqueeze(2).unbind(1)
    low, high = x.chunk(2, dim=-1)
    return torch.cat((low * cos - high * sin, high * cos + low * sin), dim=-1)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("with_norm", [False, True], ids=["", "norm"])
@pytest.mark.parametrize(
    ("num_tokens", "kv_heads", "group", "head_dim"),
    [(5, 2, 4, 64), (3, 3, 3, 80), (1, 1, 1, 96), (4, 8, 5, 128), (2, 1, 7, 256), (0, 2, 4, 64)],
)
def test_rope_kv_write(num_tokens, kv_heads, group, head_dim, with_norm, dtype):
    """q, k and v are views of one qkv output, every third token is padding."""
    num_heads = kv_heads * group
    qkv = torch.randn(num_tokens, num_heads + 2 * kv_heads, head_dim).to(dtype)
    q, k, v = qkv.split([num_heads, kv_heads, kv_heads], dim=1)
    q_norm, k_norm = torch.randn(2, head_dim).to(dtype) if with_norm else (None, None)
    rope = rope_table(512, head_dim, 10000.0, torch.get_default_device())
    positions = torch.randint(0, 512, (num_tokens,))
    slots = torch.randperm(4 * BLOCK_SIZE)[:num_tokens]
    slots[::3] = -1
    shape = (2, 4, BLOCK_SIZE, kv_heads, head_dim)
    caches, twins = torch.full((2, *shape), float("nan"), dtype=dtype)
    arguments = (q, k, v, rope, positions)
    norms = {"q_norm": q_norm, "k_norm": k_norm, "eps": EPS}
    before = qkv.clone()
    actual = rope_kv_write(*arguments, *caches, slots, **norms)
    twin = reference.rope_kv_write(*arguments, *twins, slots, **norms)
    assert qkv.equal(before)
    check(actual, twin, exact_rotation(q, q_norm, rope, positions))
    owned = slots >= 0
    stored, stored_twin = caches.flatten(1, 2), twins.flatten(1, 2)  # [2, slots, heads, dim]
    assert stored.isnan().equal(stored_twin.isnan())
    at = slots[owned]
    check(stored[0, at], stored_twin[0, at], exact_rotation(k, k_norm, rope, positions)[owned])
    assert stored[1, at].equal(v[owned])


def test_slots_past_2_to_the_31_elements():
    kv_heads, head_dim = 8, 128
    cache = huge_cache(BLOCK_SIZE, kv_heads, head_dim)
    last = cache.shape[0] * BLOCK_SIZE - 1
    x = torch.randn(1, kv_heads, head_dim).half()
    rope = rope_table(1, head_dim, 10000.0, torch.get_default_device())  # position 0 does not turn
    zero = torch.tensor([0])
    rope_kv_write(x, x, x, rope, zero, cache, cache, torch.tensor([last]))
    assert cache[-1, -1].equal(x[0])
