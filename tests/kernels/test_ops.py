"""Each op's CPU path against its reference twin, and the references against dense oracles."""

import pytest
import torch

from pagestream_kernels import (
    LogitsRows,
    PreparedInputs,
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

TOLERANCE = {"rtol": 1e-5, "atol": 1e-5}


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


@pytest.mark.parametrize("shape", [(1, 64), (7, 100), (3, 1023)])
def test_norms_match_their_reference(shape):
    x, residual = torch.randn(shape), torch.randn(shape)
    weight = torch.randn(shape[-1])
    torch.testing.assert_close(
        rms_norm(x, weight, 1e-5), reference.rms_norm(x, weight, 1e-5), **TOLERANCE
    )
    expected = reference.fused_add_rms_norm(x, residual.clone(), weight, 1e-5)
    actual = fused_add_rms_norm(x, residual, weight, 1e-5)
    torch.testing.assert_close(actual, expected, **TOLERANCE)
    assert actual[1] is residual


@pytest.mark.parametrize("shape", [(1, 64), (5, 198)])
@pytest.mark.parametrize(
    ("op", "twin"),
    [
        (silu_and_mul, reference.silu_and_mul),
        (gelu_tanh_and_mul, reference.gelu_tanh_and_mul),
    ],
    ids=["silu", "gelu"],
)
def test_gated_products(op, twin, shape):
    gate_up = torch.randn(shape)
    torch.testing.assert_close(op(gate_up), twin(gate_up), **TOLERANCE)


def test_rope_matches_transformers():
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

    config = LlamaConfig(
        head_dim=32, hidden_size=64, num_attention_heads=2, max_position_embeddings=128
    )
    config.rope_parameters = {"rope_type": "default", "rope_theta": 50000.0}
    q, k = torch.randn(9, 2, 32), torch.randn(9, 2, 32)
    positions = torch.randint(0, 128, (9,))
    cos, sin = LlamaRotaryEmbedding(config)(q, positions[None])
    expected_q, expected_k = apply_rotary_pos_emb(
        q.transpose(0, 1)[None], k.transpose(0, 1)[None], cos, sin
    )
    k_cache, v_cache = torch.zeros(2, 16, 2, 32), torch.zeros(2, 16, 2, 32)
    slots = torch.arange(9) + 3
    table = rope_table(128, 32, 50000.0, torch.device("cpu"))
    actual_q = rope_kv_write(q, k, k + 1, table, positions, k_cache, v_cache, slots)
    torch.testing.assert_close(actual_q, expected_q[0].transpose(0, 1), **TOLERANCE)
    stored = k_cache.flatten(0, 1)[slots]
    torch.testing.assert_close(stored, expected_k[0].transpose(0, 1), **TOLERANCE)
    torch.testing.assert_close(v_cache.flatten(0, 1)[slots], k + 1)


def test_padding_slots_store_nothing():
    cache = [torch.full((2, 16, 1, 8), float("nan")) for _ in range(2)]
    table = rope_table(16, 8, 1e4, torch.device("cpu"))
    x = torch.randn(3, 1, 8)
    slots = torch.tensor([5, -1, -1])
    rope_kv_write(x, x, x, table, torch.arange(3), *cache, slots)
    for stored in cache:
        assert stored.flatten(0, 1).isnan().any(-1).any(-1).sum() == 31


def paged_case(query_lens, context_lens, kv_heads, group, head_dim, block_size):
    """Random caches in which every slot that no request owns is NaN."""
    seq_lens = [q + c for q, c in zip(query_lens, context_lens, strict=True)]
    blocks_per_row = [-(-length // block_size) for length in seq_lens]
    order = torch.randperm(sum(blocks_per_row) + 3).tolist()
    tables = torch.full((len(seq_lens), max(blocks_per_row) + 1), 10**6, dtype=torch.int32)
    shape = (len(order), block_size, kv_heads, head_dim)
    caches = [torch.full(shape, float("nan")) for _ in range(2)]
    dense = []
    for row, length in enumerate(seq_lens):
        ids = [order.pop() for _ in range(blocks_per_row[row])]
        tables[row, : len(ids)] = torch.tensor(ids, dtype=torch.int32)
        slots = [ids[p // block_size] * block_size + p % block_size for p in range(length)]
        kv = torch.randn(2, length, kv_heads, head_dim)
        for cache, values in zip(caches, kv, strict=True):
            cache.flatten(0, 1)[slots] = values
        dense.append(kv)
    starts = torch.tensor([0, *query_lens]).cumsum(0).to(torch.int32)
    q = torch.randn(sum(query_lens), kv_heads * group, head_dim)
    lengths = torch.tensor(seq_lens, dtype=torch.int32)
    metadata = plan_attention(starts, lengths, tables, block_size)
    return q, caches, metadata, dense


def dense_attention(q, metadata, dense, scale):
    """An oracle that never heard of blocks: float64, one query at a time."""
    out = torch.empty_like(q)
    starts = metadata.query_start_loc.tolist()
    for row, (keys, values) in enumerate(dense):
        group = q.shape[1] // keys.shape[1]
        query_len = starts[row + 1] - starts[row]
        for offset in range(query_len):
            visible = len(keys) - query_len + offset + 1
            for head in range(q.shape[1]):
                k = keys[:visible, head // group].double()
                v = values[:visible, head // group].double()
                scores = k @ q[starts[row] + offset, head].double() * scale
                out[starts[row] + offset, head] = (scores.softmax(0) @ v).float()
    return out


@pytest.mark.parametrize("group", [1, 3, 4, 5, 8])
@pytest.mark.parametrize("block_size", [16, 32, 64])
@pytest.mark.parametrize(
    ("query_lens", "context_lens"),
    [
        ([1], [0]),
        ([7], [0]),
        ([1, 1, 1, 1], [15, 16, 17, 200]),
        ([5, 1, 63, 1, 2], [0, 31, 1, 64, 63]),
        ([33], [95]),
    ],
)
def test_attention_of_mixed_batches(query_lens, context_lens, block_size, group):
    q, caches, metadata, dense = paged_case(query_lens, context_lens, 2, group, 24, block_size)
    scale = 24**-0.5
    expected = dense_attention(q, metadata, dense, scale)
    fields = (metadata.query_start_loc, metadata.seq_lens, metadata.block_tables)
    torch.testing.assert_close(
        reference.paged_attention(q, *caches, *fields, scale), expected, **TOLERANCE
    )
    torch.testing.assert_close(paged_attention(q, *caches, metadata, scale), expected, **TOLERANCE)


@torch.no_grad()
def test_qk_norm_comes_before_the_rotation():
    """Against Qwen3's own attention, up to its attention function."""
    from transformers import Qwen3Config
    from transformers.models.qwen3.modeling_qwen3 import (
        Qwen3RMSNorm,
        Qwen3RotaryEmbedding,
        apply_rotary_pos_emb,
    )

    config = Qwen3Config(head_dim=32, max_position_embeddings=128)
    config.rope_parameters = {"rope_type": "default", "rope_theta": 50000.0}
    norms = [Qwen3RMSNorm(32, eps=1e-6) for _ in range(2)]
    for norm in norms:
        torch.nn.init.normal_(norm.weight)
    q, k = torch.randn(9, 4, 32), torch.randn(9, 2, 32)
    positions = torch.randint(0, 128, (9,))
    cos, sin = Qwen3RotaryEmbedding(config)(q, positions[None])
    normed = [norm(x).transpose(0, 1)[None] for norm, x in zip(norms, (q, k), strict=True)]
    expected = [x[0].transpose(0, 1) for x in apply_rotary_pos_emb(*normed, cos, sin)]
    caches = [torch.zeros(1, 16, 2, 32) for _ in range(2)]
    table = rope_table(128, 32, 50000.0, torch.device("cpu"))
    weights = {"q_norm": norms[0].weight, "k_norm": norms[1].weight, "eps": 1e-6}
    slots = torch.arange(9)
    rotated = rope_kv_write(q, k, k, table, positions, *caches, slots, **weights)
    torch.testing.assert_close(rotated, expected[0], **TOLERANCE)
    torch.testing.assert_close(caches[0][0, :9], expected[1], **TOLERANCE)


@pytest.mark.parametrize("padding", [0, 2])
def test_prepared_inputs(padding):
    token_ids = torch.arange(40, dtype=torch.int32).view(4, 10)
    tables = torch.tensor([[9, 9, 9], [5, 3, 0], [9, 9, 9], [7, 2, 1]], dtype=torch.int32)
    computed = torch.tensor([0, 5, 0, 0])
    out = PreparedInputs.empty(9, 4, torch.device("cpu")) if padding else None
    prepared = prepare_inputs(
        torch.tensor([3, 1]),
        torch.tensor([6, 1]),
        7,
        token_ids,
        computed,
        tables,
        4,
        advance=True,
        out=out,
    )
    assert prepared.input_ids.tolist() == [30, 31, 32, 33, 34, 35, 15] + [0] * padding
    assert prepared.positions.tolist() == [0, 1, 2, 3, 4, 5, 5] + [0] * padding
    assert prepared.slot_mapping.tolist() == [28, 29, 30, 31, 8, 9, 13] + [-1] * padding
    assert prepared.query_start_loc.tolist() == [0, 6, 7] + [7] * padding
    assert prepared.seq_lens.tolist() == [6, 6] + [0] * padding
    assert computed.tolist() == [0, 6, 0, 6]


@pytest.mark.parametrize("padding", [0, 1])
def test_logits_rows(padding):
    hidden = torch.arange(7.0)[:, None]
    starts = torch.tensor([0, 3, 3, 7], dtype=torch.int32)
    positions = torch.tensor([10, 11, 12, 0, 1, 2, 3])
    out = LogitsRows(torch.empty(4, 1), *torch.zeros(2, 4).long()) if padding else None
    arguments = (starts, torch.tensor([5, 6, 8]), torch.tensor([1, 0, 2]), positions, 3)
    rows = gather_logits_rows(hidden, *arguments, out=out)
    assert rows.hidden[:, 0].tolist() == [2, 5, 6] + [0] * padding
    assert rows.states.tolist() == [5, 8, 8] + [-1] * padding
    assert rows.positions.tolist() == [13, 3, 4] + [0] * padding


def test_drawn_tokens_are_appended():
    token_ids = torch.zeros(2, 6, dtype=torch.int32)
    states, positions = torch.tensor([1, 1, 0, -1]), torch.tensor([2, 3, 1, 0])
    append_tokens(states, positions, torch.tensor([9, -1, 7, 5]), token_ids)
    assert token_ids.tolist() == [[0, 7, 0, 0, 0, 0], [0, 0, 9, 0, 0, 0]]


def test_staged_writes():
    target = torch.zeros(3, 4, dtype=torch.int32)
    ends = torch.tensor([0, 2, 2, 3], dtype=torch.int32)
    rows, starts = torch.tensor([2, 0, 1]), torch.tensor([1, 0, 3])
    staged_write(target, rows, starts, ends, torch.tensor([7, 8, 9], dtype=torch.int32))
    assert target.tolist() == [[0] * 4, [0, 0, 0, 9], [0, 7, 8, 0]]
