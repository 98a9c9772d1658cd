"""EngineBridge on a tiny model: admission, coalescing, heartbeats, control, ends."""

import json
import threading
import time

import pytest

from pagestream.config import EngineConfig
from pagestream.serving.engine_bridge import EngineBridge
from pagestream.serving.responses import Pace, pace


class Sender:
    """A response sender; the responder below records on it."""

    def __init__(self):
        self.chunks = []
        self.errors = []
        self.finals = 0
        self.cancelled = False
        self.ended = threading.Event()

    def is_cancelled(self):
        return self.cancelled

    @property
    def token_ids(self):
        return [token for chunk in self.chunks for token in chunk.get("token_ids", [])]


class Recorder:
    def __init__(self):
        self.threads = set()
        self.metrics = []

    def send(self, sender, values, *, final):
        self.threads.add(threading.get_ident())
        assert not sender.ended.is_set(), "a response after the final one"
        sender.chunks.append(values)
        if final:
            sender.finals += 1
            sender.ended.set()

    def send_error(self, sender, message):
        self.threads.add(threading.get_ident())
        sender.errors.append(message)
        sender.finals += 1
        sender.ended.set()

    def set_metrics(self, stats):
        self.threads.add(threading.get_ident())
        self.metrics.append(stats)


class Harness:
    def __init__(self, directory, **options):
        values = {"num_blocks": 40, "block_size": 16, "max_num_seqs": 2, "num_threads": 1}
        config = EngineConfig(str(directory), control_secret="s3cret", **{**values, **options})
        self.recorder = Recorder()
        self.deaths = []
        self.bridge = EngineBridge(config, self.recorder, lambda: self.deaths.append(1))
        self.bridge.start()

    def submit(self, **inputs):
        sender = Sender()
        if "sampling_params" in inputs and isinstance(inputs["sampling_params"], dict):
            inputs["sampling_params"] = json.dumps(inputs["sampling_params"])
        self.bridge.submit(inputs, sender)
        return sender

    def generate(self, max_tokens=5, stream=True, **inputs):
        params = {"max_tokens": max_tokens, "temperature": 0, "ignore_eos": True, "stream": stream}
        inputs = {"prompt_token_ids": [5, 6, 7], "sampling_params": params, **inputs}
        return self.submit(**inputs)

    def control(self, **values):
        sender = self.submit(control=json.dumps(values))
        assert sender.ended.wait(5)
        return sender

    def stats(self):
        return json.loads(self.control(command="stats", secret="s3cret").chunks[0]["stats"])

    def until_idle(self):
        deadline = time.monotonic() + 10
        while self.stats()["num_running"] or self.stats()["num_open_requests"]:
            assert time.monotonic() < deadline
            time.sleep(0.02)


@pytest.fixture
def harness(tiny_model):
    harness = Harness(tiny_model)
    yield harness
    harness.bridge.shutdown()


def test_answer_ends_once_with_its_tokens_and_one_thread_speaks(harness):
    senders = [harness.generate() for _ in range(6)]
    for sender in senders:
        assert sender.ended.wait(10)
        assert len(sender.token_ids) == 5
        assert sender.chunks[-1]["finish_reason"] == "length"
        assert sender.finals == 1
        assert not sender.errors
    assert len({tuple(sender.token_ids) for sender in senders}) == 1
    assert len(harness.recorder.threads) == 1


def test_text_params_travel_unread_on_the_first_response_only(harness):
    sender = harness.generate(max_tokens=60, text_params="not json", request_key="key")
    assert sender.ended.wait(10)
    assert [chunk["text_params"] for chunk in sender.chunks][:2] == ["not json", None]
    assert {chunk["request_key"] for chunk in sender.chunks} == {"key"}


def test_first_token_at_once_then_coalesced(tiny_model):
    harness = Harness(tiny_model, stream_interval_ms=200)
    sender = harness.generate(max_tokens=120)
    assert sender.ended.wait(20)
    harness.bridge.shutdown()
    assert len(sender.chunks[0]["token_ids"]) == 1
    assert len(sender.token_ids) == 120
    assert len(sender.chunks) < 20


def test_each_stream_is_served_less_often_where_many_share_the_cores():
    unset = pace(None, on_gpu=False, num_cores=2)
    assert unset.interval(1) == unset.interval(4) == 0.04
    assert unset.interval(16) == pytest.approx(16 / 120)
    assert unset.interval(64) == pytest.approx(64 / 120)
    assert pace(None, on_gpu=False, num_cores=64).interval(64) == 0.04
    assert pace(None, on_gpu=True, num_cores=2).interval(60) == 0.04
    assert pace(None, on_gpu=True, num_cores=2).interval(300) == pytest.approx(0.2)
    assert pace(0, on_gpu=False, num_cores=1).interval(500) == 0


