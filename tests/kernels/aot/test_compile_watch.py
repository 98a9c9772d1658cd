"""The warning of kernels that compile after the warm-up, with a driver that only compiles."""

import logging

import pytest
import torch
from compile_kernels import compile_for

triton = pytest.importorskip("triton")
tl = triton.language
pytestmark = pytest.mark.skipif(triton.knobs.runtime.interpret, reason="the interpreter is on")


@triton.jit
def _double(ptr, COUNT: tl.constexpr):
    at = ptr + tl.arange(0, COUNT)
    tl.store(at, tl.load(at) * 2)


def launch(count):
    _double[(1,)](torch.empty(64, device="meta"), COUNT=count)


def test_only_what_compiles_late_is_named(monkeypatch, caplog):
    from pagestream_kernels.triton import compile_watch

    seen = []
    runtime = triton.knobs.runtime
    monkeypatch.setattr(runtime, "jit_post_compile_hook", lambda **compiled: seen.append(compiled))
    with caplog.at_level(logging.WARNING):
        compile_for(90, lambda: launch(16))
        assert len(seen) == 1
        for _ in range(2):  # the second finds itself installed
            compile_watch.install()
        compile_for(90, lambda: launch(16))
        assert caplog.messages == []
        compile_for(90, lambda: launch(32))
    (message,) = caplog.messages
    assert message.startswith("_double compiled after the warm-up")
    assert "num_warps=4" in message
    assert len(seen) == 2, "whoever listened before still hears of it"
