"""EngineProcess: the calls of EngineLoop, across a pipe, and what becomes of a lost end."""

import queue
import signal
import subprocess
import sys
import time

import pytest

from pagestream.config import EngineConfig
from pagestream.engine.engine_loop import AbortRequest, AddRequest, EngineLoop, Shutdown
from pagestream.engine.engine_process import EngineProcess
from pagestream.request import FinishReason
from pagestream.sampling_params import SamplingParams

GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)


def config(directory, **options):
    return EngineConfig(str(directory), num_blocks=40, block_size=16, num_threads=1, **options)


def add(loop, request_id, params=GREEDY):
    loop.submit(AddRequest(request_id, [5, 6, 7], params, time.monotonic()))


def until_finished(reports, request_id):
    token_ids = []
    while True:
        for output in reports.get(timeout=30).outputs:
            if output.request_id == request_id:
                token_ids += output.token_ids
                if output.finish_reason is not None:
                    return token_ids, output.finish_reason


def start(kind, directory):
    reports = queue.SimpleQueue()
    loop = kind(config(directory), reports.put)
    return loop, reports, loop.start()


def test_it_answers_as_the_thread_does(tiny_model):
    results = []
    for kind in (EngineLoop, EngineProcess):
        loop, reports, limits = start(kind, tiny_model)
        add(loop, "a")
        answer = until_finished(reports, "a")
        add(loop, "b", SamplingParams(temperature=0, max_tokens=400, ignore_eos=True))
        loop.submit(AbortRequest("b"))
        assert until_finished(reports, "b")[1] is FinishReason.ABORT
        loop.submit(Shutdown())
        loop.join(20)
        results.append((limits, answer))
    assert results[0] == results[1]


def test_a_killed_child_is_one_failure(tiny_model):
    process, reports, _ = start(EngineProcess, tiny_model)
    process._process.send_signal(signal.SIGKILL)
    process.join(20)
    failures = []
    while not reports.empty():
        failures.append(reports.get().failure)
    assert [failure for failure in failures if failure] == ["the engine process ended"]
    add(process, "late")  # refused by the pipe, not raised to whoever decodes requests


def test_a_model_that_cannot_load_says_why(tmp_path):
    with pytest.raises(RuntimeError, match="FileNotFoundError"):
        start(EngineProcess, tmp_path / "nowhere")


PARENT = """
import sys, time
from pagestream.config import EngineConfig
from pagestream.engine.engine_process import EngineProcess
process = EngineProcess(EngineConfig.from_json(sys.argv[1]), lambda report: None)
process.start()
print(process._process.pid, flush=True)
time.sleep(60)
"""


def test_the_child_ends_with_its_parent(tiny_model, tmp_path):
    file = tmp_path / "engine.json"
    file.write_text(config(tiny_model).to_json())
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT, str(file)], stdout=subprocess.PIPE, text=True
    )
    with parent:
        child = int(parent.stdout.readline())
        parent.kill()
    deadline = time.monotonic() + 10
    while _alive(child):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def _alive(pid):
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False
