"""The Llama family: pre-norm decoder with grouped-query attention and a SiLU-gated MLP.

Fuses q, k, v and gate, up at load time. Knows checkpoint names and layer order; not requests, not
sampling. ``targets`` says which checkpoint tensor fills which memory; ``weights`` does the filling.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from pagestream.config import ModelConfig
from pagestream.layers.attention import Attention
from pagestream.layers.linear import Linear
from pagestream.layers.rotary import rope_table_of
from pagestream_kernels import (
    AttentionMetadata,
    fused_add_rms_norm,
    rms_norm,
    silu_and_mul,
)


class LlamaLayer:
    def __init__(
        self, config: ModelConfig, dtype: torch.dtype, device: torch.device, *, qk_norm: bool
    ) -> None:
        hidden, inner = config.hidden_size, config.intermediate_size
        bias = config.mlp_bias
        self.attention = Attention(config, dtype, device, qk_norm=qk_norm)
        self.gate_up = Linear(
            hidden, {"gate_proj": inner, "up_proj": inner}, bias=bias, dtype=dtype, device=device
        )
        self.down = Linear(inner, {"down_proj": hidden}, bias=bias, dtype=dtype, device=device)
        self.input_norm = torch.empty(hidden, dtype=dtype, device=device)
        self.post_attention_norm = torch.empty(hidden, dtype=dtype, device=device)

    def targets(self, prefix: str) -> dict[str, torch.Tensor]:
        return {
            f"{prefix}input_layernorm.weight": self.input_norm,
            f"{prefix}post_attention_layernorm.weight": self.post_attention_norm,
            **self.attention.targets(f"{prefix}self_attn."),
            **self.gate_up.targets(f"{prefix}mlp."),
            **self.down.targets(f"{prefix}mlp."),
        }


class LlamaForCausalLM:
    """Weights are uninitialised until every tensor of ``targets`` is filled."""

    qk_norm = False

    def __init__(
        self, config: ModelConfig, max_model_len: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self._eps = config.rms_norm_eps
        self._embedding = torch.empty(
            (config.vocab_size, config.hidden_size), dtype=dtype, device=device
        )
        self._layers = [
            LlamaLayer(config, dtype, device, qk_norm=self.qk_norm)
            for _ in range(config.num_hidden_layers)
        ]
        self._norm = torch.empty(config.hidden_size, dtype=dtype, device=device)
        self._tied = config.tie_word_embeddings
        self._head = Linear(
            config.hidden_size,
            {"lm_head": config.vocab_size},
            bias=False,
            dtype=dtype,
            device=device,
            weight=self._embedding if self._tied else None,
        )
        self._rope = rope_table_of(config, max_model_len, device)

    def targets(self) -> dict[str, torch.Tensor]:
        targets = {"model.embed_tokens.weight": self._embedding, "model.norm.weight": self._norm}
        for index, layer in enumerate(self._layers):
            targets.update(layer.targets(f"model.layers.{index}."))
        if not self._tied:
            targets |= self._head.targets("")
        return targets

    def ignored(self, name: str) -> bool:
        """Checkpoint tensors that hold nothing this model needs to read."""
        return name.endswith("rotary_emb.inv_freq") or (self._tied and name == "lm_head.weight")

    def forward(
        self,
        input_ids: torch.Tensor,  # int64 [num_tokens]
        positions: torch.Tensor,  # int64 [num_tokens]
        slot_mapping: torch.Tensor,  # int64 [num_tokens]
        metadata: AttentionMetadata,
        kv_cache: torch.Tensor,  # [layers, 2, num_blocks, block_size, num_kv_heads, head_dim]
    ) -> torch.Tensor:
        """Final hidden states, normed: [num_tokens, hidden_size]."""
        residual = F.embedding(input_ids, self._embedding)
        x = rms_norm(residual, self._layers[0].input_norm, self._eps)
        for index, layer in enumerate(self._layers):
            x = layer.attention.forward(
                x, self._rope, positions, slot_mapping, metadata, kv_cache[index]
            )
            x, residual = fused_add_rms_norm(x, residual, layer.post_attention_norm, self._eps)
            x = layer.down(silu_and_mul(layer.gate_up(x)))
            last = index + 1 == len(self._layers)
            norm = self._norm if last else self._layers[index + 1].input_norm
            x, residual = fused_add_rms_norm(x, residual, norm, self._eps)
        return x

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[num_rows, hidden_size] -> [num_rows, vocab_size]."""
        return self._head(hidden)

    def quantize(self) -> None:
        """Turn all matrices but the embedding into 8-bit ones, once the weights are loaded."""
        linears = [self._head]
        for layer in self._layers:
            linears += [layer.attention.qkv, layer.attention.output, layer.gate_up, layer.down]
        for linear in linears:
            linear.quantize()
