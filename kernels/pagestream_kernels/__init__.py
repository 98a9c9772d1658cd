"""The ops that the engine runs, one public function each, dispatched by the tensor's device.

Owns numerics only: no op knows requests, schedules or models. Every op has a plain torch twin of
the same signature in ``reference``, which is the truth for all implementations. ``cpu`` holds what
a CPU runs where the reference would be slow. Called by ``pagestream.layers``, ``pagestream.runner``
and ``pagestream.sampling``.
"""

from pagestream_kernels.input_prep import (
    LogitsRows,
    PreparedInputs,
    append_tokens,
    gather_logits_rows,
    prepare_inputs,
    staged_write,
)
from pagestream_kernels.int8_linear import Int8Weight, int8_linear, quantize_int8
from pagestream_kernels.logits_processors import (
    add_bias,
    apply_bitmask,
    apply_penalties,
    ban_endings,
    ban_stop_tokens,
    count_tokens,
)
from pagestream_kernels.paged_attention import AttentionMetadata, paged_attention, plan_attention
from pagestream_kernels.rms_norm import fused_add_rms_norm, rms_norm
from pagestream_kernels.rope_kv_write import rope_kv_write, rope_table
from pagestream_kernels.sampling import (
    Logprobs,
    argmax_tokens,
    filter_thresholds,
    gather_logprobs,
    gumbel_argmax,
)
from pagestream_kernels.silu_and_mul import gelu_tanh_and_mul, silu_and_mul

__all__ = [
    "AttentionMetadata",
    "Int8Weight",
    "LogitsRows",
    "Logprobs",
    "PreparedInputs",
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
    "int8_linear",
    "paged_attention",
    "plan_attention",
    "prepare_inputs",
    "quantize_int8",
    "rms_norm",
    "rope_kv_write",
    "rope_table",
    "silu_and_mul",
    "staged_write",
]
