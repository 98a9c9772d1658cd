"""How many KV-cache blocks there is memory for, on either device.

Knows bytes and devices, not models: what a step needs beside the cache is measured by running the
largest one (CUDA). Called by ModelRunner once, at start.
"""

from __future__ import annotations

import os
from collections.abc import Callable

import torch

from pagestream.config import ModelConfig

_CPU_KV_BYTES = 2 << 30
"""Most memory that an unset num_blocks gives the KV cache on CPU (a quarter of RAM if less)."""


def block_bytes(model_config: ModelConfig, block_size: int, dtype: torch.dtype) -> int:
    per_token = 2 * model_config.num_hidden_layers * model_config.num_key_value_heads
    return per_token * model_config.head_dim * block_size * dtype.itemsize


def num_blocks_on_cpu(bytes_per_block: int, most: int) -> int:
    ram = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return max(1, min(most, min(_CPU_KV_BYTES, ram // 4) // bytes_per_block))


def num_blocks_on_cuda(
    device: torch.device,
    bytes_per_block: int,
    most: int,
    utilization: float,
    largest_step: Callable[[], None],
) -> int:
    """What ``utilization`` of the device's memory leaves beside the weights and a largest step.

    The pool of recorded decode steps is not in it (recording needs the cache to exist); it holds
    the intermediates of one step of ``max_num_seqs`` tokens, and comes out of the other share.

    Raises ValueError if that is not even one block.
    """
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    largest_step()
    torch.cuda.synchronize(device)
    peak = torch.cuda.max_memory_allocated(device)
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    # What others hold, this process's context and libraries among it, is not ours to use.
    others = total - free - torch.cuda.memory_reserved(device)
    budget = int(total * utilization) - others - peak
    if budget < bytes_per_block:
        raise ValueError(
            f"gpu_memory_utilization is {utilization}: of {total >> 20} MiB that leaves no room "
            f"for a KV block beside {peak >> 20} MiB for the model and {others >> 20} MiB in use"
        )
    return min(most, budget // bytes_per_block)
