"""BlockTables: each state row's KV block ids, on the device.

Append-only within a request's life; entries past a row's count are stale and never read.
"""

from __future__ import annotations

import torch


class BlockTables:
    def __init__(self, max_num_seqs: int, max_blocks: int, device: torch.device) -> None:
        self.block_tables = torch.zeros(
            (max_num_seqs, max_blocks), dtype=torch.int32, device=device
        )
        self._num_blocks = [0] * max_num_seqs

    def reset(self, state_idx: int) -> None:
        self._num_blocks[state_idx] = 0

    def append(self, state_idx: int, block_ids: list[int]) -> None:
        if block_ids:
            start = self._num_blocks[state_idx]
            end = self._num_blocks[state_idx] = start + len(block_ids)
            self.block_tables[state_idx, start:end] = torch.tensor(block_ids, dtype=torch.int32)
