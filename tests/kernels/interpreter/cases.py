"""Inputs that several tests of kernels share."""

from __future__ import annotations

import numpy as np
import torch


def huge_cache(block_size: int, kv_heads: int, head_dim: int) -> torch.Tensor:
    """float16 [num_blocks, block_size, kv_heads, head_dim] of just over 2^31 elements.

    On CPU, address space only: no page of it has memory before it is written.
    """
    block = block_size * kv_heads * head_dim
    shape = (2**31 // block + 1, block_size, kv_heads, head_dim)
    if torch.get_default_device().type == "cuda":
        return torch.zeros(shape, dtype=torch.float16)
    return torch.from_numpy(np.empty(shape, dtype=np.float16))
