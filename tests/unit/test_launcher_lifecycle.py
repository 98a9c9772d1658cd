"""The launcher with a real server whose parts are killed: it comes back, or leaves nothing."""

import contextlib
import http.client
import json
import os
import signal
import threading
import time
from pathlib import Path

import pytest

from pagestream.cli import shared_memory
from pagestream.cli.server_process import StartError, start_server
from pagestream.cli.supervisor import FAILURES_BEFORE_RESTART, WATCH_INTERVAL_SECS
from pagestream.model_store import cache_directory

pytestmark = [pytest.mark.server, pytest.mark.smollm2, pytest.mark.long]
SETTINGS = {"max_model_len": 256, "num_blocks": 16, "max_num_seqs": 4}


@contextlib.contextmanager
def server(**flags):
    running = start_server(**SETTINGS, **flags)
    try:
        yield running
    finally:
        running.stop()


def wait_until(condition, seconds):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"not within {seconds} s"
        time.sleep(0.05)


def process_of(server, model):
    """The python backend's process for one of the models."""
    for pid in shared_memory.session_processes(server.tritonserver_pid):
        if f"/{model}/1/model.py" in Path(f"/proc/{pid}/cmdline").read_text():
            return pid
    raise AssertionError(f"no process serves {model}")


def regions_on_disk(regions):
    return [name for name in regions if (shared_memory.SHM / name).exists()]


def generate(server, max_tokens):
    connection = http.client.HTTPConnection("127.0.0.1", server.http_port, timeout=60)
    body = {"text_input": "Hello", "max_tokens": max_tokens, "ignore_eos": True}
    with contextlib.closing(connection):
        connection.request("POST", "/v2/models/ensemble/generate", json.dumps(body))
        return json.loads(connection.getresponse().read())


def generate_until_cut_off(server):
    with pytest.raises((http.client.HTTPException, ConnectionError)):
        generate(server, 200)


@pytest.mark.parametrize("model", ["engine", "postprocessing_batched"])
def test_a_killed_model_process_brings_a_new_server(model):
    with server() as running:
        old = running.tritonserver_pid
        regions = shared_memory.regions_of(shared_memory.session_processes(old))
        assert len(regions) >= 4
        os.kill(process_of(running, model), signal.SIGKILL)
        wait_until(lambda: not running.ready_file.exists(), 30)
        wait_until(running.ready_file.exists, 60)
        assert running.tritonserver_pid != old
        assert shared_memory.session_processes(old) == []
        assert regions_on_disk(regions) == []
        assert "is not healthy" in running.messages
        assert "text_output" in generate(running, 1)


def test_a_killed_launcher_takes_the_server_along_and_the_next_one_cleans_up():
    with server() as running:
        pid = running.tritonserver_pid
        regions = shared_memory.regions_of(shared_memory.session_processes(pid))
        run_directory = running.config.parent
        os.kill(running.pid, signal.SIGKILL)
        wait_until(lambda: not shared_memory.session_processes(pid), 30)
        assert run_directory.is_dir()
    with pytest.raises(StartError, match="no CUDA device"):
        start_server(device="cuda", **SETTINGS)
    assert not run_directory.exists()
    assert regions_on_disk(regions) == []


def test_the_second_signal_stops_at_once():
    with server() as running:
        pid = running.tritonserver_pid
        asked = threading.Thread(target=generate_until_cut_off, args=(running,))
        asked.start()
        time.sleep(0.5)
        running.send_signal(signal.SIGINT)
        wait_until(lambda: "Draining" in running.messages, 5)
        running.send_signal(signal.SIGINT)
        assert running.wait(5) == 128 + signal.SIGINT
        assert shared_memory.session_processes(pid) == []
        asked.join()


def test_a_stop_while_starting_leaves_nothing():
    before = set((cache_directory() / "run").iterdir())
    with pytest.raises(StartError) as failure:
        start_server(timeout=1.5, **SETTINGS)
    assert "Stopping at once" in str(failure.value)
    assert set((cache_directory() / "run").iterdir()) <= before


def test_models_unloaded_on_purpose_are_no_reason_to_restart():
    with server(model_control="explicit") as running:
        pid = running.tritonserver_pid
        for model in ("ensemble", "chat", "vllm", "engine"):
            connection = http.client.HTTPConnection("127.0.0.1", running.http_port, timeout=60)
            with contextlib.closing(connection):
                connection.request("POST", f"/v2/repository/models/{model}/unload", "{}")
                assert connection.getresponse().status == 200
        time.sleep(FAILURES_BEFORE_RESTART * WATCH_INTERVAL_SECS + 2)
        assert running.tritonserver_pid == pid
        assert "warning" not in running.messages
        running.send_signal(signal.SIGTERM)
        assert running.wait(15) == 0
