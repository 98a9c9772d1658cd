"""The dense Qwen3 family: Llama's body with an RMSNorm of each head of q and k before the rotation.

Its head_dim is the config's own, not hidden_size over num_attention_heads.
"""

from __future__ import annotations

from pagestream.models.llama import LlamaForCausalLM


class Qwen3ForCausalLM(LlamaForCausalLM):
    qk_norm = True
