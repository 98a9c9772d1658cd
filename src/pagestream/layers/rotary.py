"""Which rotary frequencies a checkpoint's config asks for."""

from __future__ import annotations

import math
from functools import partial

import torch

from pagestream.config import ModelConfig, RopeScaling
from pagestream_kernels import rope_table


def rope_table_of(config: ModelConfig, max_model_len: int, device: torch.device) -> torch.Tensor:
    """float32 [max_model_len, 2, head_dim // 2], as ``rope_table``."""
    scaling = config.rope_scaling
    rescale = None if scaling is None else partial(llama3_frequencies, scaling=scaling)
    return rope_table(max_model_len, config.head_dim, config.rope_theta, device, rescale)


def llama3_frequencies(frequencies: torch.Tensor, scaling: RopeScaling) -> torch.Tensor:
    """Divide the slow frequencies by the factor, keep the fast ones, and blend in between.

    Slow and fast go by the number of turns within the positions that the model was first trained
    on: below ``low_freq_factor``, above ``high_freq_factor``. Source: Llama 3.1's rope_scaling.
    """
    turns = scaling.original_max_position_embeddings * frequencies / (2 * math.pi)
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    kept = ((turns - low) / (high - low)).clamp(0, 1)  # share of the frequency that stays as it is
    return (1 - kept) * frequencies / scaling.factor + kept * frequencies
