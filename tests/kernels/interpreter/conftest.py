"""Runs these tests in Triton's interpreter, on a GPU if there is one, or skips them visibly.

Whether kernels are interpreted is fixed when they are defined, so it takes a process of its own:
``make kernels-interpret``, which sets TRITON_INTERPRET=1. Tests name no device: tensors are made on
torch's default one.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from pagestream_kernels.dispatch import HAS_TRITON, INTERPRETED

ON_GPU = not INTERPRETED and torch.cuda.is_available()
if INTERPRETED:
    import bf16_interpreter

    bf16_interpreter.install()


# Triton 3.6's interpreter takes loaded scalars for arrays of one element.
_SCALARS = pytest.mark.filterwarnings(
    "ignore:Conversion of an array with ndim > 0 to a scalar:DeprecationWarning"
)


def pytest_collection_modifyitems(items):
    reason = "needs a GPU, or TRITON_INTERPRET=1: make kernels-interpret"
    if not HAS_TRITON:
        reason = "triton is not installed"
    mark = pytest.mark.gpu if ON_GPU and HAS_TRITON else pytest.mark.skip(reason=reason)
    for item in items:
        if item.path.is_relative_to(Path(__file__).parent):
            item.add_marker(_SCALARS if INTERPRETED else mark)


@pytest.fixture(autouse=True)
def _default_device():
    if ON_GPU:
        torch.set_default_device("cuda")
    yield
    if ON_GPU:
        torch.set_default_device(None)


@pytest.fixture(autouse=True)
def _overflow_to_infinity():
    """A GPU does so silently. What numpy calls invalid (it makes a NaN) stays an error."""
    with np.errstate(over="ignore"):
        yield


@pytest.fixture(autouse=True)
def _poisoned_allocations(monkeypatch):
    """What a kernel leaves unwritten is NaN (or absurd), not a lucky zero."""
    torch.manual_seed(0)

    def poisoned(create):
        def wrapper(*args, **kwargs):
            made = create(*args, **kwargs)
            if made.dtype.is_floating_point:
                return made.fill_(float("nan"))
            return made.fill_(-(10**6)) if made.dtype in (torch.int32, torch.int64) else made

        return wrapper

    for owner, name in (
        (torch, "empty"),
        (torch, "empty_like"),
        (torch.Tensor, "new_empty"),
    ):
        monkeypatch.setattr(owner, name, poisoned(getattr(owner, name)))
