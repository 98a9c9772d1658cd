"""Attention: fused qkv projection, rotary embedding with KV write, paged attention, output."""

from __future__ import annotations

import torch

from pagestream.config import ModelConfig
from pagestream.layers.linear import Linear
from pagestream_kernels import AttentionMetadata, paged_attention, rope_kv_write


class Attention:
    def __init__(self, config: ModelConfig, dtype: torch.dtype, device: torch.device) -> None:
        self._head_dim = config.head_dim
        kv_heads = config.num_key_value_heads
        self._head_counts = [config.num_attention_heads, kv_heads, kv_heads]
        q_size, kv_size = config.num_attention_heads * config.head_dim, kv_heads * config.head_dim
        self._scale = config.head_dim**-0.5
        rows = {"q_proj": q_size, "k_proj": kv_size, "v_proj": kv_size}
        bias = config.attention_bias
        self.qkv = Linear(config.hidden_size, rows, bias=bias, dtype=dtype, device=device)
        self.output = Linear(
            q_size, {"o_proj": config.hidden_size}, bias=bias, dtype=dtype, device=device
        )

    def forward(
        self,
        x: torch.Tensor,  # [num_tokens, hidden_size]
        rope: torch.Tensor,
        positions: torch.Tensor,
        slot_mapping: torch.Tensor,
        metadata: AttentionMetadata,
        kv_cache: torch.Tensor,  # [2, num_blocks, block_size, num_kv_heads, head_dim]
    ) -> torch.Tensor:
        heads = self.qkv(x).view(len(x), -1, self._head_dim)
        q, k, v = torch.split(heads, self._head_counts, dim=1)  # [num_tokens, heads, head_dim]
        k_cache, v_cache = kv_cache
        q = rope_kv_write(q, k, v, rope, positions, k_cache, v_cache, slot_mapping)
        attended = paged_attention(q, k_cache, v_cache, metadata, self._scale)
        return self.output(attended.flatten(1))
