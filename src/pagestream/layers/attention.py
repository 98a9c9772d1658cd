"""Attention: fused qkv projection, rotary embedding with KV write, paged attention, output.

With ``qk_norm``, each head of q and k is normed before it is rotated (Qwen3).
"""

from __future__ import annotations

import torch

from pagestream.config import ModelConfig
from pagestream.layers.linear import Linear
from pagestream_kernels import AttentionMetadata, paged_attention, rope_kv_write


class Attention:
    def __init__(
        self, config: ModelConfig, dtype: torch.dtype, device: torch.device, *, qk_norm: bool
    ) -> None:
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
        self._eps = config.rms_norm_eps
        self._q_norm: torch.Tensor | None = None
        self._k_norm: torch.Tensor | None = None
        if qk_norm:
            self._q_norm = torch.empty(config.head_dim, dtype=dtype, device=device)
            self._k_norm = torch.empty_like(self._q_norm)

    def targets(self, prefix: str) -> dict[str, torch.Tensor]:
        targets = self.qkv.targets(prefix) | self.output.targets(prefix)
        if self._q_norm is not None and self._k_norm is not None:
            targets[f"{prefix}q_norm.weight"] = self._q_norm
            targets[f"{prefix}k_norm.weight"] = self._k_norm
        return targets

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
        q = rope_kv_write(
            *(q, k, v, rope, positions, k_cache, v_cache, slot_mapping),
            q_norm=self._q_norm,
            k_norm=self._k_norm,
            eps=self._eps,
        )
        attended = paged_attention(q, k_cache, v_cache, metadata, self._scale)
        return self.output(attended.flatten(1))
