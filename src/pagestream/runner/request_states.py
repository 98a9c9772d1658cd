"""RequestStates: the rows of persistent per-request state on the device.

Owns the assignment of state rows to requests, the tokens of each, and how far each has come. A
batch is a vector of row numbers (``idx_mapping``) over it, so nothing is moved or compacted when
requests come and go. It does not know blocks (BlockTables) or sampling (SamplingStates).
"""

from __future__ import annotations

import torch

from pagestream.scheduler.scheduler_output import NewRequest
from pagestream_kernels import staged_write
from pagestream_kernels.transfers import to_device, to_device_together


class RequestStates:
    """``max_num_seqs`` rows, and one more that no request ever has: ``padding_state``, for the
    padded rows of a batch. ``token_ids`` is every known token of each, prompt first."""

    def __init__(self, max_num_seqs: int, max_seq_len: int, device: torch.device) -> None:
        rows = max_num_seqs + 1
        self.token_ids = torch.zeros((rows, max_seq_len), dtype=torch.int32, device=device)
        self.num_computed_tokens = torch.zeros(rows, dtype=torch.int64, device=device)
        self.padding_state = max_num_seqs
        self._state_idx: dict[str, int] = {}
        self._free = list(range(max_num_seqs - 1, -1, -1))

    def add(self, requests: list[NewRequest]) -> list[int]:
        """Take a free row for each request and fill them, all with two copies to the device.

        RuntimeError if one has a row already.
        """
        if not requests:
            return []
        rows: list[int] = []
        ends, token_ids = [0], []
        for request in requests:
            if request.request_id in self._state_idx:
                raise RuntimeError(f"request {request.request_id} already has a state row")
            rows.append(self._free.pop())
            self._state_idx[request.request_id] = rows[-1]
            token_ids += request.token_ids
            ends.append(len(token_ids))
        device = self.token_ids.device
        num_computed = [request.num_computed_tokens for request in requests]
        rows_of, starts, ends_of, num_computed_of = to_device_together(
            [rows, [0] * len(rows), ends, num_computed], torch.int64, device
        )
        values = to_device(token_ids, torch.int32, device)
        staged_write(self.token_ids, rows_of, starts, ends_of, values)
        self.num_computed_tokens[rows_of] = num_computed_of
        return rows

    def remove(self, request_id: str) -> int:
        state_idx = self._state_idx.pop(request_id)
        self._free.append(state_idx)
        return state_idx

    def state_idx(self, request_id: str) -> int:
        return self._state_idx[request_id]
