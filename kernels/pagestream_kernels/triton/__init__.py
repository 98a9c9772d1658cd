"""The Triton kernels, one file per family, each with launch wrappers of the public ops' signatures.

Imports triton, so only ``pagestream_kernels.dispatch`` may import it. Wrappers derive grids from
shapes and values the host has, and read everything else on the device: none of them waits for it.
Launch settings are fixed tables, so that no request ever waits for a tuner.
"""

from pagestream_kernels.triton import (
    compile_watch,
    filter_thresholds,
    input_prep,
    logits_processors,
    logprobs,
    paged_attention,
    rms_norm,
    rope_kv_write,
    sampling,
    silu_and_mul,
    vocabulary,
)
from pagestream_kernels.triton.device import INTERPRETED

__all__ = [
    "INTERPRETED",
    "compile_watch",
    "filter_thresholds",
    "input_prep",
    "logits_processors",
    "logprobs",
    "paged_attention",
    "rms_norm",
    "rope_kv_write",
    "sampling",
    "silu_and_mul",
    "vocabulary",
]
