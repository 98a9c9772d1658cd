"""InputBatch: everything one forward pass and one sampling pass read.

Built once per step from the SchedulerOutput and the persistent state; nothing in it outlives the
step. Filled by ``build_input_batch``, read by the model, the sampler and the runner.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from pagestream.runner.block_tables import BlockTables
from pagestream.runner.request_states import RequestStates
from pagestream.scheduler.scheduler_output import ScheduledRequest, SchedulerOutput
from pagestream_kernels import AttentionMetadata, plan_attention, prepare_inputs
from pagestream_kernels.transfers import to_device


@dataclass(frozen=True, slots=True)
class InputBatch:
    scheduled: list[ScheduledRequest]
    state_rows: list[int]  # per request
    num_logits: list[int]  # per request, 0 inside a prompt
    input_ids: torch.Tensor  # int64 [num_tokens]
    positions: torch.Tensor  # int64 [num_tokens]
    slot_mapping: torch.Tensor  # int64 [num_tokens]
    attention: AttentionMetadata
    idx_mapping: torch.Tensor  # int64 [num_reqs], batch row -> state row
    query_lens: torch.Tensor  # int64 [num_reqs]
    logits_indices: torch.Tensor  # int64 [num_rows], flat token of each logits row
    logits_states: torch.Tensor  # int64 [num_rows], state row of each logits row
    logits_rows: list[int]  # the same on the host


def build_input_batch(
    output: SchedulerOutput, states: RequestStates, tables: BlockTables, block_size: int
) -> InputBatch:
    device = states.token_ids.device
    query_lens: list[int] = []
    state_rows: list[int] = []
    logits_indices: list[int] = []
    logits_states: list[int] = []
    end = 0
    for request in output.scheduled:
        state_idx = states.state_idx(request.request_id)
        state_rows.append(state_idx)
        query_lens.append(request.num_scheduled_tokens)
        end += request.num_scheduled_tokens
        logits_indices.extend(range(end - request.num_logits, end))
        logits_states.extend([state_idx] * request.num_logits)
    # One copy for all that the host sends.
    packed = to_device(
        state_rows + query_lens + logits_indices + logits_states, torch.int64, device
    )
    lengths = [len(state_rows), len(query_lens), len(logits_indices), len(logits_states)]
    idx_mapping, query_lens_tensor, logits_indices_tensor, logits_states_tensor = torch.split(
        packed, lengths
    )
    prepared = prepare_inputs(
        idx_mapping,
        query_lens_tensor,
        end,
        states.token_ids,
        states.num_computed_tokens,
        tables.block_tables,
        block_size,
    )
    return InputBatch(
        scheduled=output.scheduled,
        state_rows=state_rows,
        num_logits=[request.num_logits for request in output.scheduled],
        input_ids=prepared.input_ids,
        positions=prepared.positions,
        slot_mapping=prepared.slot_mapping,
        attention=plan_attention(
            prepared.query_start_loc,
            prepared.seq_lens,
            tables.block_tables,
            block_size,
            idx_mapping=idx_mapping,
            max_query_len=max(query_lens),
        ),
        idx_mapping=idx_mapping,
        query_lens=query_lens_tensor,
        logits_indices=logits_indices_tensor,
        logits_states=logits_states_tensor,
        logits_rows=logits_states,
    )
