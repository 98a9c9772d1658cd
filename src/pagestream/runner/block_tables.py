"""BlockTables: each state row's KV block ids, on the device.

Append-only within a request's life; entries past a row's count are stale and never read. A step's
new blocks, of whichever rows, are written in one go. Used by ModelRunner.
"""

from __future__ import annotations

import torch

from pagestream_kernels.transfers import to_device


class BlockTables:
    def __init__(self, max_num_seqs: int, max_blocks: int, device: torch.device) -> None:
        self.block_tables = torch.zeros(
            (max_num_seqs, max_blocks), dtype=torch.int32, device=device
        )
        self._num_blocks = [0] * max_num_seqs

    def reset(self, state_idx: int) -> None:
        self._num_blocks[state_idx] = 0

    def append(self, new_blocks: list[tuple[int, list[int]]]) -> None:
        """``new_blocks``: (state row, its further block ids)."""
        width = self.block_tables.shape[1]
        places: list[int] = []
        values: list[int] = []
        for state_idx, block_ids in new_blocks:
            if block_ids:
                start = self._num_blocks[state_idx]
                end = self._num_blocks[state_idx] = start + len(block_ids)
                places.extend(range(state_idx * width + start, state_idx * width + end))
                values += block_ids
        if places:
            device = self.block_tables.device
            index, written = to_device([places, values], torch.int64, device)
            self.block_tables.view(-1)[index] = written.to(torch.int32)
