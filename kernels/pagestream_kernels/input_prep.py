"""Per-step input preparation from the state rows of the scheduled requests.

Everything a step's forward pass reads (ids, positions, slots, lengths) is derived on the device
from persistent state, so the host sends only which rows run and how many tokens each.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from pagestream_kernels import reference


@dataclass(frozen=True, slots=True)
class PreparedInputs:
    """The flat batch of one step."""

    input_ids: torch.Tensor  # int64 [num_tokens]
    positions: torch.Tensor  # int64 [num_tokens]
    slot_mapping: torch.Tensor  # int64 [num_tokens], -1 for padding
    query_start_loc: torch.Tensor  # int32 [num_reqs + 1]
    seq_lens: torch.Tensor  # int32 [num_reqs]


def prepare_inputs(
    idx_mapping: torch.Tensor,
    query_lens: torch.Tensor,
    num_tokens: int,
    token_ids: torch.Tensor,
    num_computed_tokens: torch.Tensor,
    block_tables: torch.Tensor,
    block_size: int,
) -> PreparedInputs:
    """Gather the flat batch.

    Args:
        idx_mapping: int64 [num_reqs], batch row -> state row.
        query_lens: int64 [num_reqs], tokens of each request in this step, at least 1.
        num_tokens: their sum, known to the host.
        token_ids: int32 [num_states, max_model_len], every known token of each state row.
        num_computed_tokens: int64 [num_states], tokens whose KV is cached.
        block_tables: int32 [num_states, max_blocks].
    """
    fields = reference.prepare_inputs(
        idx_mapping,
        query_lens,
        num_tokens,
        token_ids,
        num_computed_tokens,
        block_tables,
        block_size,
    )
    return PreparedInputs(*fields)