def test_the_streams_that_are_open_set_the_pace(tiny_model):
    harness = Harness(tiny_model, max_num_seqs=16, num_blocks=400)
    rate = 4 / 0.04
    harness.bridge._pace = Pace(rate)
    alone = harness.generate(max_tokens=400)
    assert alone.ended.wait(20)
    unread = [harness.generate(max_tokens=400, stream=False) for _ in range(3)]
    crowd = [harness.generate(max_tokens=400) for _ in range(12)]
    start = time.monotonic()
    for sender in crowd + unread:
        assert sender.ended.wait(60)
    seconds = time.monotonic() - start
    harness.bridge.shutdown()
    for sender in crowd:
        assert len(sender.token_ids) == 400
        assert 2 <= len(sender.chunks) <= seconds * rate / 12 + 3


def test_unstreamed_answers_come_in_few_parts(harness):
    sender = harness.generate(max_tokens=120, stream=False)
    assert sender.ended.wait(20)
    assert len(sender.token_ids) == 120
    assert len(sender.chunks) < 12


def test_waiting_requests_get_heartbeats(tiny_model):
    harness = Harness(tiny_model, heartbeat_interval_ms=50, max_num_seqs=1)
    running = harness.generate(max_tokens=400)
    waiting = harness.generate()
    deadline = time.monotonic() + 10
    while len(waiting.chunks) < 2 and not running.ended.is_set():
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert not running.ended.is_set()
    assert [chunk["token_ids"] for chunk in waiting.chunks[:2]] == [[], []]
    harness.bridge.shutdown()
    assert waiting.finals == running.finals == 1


@pytest.mark.parametrize(
    ("inputs", "words"),
    [
        ({}, "prompt_token_ids is required"),
        ({"prompt_token_ids": []}, "prompt_token_ids is empty"),
        ({"prompt_token_ids": [256]}, "prompt_token_ids contains 256"),
        ({"prompt_token_ids": [-1]}, "prompt_token_ids contains -1"),
        ({"prompt_token_ids": [1] * 600}, "600 tokens .* max_model_len is 512"),
        ({"prompt_token_ids": [1], "sampling_params": "{"}, "sampling_params is not valid JSON"),
        ({"prompt_token_ids": [1], "sampling_params": "[]"}, "sampling_params must be a JSON obj"),
        ({"prompt_token_ids": [1], "sampling_params": {"best_of": 2}}, "'best_of'"),
        ({"prompt_token_ids": [1], "sampling_params": {"max_tokens": 0}}, "max_tokens"),
        ({"prompt_token_ids": [1], "sampling_params": {"max_tokens": 1e9}}, "max_tokens"),
        ({"prompt_token_ids": [1], "sampling_params": {"stop_token_ids": [999]}}, "stop_token_ids"),
        ({"prompt_token_ids": [1], "sampling_params": {"stream": 1}}, "stream"),
        ({"prompt_token_ids": [1], "sampling_params": {"stop": "x"}}, "stop is about text"),
        ({"prompt_token_ids": [1], "sampling_params": {"arrival_time_ns": -1}}, "arrival_time_ns"),
        ({"prompt_token_ids": [1], "request_key": "k" * 300}, "request_key has 300"),
        ({"control": "{"}, "control is not valid JSON"),
        ({"control": "{}"}, "control.command must be one of stop, drain, stats"),
        ({"control": '{"command": "stop"}'}, "control.request_key is required"),
        ({"control": '{"command": "stop", "request_key": 3}'}, "must be strings"),
        ({"control": '{"command": "stop", "x": 3}'}, "unknown keys: x"),
        ({"control": '{"command": "stats"}'}, "needs the secret"),
        ({"control": '{"command": "drain", "secret": "wrong"}'}, "needs the secret"),
    ],
)
def test_garbage_gets_one_error_and_the_next_request_works(harness, inputs, words):
    import re

    sender = harness.submit(**inputs)
    assert sender.ended.wait(5)
    assert len(sender.errors) == 1
    assert re.search(words, sender.errors[0])
    assert sender.chunks == []
    good = harness.generate()
    assert good.ended.wait(10)
    assert len(good.token_ids) == 5


def test_an_empty_secret_authorises_nobody(tiny_model):
    harness = Harness(tiny_model)
    object.__setattr__(harness.bridge._config, "control_secret", "")
    assert "secret" in harness.control(command="drain", secret="").errors[0]
    harness.bridge.shutdown()


def test_stop_ends_running_and_waiting_requests(harness):
    senders = [harness.generate(max_tokens=400, request_key=str(index)) for index in range(4)]
    for index in range(4):
        harness.control(command="stop", request_key=str(index))
    for sender in senders:
        assert sender.ended.wait(5)
        assert sender.chunks[-1]["finish_reason"] == "abort"
    harness.until_idle()
    stats = harness.stats()
    assert stats["kv_blocks_free"] == stats["kv_blocks_total"] == 40
    assert stats["cancelled_total"] == 4


def test_stopping_an_unknown_request_is_harmless(harness):
    assert harness.control(command="stop", request_key="nobody").finals == 1


def test_a_cancelled_client_ends_its_request(harness):
    sender = harness.generate(max_tokens=480)
    sender.cancelled = True
    assert sender.ended.wait(5)
    assert sender.chunks[-1]["finish_reason"] == "abort"


