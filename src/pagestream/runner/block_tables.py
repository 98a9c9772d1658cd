"""BlockTables: each state row's KV block ids, on the device.

Append-only within a request's life; entries past a row's count are stale and never read. A step's
new blocks, of whichever rows, are written in one go. Used by ModelRunner.
"""

from __future__ import annotations

import torch

from pagestream_kernels import staged_write
from pagestream_kernels.transfers import to_device, to_device_together


class BlockTables:
    def __init__(self, max_num_seqs: int, max_blocks: int, device: torch.device) -> None:
        self.block_tables = torch.zeros(
            (max_num_seqs, max_blocks), dtype=torch.int32, device=device
        )
        self._num_blocks = [0] * max_num_seqs

    def reset(self, state_idx: int) -> None:
        self._num_blocks[state_idx] = 0

    def append(self, new_blocks: list[tuple[int, list[int]]]) -> None:
        """``new_blocks``: (state row, its further block ids), each row once."""
        rows: list[int] = []
        starts: list[int] = []
        values: list[int] = []
        ends = [0]
        for state_idx, block_ids in new_blocks:
            if block_ids:
                rows.append(state_idx)
                starts.append(self._num_blocks[state_idx])
                self._num_blocks[state_idx] += len(block_ids)
                values += block_ids
                ends.append(len(values))
        if rows:
            device = self.block_tables.device
            writes = to_device_together([rows, starts, ends], torch.int64, device)
            written = to_device(values, torch.int32, device)
            staged_write(self.block_tables, writes[0], writes[1], writes[2], written)
