"""Plain torch twins of every op: float32, no tricks, same signatures. The truth for all others."""

from pagestream_kernels.reference.input_prep import (
    append_tokens,
    gather_logits_rows,
    prepare_inputs,
    staged_write,
)
from pagestream_kernels.reference.paged_attention import paged_attention
from pagestream_kernels.reference.rms_norm import fused_add_rms_norm, rms_norm
from pagestream_kernels.reference.rope_kv_write import rope_kv_write
from pagestream_kernels.reference.sampling import (
    apply_penalties,
    filter_min_p,
    filter_top_k_top_p,
    gather_logprobs,
    gumbel_argmax,
    uniforms,
)
from pagestream_kernels.reference.silu_and_mul import gelu_tanh_and_mul, silu_and_mul

__all__ = [
    "append_tokens",
    "apply_penalties",
    "filter_min_p",
    "filter_top_k_top_p",
    "fused_add_rms_norm",
    "gather_logits_rows",
    "gather_logprobs",
    "gelu_tanh_and_mul",
    "gumbel_argmax",
    "paged_attention",
    "prepare_inputs",
    "rms_norm",
    "rope_kv_write",
    "silu_and_mul",
    "staged_write",
    "uniforms",
]
