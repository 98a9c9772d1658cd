"""Input preparation in plain torch; see ``pagestream_kernels.input_prep`` for shapes."""

from __future__ import annotations

import torch


def prepare_inputs(
    idx_mapping: torch.Tensor,
    query_lens: torch.Tensor,
    num_tokens: int | None,
    token_ids: torch.Tensor,
    num_computed_tokens: torch.Tensor,
    block_tables: torch.Tensor,
    block_size: int,
    advance: bool = False,
) -> tuple[torch.Tensor, ...]:
    device = token_ids.device
    num_tokens = int(query_lens.sum()) if num_tokens is None else num_tokens
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
    seq_lens = context_lens + query_lens
    if advance:
        num_computed_tokens[idx_mapping] = seq_lens
    return (
        token_ids[states, positions].long(),
        positions,
        blocks * block_size + positions % block_size,
        query_start_loc,
        seq_lens.to(torch.int32),
    )


def gather_logits_rows(
    hidden: torch.Tensor,
    query_start_loc: torch.Tensor,
    idx_mapping: torch.Tensor,
    num_logits: torch.Tensor,
    positions: torch.Tensor,
    num_rows: int,
) -> tuple[torch.Tensor, ...]:
    ends = query_start_loc[1 : len(num_logits) + 1].long()
    last = num_logits.cumsum(0)
    rows = torch.arange(num_rows, device=hidden.device)
    shift = (ends - last).repeat_interleave(num_logits, output_size=num_rows)
    indices = rows + shift
    states = idx_mapping.repeat_interleave(num_logits, output_size=num_rows)
    return hidden[indices], states, positions[indices] + 1


def append_tokens(
    states: torch.Tensor, positions: torch.Tensor, sampled: torch.Tensor, token_ids: torch.Tensor
) -> None:
    real = states >= 0
    drawn = sampled[real].clamp_min(0).to(token_ids.dtype)
    token_ids[states[real], positions[real]] = drawn


def staged_write(
    target: torch.Tensor,
    rows: torch.Tensor,
    starts: torch.Tensor,
    value_start_loc: torch.Tensor,
    values: torch.Tensor,
) -> None:
    target = target.view(len(target), -1)
    ends = value_start_loc.tolist()
    for write, (row, start) in enumerate(zip(rows.tolist(), starts.tolist(), strict=True)):
        low, high = ends[write], ends[write + 1]
        target[row, start : start + high - low] = values[low:high]