def test_a_key_in_use_is_refused_and_the_first_goes_on(harness):
    first = harness.generate(max_tokens=50, request_key="same")
    second = harness.generate(request_key="same")
    assert second.ended.wait(5)
    assert "request_key 'same' is already in use" in second.errors[0]
    assert first.ended.wait(10)
    assert len(first.token_ids) == 50


def test_n_answers_end_with_one_final_response(harness):
    params = {"max_tokens": 6, "n": 3, "temperature": 3.0, "seed": 1, "ignore_eos": True}
    sender = harness.submit(
        prompt_token_ids=[5, 6, 7],
        sampling_params={**params, "logprobs": 2, "prompt_logprobs": 0},
        text_params="t",
    )
    assert sender.ended.wait(10)
    assert sender.finals == 1
    for index in range(3):
        chunks = [chunk for chunk in sender.chunks if (chunk["index"] or 0) == index]
        assert sum(len(chunk["token_ids"]) for chunk in chunks) == 6
        assert [chunk["text_params"] for chunk in chunks] == ["t"] + [None] * (len(chunks) - 1)
        assert chunks[-1]["finish_reason"] == "length"
        times = json.loads(chunks[-1]["timing"])
        moments = ("arrival", "first_scheduled", "first_token", "last_token")
        assert list(times) == [f"{moment}_time_ns" for moment in moments]
        assert list(times.values()) == sorted(times.values())
        rows = [
            row for chunk in chunks if chunk["logprobs"] for row in json.loads(chunk["logprobs"])
        ]
        tokens = [token for chunk in chunks for token in chunk["token_ids"]]
        assert [row[0] for row in rows] == tokens
        prompt = [json.loads(c["prompt_logprobs"]) for c in chunks if c["prompt_logprobs"]]
        assert [row and row[0] for row in prompt[0]] == [None, 6, 7]
    assert harness.stats()["num_open_requests"] == 0


def test_one_answer_of_n_can_be_stopped(harness):
    params = {"max_tokens": 400, "n": 2, "ignore_eos": True}
    sender = harness.submit(prompt_token_ids=[5, 6, 7], sampling_params=params, request_key="two")
    harness.control(command="stop", request_key="two", index=0)
    assert sender.ended.wait(20)
    ends = {c["index"] or 0: c["finish_reason"] for c in sender.chunks if c["finish_reason"]}
    assert ends == {0: "abort", 1: "length"}


def test_full_queue_is_an_in_band_error(tiny_model):
    harness = Harness(tiny_model, max_num_seqs=1, max_num_waiting=1)
    senders = [harness.generate(max_tokens=300) for _ in range(6)]
    for sender in senders:
        assert sender.ended.wait(20)
    harness.bridge.shutdown()
    refused = [s for s in senders if s.chunks[-1]["finish_reason"] == "error"]
    assert refused
    assert len(refused) + sum(len(s.token_ids) == 300 for s in senders) == 6
    for sender in refused:
        assert "max_num_waiting is 1" in sender.chunks[-1]["error"]


def test_drain_refuses_new_requests_and_lets_the_running_finish(harness):
    running = harness.generate(max_tokens=100)
    assert harness.control(command="drain", secret="s3cret").finals == 1
    late = harness.generate()
    assert late.ended.wait(5)
    assert late.errors == ["the server is shutting down"]
    assert running.ended.wait(10)
    assert len(running.token_ids) == 100
    assert harness.stats()["draining"] is True


def test_shutdown_answers_what_is_open(tiny_model):
    harness = Harness(tiny_model)
    senders = [harness.generate(max_tokens=400) for _ in range(4)]
    harness.bridge.shutdown()
    for sender in senders:
        assert sender.finals == 1
        assert sender.chunks[-1]["finish_reason"] == "abort"


def test_a_dead_engine_answers_everyone_and_ends_the_process(tiny_model, monkeypatch):
    from pagestream.runner.model_runner import ModelRunner

    harness = Harness(tiny_model)
    senders = [harness.generate(max_tokens=300) for _ in range(3)]
    monkeypatch.setattr(ModelRunner, "forward", lambda self, output: 1 / 0)
    for sender in senders:
        assert sender.ended.wait(5)
        assert (sender.chunks[-1]["finish_reason"], sender.finals) == ("error", 1)
        assert sender.chunks[-1]["error"] == "the engine failed"
    deadline = time.monotonic() + 5
    while not harness.deaths:
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_model_that_cannot_load_raises_at_start(tmp_path):
    bridge = EngineBridge(EngineConfig(str(tmp_path)), Recorder())
    with pytest.raises(FileNotFoundError, match=r"config\.json"):
        bridge.start()


def test_metrics_follow(harness):
    sender = harness.generate(max_tokens=20)
    assert sender.ended.wait(10)
    deadline = time.monotonic() + 5
    metrics = harness.recorder.metrics
    while not metrics or metrics[-1].generated_tokens_total < 20 or metrics[-1].requests_running:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    assert metrics[-1].generated_tokens_total == 20
    assert metrics[-1].kv_blocks_free == metrics[-1].kv_blocks_total == 40
