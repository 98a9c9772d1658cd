"""PaddedRows: a list (of lists) of numbers for each state row, padded, on the device.

As wide as the longest that ever came, by powers of two, so that what few requests use takes no
memory before. Used by SamplingStates.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from pagestream_kernels.transfers import to_device


class PaddedRows:
    def __init__(
        self, num_states: int, dims: int, dtype: torch.dtype, padding: int, device: torch.device
    ) -> None:
        self._padding = padding
        self.tensor: torch.Tensor = torch.empty(  # [num_states, *widths]
            (num_states, *[0] * dims), dtype=dtype, device=device
        )

    def set(self, state_idx: int, values: Sequence[Any]) -> None:
        """``values``: of as many dimensions as the row has, without gaps."""
        shape = np.shape(values)
        widths = self.tensor.shape[1:]
        if any(size > width for size, width in zip(shape, widths, strict=True)):
            widths = torch.Size(
                max(width, 1 << (size - 1).bit_length())
                for size, width in zip(shape, widths, strict=True)
            )
            grown = self.tensor.new_full((len(self.tensor), *widths), self._padding)
            grown[(slice(None), *map(slice, self.tensor.shape[1:]))] = self.tensor
            self.tensor = grown
        row = self.tensor[state_idx].fill_(self._padding)
        row[tuple(map(slice, shape))] = to_device(values, row.dtype, row.device)
