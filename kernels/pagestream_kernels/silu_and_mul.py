"""SiLU-gated product over a fused gate-up projection."""

from __future__ import annotations

import torch

from pagestream_kernels import reference
from pagestream_kernels.cpu import silu_and_mul as cpu


def silu_and_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """``silu(gate) * up`` of [num_tokens, 2 * intermediate] -> [num_tokens, intermediate].

    The first half of the last axis is the gate. Source: Shazeer, 2020, SwiGLU.
    """
    if gate_up.device.type == "cpu":
        return cpu.silu_and_mul(gate_up)
    return reference.silu_and_mul(gate_up)
