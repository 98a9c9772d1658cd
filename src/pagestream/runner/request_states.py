"""RequestStates: the rows of persistent per-request state on the device.

Owns the assignment of state rows to requests, the tokens of each, and how far each has come. A
batch is a vector of row numbers (``idx_mapping``) over it, so nothing is moved or compacted when
requests come and go. It does not know blocks (BlockTables) or sampling (SamplingStates).
"""

from __future__ import annotations

import torch

from pagestream.scheduler.scheduler_output import NewRequest
from pagestream_kernels.transfers import to_device


class RequestStates:
    """``max_num_seqs`` rows, and one more that no request ever has: ``padding_state``, for the
    padded rows of a batch. ``token_ids`` is every known token of each, prompt first."""

    def __init__(self, max_num_seqs: int, max_seq_len: int, device: torch.device) -> None:
        rows = max_num_seqs + 1
        self.token_ids = torch.zeros((rows, max_seq_len), dtype=torch.int32, device=device)
        self.num_computed_tokens = torch.zeros(rows, dtype=torch.int64, device=device)
        self.num_tokens = torch.zeros(rows, dtype=torch.int64, device=device)
        self.padding_state = max_num_seqs
        self._state_idx: dict[str, int] = {}
        self._free = list(range(max_num_seqs - 1, -1, -1))

    def add(self, request: NewRequest) -> int:
        """Take a free row for the request and fill it; RuntimeError if it has one already."""
        if request.request_id in self._state_idx:
            raise RuntimeError(f"request {request.request_id} already has a state row")
        state_idx = self._free.pop()
        self._state_idx[request.request_id] = state_idx
        num_tokens = len(request.token_ids)
        self.token_ids[state_idx, :num_tokens] = to_device(
            request.token_ids, torch.int32, self.token_ids.device
        )
        self.num_tokens[state_idx] = num_tokens
        self.num_computed_tokens[state_idx] = request.num_computed_tokens
        return state_idx

    def remove(self, request_id: str) -> int:
        state_idx = self._state_idx.pop(request_id)
        self._free.append(state_idx)
        return state_idx

    def state_idx(self, request_id: str) -> int:
        return self._state_idx[request_id]

    def append_tokens(self, idx_mapping: torch.Tensor, token_ids: torch.Tensor) -> None:
        """Write one sampled token per row, where the next step's gather will find it."""
        positions = self.num_tokens[idx_mapping]
        self.token_ids[idx_mapping, positions] = token_ids.clamp_min(0).to(torch.int32)
        self.num_tokens[idx_mapping] = positions + 1

    def advance(self, idx_mapping: torch.Tensor, query_lens: torch.Tensor) -> None:
        self.num_computed_tokens[idx_mapping] += query_lens
