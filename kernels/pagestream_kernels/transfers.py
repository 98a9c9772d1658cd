"""Copies between host and device that do not make the host wait for the device.

To the device through pinned memory, which torch's allocator gives away again only when the copy is
done; to the host on a stream of its own, so that the next step's work is not behind it. The one
wait is ``HostCopy.wait``. On CPU both are plain. Used by the runner and the sampler.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch


def to_device(
    values: Sequence[Any] | Any, dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    """A tensor of a host list or array, shaped like it. Returns at once."""
    pinned = torch.tensor(values, dtype=dtype, pin_memory=device.type == "cuda")
    return pinned.to(device, non_blocking=True)


def to_device_together(
    lists: Sequence[Sequence[Any]], dtype: torch.dtype, device: torch.device
) -> list[torch.Tensor]:
    """A tensor of each list, in one copy. Each begins at a multiple of 16 bytes, as a tensor of its
    own would: a kernel is compiled anew for pointers that do not."""
    step = 16 // dtype.itemsize
    packed: list[Any] = []
    spans = []
    for values in lists:
        spans.append(slice(len(packed), len(packed) + len(values)))
        packed.extend(values)
        packed.extend([0] * (-len(packed) % step))
    moved = to_device(packed, dtype, device)
    return [moved[span] for span in spans]


class HostCopy:
    """Tensors on their way to the host, in the order given."""

    def __init__(self, tensors: list[torch.Tensor]) -> None:
        self._event: torch.cuda.Event | None = None
        self._tensors = tensors
        if not tensors or not tensors[0].is_cuda:
            return
        device = tensors[0].device
        stream = _copy_stream(device)
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            self._tensors = [tensor.to("cpu", non_blocking=True) for tensor in tensors]
            self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._event.record(stream)
        for tensor in tensors:
            tensor.record_stream(stream)

    def wait(self) -> list[torch.Tensor]:
        """The copies; blocks until they are there."""
        if self._event is not None:
            self._event.synchronize()
        return self._tensors


@cache
def _copy_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
