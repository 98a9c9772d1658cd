"""InputBatch: everything one forward pass and one sampling pass read.

Built once per step from the SchedulerOutput and the persistent state, in which the step's tokens
count as computed from then on; nothing in it outlives the step. Filled by ``build_input_batch``,
read by the model, the sampler and the runner.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from pagestream.runner.block_tables import BlockTables
from pagestream.runner.request_states import RequestStates
from pagestream.scheduler.scheduler_output import ScheduledRequest, SchedulerOutput
from pagestream_kernels import (
    AttentionMetadata,
    LogitsRows,
    gather_logits_rows,
    plan_attention,
    prepare_inputs,
)
from pagestream_kernels.transfers import to_device_together


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
    num_logits_of: torch.Tensor  # int64 [num_reqs], num_logits on the device

    def logits_rows(self, hidden: torch.Tensor) -> LogitsRows:
        """The rows of ``hidden`` [num_tokens, hidden_size] that give logits."""
        return gather_logits_rows(
            hidden,
            self.attention.query_start_loc,
            self.idx_mapping,
            self.num_logits_of,
            self.positions,
            sum(self.num_logits),
        )


def build_input_batch(
    output: SchedulerOutput, states: RequestStates, tables: BlockTables, block_size: int
) -> InputBatch:
    device = states.token_ids.device
    state_rows = [states.state_idx(request.request_id) for request in output.scheduled]
    query_lens = [request.num_scheduled_tokens for request in output.scheduled]
    num_logits = [request.num_logits for request in output.scheduled]
    # One copy for all that the host sends.
    idx_mapping, query_lens_of, num_logits_of = to_device_together(
        [state_rows, query_lens, num_logits], torch.int64, device
    )
    prepared = prepare_inputs(
        idx_mapping,
        query_lens_of,
        sum(query_lens),
        states.token_ids,
        states.num_computed_tokens,
        tables.block_tables,
        block_size,
        advance=True,
    )
    return InputBatch(
        scheduled=output.scheduled,
        state_rows=state_rows,
        num_logits=num_logits,
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
        num_logits_of=num_logits_of,
    )
