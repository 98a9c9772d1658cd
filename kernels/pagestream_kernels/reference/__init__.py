"""Plain torch twins of every op: float32, no tricks, same signatures. The truth for all others."""

from pagestream_kernels.reference.input_prep import (
    append_tokens,
    gather_logits_rows,
    prepare_inputs,
    staged_write,
)
from pagestream_kernels.reference.logits_processors import (
    add_bias,
    apply_bitmask,
    apply_penalties,
    ban_endings,
    ban_stop_tokens,
    count_tokens,
)
from pagestream_kernels.reference.paged_attention import paged_attention
from pagestream_kernels.reference.rms_norm import fused_add_rms_norm, rms_norm
from pagestream_kernels.reference.rope_kv_write import rope_kv_write
from pagestream_kernels.reference.sampling import (
    argmax_tokens,
    filter_thresholds,
    gather_logprobs,
    gumbel_argmax,
    uniforms,
)
from pagestream_kernels.reference.silu_and_mul import gelu_tanh_and_mul, silu_and_mul

__all__ = [
    "add_bias",
    "append_tokens",
    "apply_bitmask",
    "apply_penalties",
    "argmax_tokens",
    "ban_endings",
    "ban_stop_tokens",
    "count_tokens",
    "filter_thresholds",
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
