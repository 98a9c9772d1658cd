"""Input preparation in plain torch; see ``pagestream_kernels.input_prep`` for shapes."""

from __future__ import annotations

import torch


def prepare_inputs(
    idx_mapping: torch.Tensor,
    query_lens: torch.Tensor,
    num_tokens: int,
    token_ids: torch.Tensor,
    num_computed_tokens: torch.Tensor,
    block_tables: torch.Tensor,
    block_size: int,
) -> tuple[torch.Tensor, ...]:
    device = token_ids.device
    ends = query_lens.cumsum(0)  # [num_reqs]
    query_start_loc = torch.zeros(len(query_lens) + 1, dtype=torch.int32, device=device)
    query_start_loc[1:] = ends
    context_lens = num_computed_tokens[idx_mapping]
    first = context_lens - (ends - query_lens)  # position minus flat index, per request
    repeats = {"output_size": num_tokens}
    states = idx_mapping.repeat_interleave(query_lens, **repeats)
    positions = torch.arange(num_tokens, device=device)
    positions = positions + first.repeat_interleave(query_lens, **repeats)
    blocks = block_tables[states, positions // block_size].long()
    return (
        token_ids[states, positions].long(),
        positions,
        blocks * block_size + positions % block_size,
        query_start_loc,
        (context_lens + query_lens).to(torch.int32),
    )
