"""Restarts, signals and the explanation of failed starts, without a server."""

import signal

import pytest

from pagestream.cli import diagnosis
from pagestream.cli.supervisor import RestartBudget, StopRequested, StopSignals

LOG = """\
W1129 20:34:06.978408 1 pinned_memory_manager.cc:273] "CUDA driver version is insufficient"
E1129 20:34:06.978480 1 server.cc:241] "CudaDriverHelper has not been initialized."
I1129 20:34:06.982124 1 python_be.cc:2249] "TRITONBACKEND_ModelInstanceInitialize: engine_0_0"
"""
RAISED = (
    'I1129 20:34:08.6 1 pb_stub.cc:366] "Failed to initialize Python stub: ValueError: device is '
    'cuda, but torch finds no CUDA device\\n\\nAt:\\n  model_runner.py(135): resolve_device\\n"\n'
)


@pytest.fixture
def signals():
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = {number: signal.getsignal(number) for number in numbers}
    installed = StopSignals()
    installed.install()
    yield installed
    for number, handler in before.items():
        signal.signal(number, handler)


def test_restarts_are_limited_within_the_window_only():
    times = iter((0.0, 100.0, 200.0, 600.0, 601.0, 602.0))
    budget = RestartBudget(limit=3, window=600.0, now=lambda: next(times))
    assert [budget.spend() for _ in range(6)] == [True, True, True, False, True, False]


def test_the_first_signal_only_asks(signals):
    signal.raise_signal(signal.SIGTERM)
    assert signals.wait(1.0)
    assert (signals.count, signals.last) == (1, signal.SIGTERM)


def test_the_second_signal_interrupts_a_drain(signals):
    signal.raise_signal(signal.SIGTERM)
    with signals.raising_at(2), pytest.raises(StopRequested):
        signal.raise_signal(signal.SIGINT)
    assert signals.last == signal.SIGINT


def test_the_first_signal_interrupts_a_start(signals):
    with signals.raising_at(1), pytest.raises(StopRequested):
        signal.raise_signal(signal.SIGHUP)


def test_a_signal_that_came_before_interrupts_at_once(signals):
    signal.raise_signal(signal.SIGTERM)
    with pytest.raises(StopRequested), signals.raising_at(1):
        pytest.fail("the start went on")


def test_after_the_interruptible_part_a_signal_only_asks(signals):
    with signals.raising_at(1):
        pass
    signal.raise_signal(signal.SIGTERM)
    assert signals.wait(1.0)


def test_what_a_model_raised_is_all_that_is_shown(tmp_path):
    log = tmp_path / "log"
    log.write_text(LOG + RAISED + 'E1129 20:34:15.3 1 x.cc:1] "a consequence"\n')
    assert diagnosis.explain(log) == [
        "ValueError: device is cuda, but torch finds no CUDA device",
    ]


def test_without_an_exception_the_error_lines_are_shown_without_noise(tmp_path):
    log = tmp_path / "log"
    log.write_text(LOG + "E1129 20:34:15.3 1 main.cc:1] failed to start HTTP service\n")
    error, advice = diagnosis.explain(log)
    assert error.endswith("failed to start HTTP service")
    assert advice == "What to do: a port was taken meanwhile: try again"


def test_an_earlier_starts_errors_are_not_shown(tmp_path):
    log = tmp_path / "log"
    log.write_text(RAISED)
    start = log.stat().st_size
    with log.open("a") as file:
        file.write("I1129 20:34:15.3 1 main.cc:1] the last words\n")
    assert diagnosis.explain(log, start) == ["I1129 20:34:15.3 1 main.cc:1] the last words"]


def test_no_log_explains_nothing(tmp_path):
    assert diagnosis.explain(tmp_path / "log") == []
