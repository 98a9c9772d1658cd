"""Postprocessor: coalesced chunks in, answers out; errors only on the final chunk."""

import json

import pytest

from pagestream.serving.answers import Chunk
from pagestream.serving.postprocessing import Postprocessor
from pagestream.text.token_bytes import TokenBytes

BYTES = TokenBytes([bytes([i]) for i in range(256)], frozenset(), False)
PARAMS = {
    "convention": "ensemble",
    "outputs": [
        "text_output",
        "index",
        "finish_reason",
        "stop_reason",
        "num_input_tokens",
        "num_output_tokens",
        "num_cached_tokens",
        "output_token_ids",
        "output_logprobs",
        "prompt_token_logprobs",
        "timing",
    ],
    "echo": "",
    "n": 1,
    "stream": True,
    "http_stream": False,
    "stop": [],
    "include_stop_str_in_output": False,
    "skip_special_tokens": True,
    "min_tokens": 0,
    "prompt_tail": [],
    "num_input_tokens": 3,
}


class Harness:
    def __init__(self):
        self.stops = []
        self.cancelled = False
        self.post = Postprocessor(BYTES, 0.5, 4, lambda *key: self.stops.append(key))

    def send(self, text="", finish_reason=None, params=None, key="k", index=0, **fields):
        """The answer; its one-entry lists are unwrapped."""
        if params is not None:
            fields["text_params"] = json.dumps({**PARAMS, **params})
        chunk = Chunk(key, index, list(text.encode("latin-1")), finish_reason, **fields)
        return self.post.handle(chunk, lambda: self.cancelled)


def only(outputs):
    return {
        name: value[0] if isinstance(value, list) and name != "output_token_ids" else value
        for name, value in outputs.items()
    }


@pytest.fixture
def harness():
    return Harness()


def test_streamed_deltas_carry_their_own_counts(harness):
    first = harness.send("ab", params={})
    assert first.outputs == {
        "text_output": ["ab"],
        "finish_reason": [""],
        "num_input_tokens": 3,
        "num_output_tokens": [2],
        "output_token_ids": [97, 98],
        "output_logprobs": ["null"],
    }
    last = harness.send("c", "length")
    assert last.outputs["text_output"] == ["c"]
    assert last.outputs["num_output_tokens"] == [1]
    assert last.outputs["finish_reason"] == ["length"]
    assert (last.outputs["stop_reason"], last.outputs["num_cached_tokens"]) == ([""], [0])
    assert last.outputs["index"] == [0]


def test_unstreamed_is_one_answer(harness):
    assert harness.send("ab", params={"stream": False}) is None
    assert harness.send("cd") is None
    last = only(harness.send("e", "length").outputs)
    assert (last["text_output"], last["num_output_tokens"]) == ("abcde", 5)
    assert last["output_token_ids"] == [97, 98, 99, 100, 101]


def test_half_a_character_is_held_and_its_tokens_follow_it(harness):
    assert harness.send("\xc3", params={}) is None
    answer = only(harness.send("\xa9").outputs)
    assert (answer["text_output"], answer["num_output_tokens"]) == ("é", 2)


def test_heartbeats_are_swallowed(harness):
    assert harness.send("", params={}) is None
    assert harness.send("") is None
    assert harness.send("a", "length").outputs["text_output"][0] == "a"


def test_a_silent_http_stream_is_opened_by_one_empty_answer(harness):
    opened = only(harness.send("", params={"http_stream": True}).outputs)
    assert (opened["text_output"], opened["num_output_tokens"]) == ("", 0)
    assert harness.send("") is None
    assert harness.send("a").outputs["text_output"][0] == "a"


def test_vllm_spells_unfinished_as_none(harness):
    answer = harness.send("a", params={"convention": "vllm"})
    assert answer.outputs["finish_reason"] == ["None"]


def test_only_what_was_asked_for_is_returned(harness):
    params = {"outputs": ["text_output", "num_output_tokens"]}
    answer = harness.send("a", params=params)
    assert answer.outputs == {"text_output": ["a"], "num_output_tokens": [1]}


def test_an_echoed_prompt_comes_first_and_never_stops_the_answer(harness):
    params = {"stream": False, "echo": "say stop: ", "stop": ["stop"]}
    assert harness.send("ok", params=params) is None
    last = only(harness.send(" stop it", "length").outputs)
    assert (last["text_output"], last["finish_reason"]) == ("say stop: ok ", "stop")
    assert last["num_output_tokens"] == len("ok stop")


def test_metrics_in_the_names_of_tensorrt_llm(harness):
    names = ["arrival_time_ns", "first_scheduled_time_ns", "first_token_time_ns"]
    names += ["last_token_time_ns", "timing", "cum_log_probs", "output_log_probs"]
    names += [f"kv_cache_{kind}_blocks" for kind in ("alloc_total", "reused", "alloc_new")]
    times = dict(zip(names[:4], [10**9, 2 * 10**9, 3 * 10**9, None], strict=True))
    logprobs = json.dumps([[97, -0.5, 1, [], []], [98, -0.25, 1, [], []]])
    outputs = harness.send(
        "ab",
        "length",
        params={"outputs": names, "num_input_tokens": 8},
        timing=json.dumps(times),
        num_cached_tokens=4,
        logprobs=logprobs,
    ).outputs
    assert outputs == {
        **{name: [value or 0] for name, value in times.items()},
        "timing": ['{"queued_ms": 1000.0, "ttft_ms": 2000.0, "e2e_ms": null}'],
        "cum_log_probs": [-0.75],
        "output_log_probs": [[-0.5, -0.25]],
        "kv_cache_alloc_total_blocks": [3],  # 9 tokens in blocks of 4
        "kv_cache_reused_blocks": [1],
        "kv_cache_alloc_new_blocks": [2],
    }


def test_log_probabilities_of_several_answers_are_one_rectangle(harness):
    params = {"n": 2, "stream": False, "outputs": ["output_log_probs", "cum_log_probs"]}
    row = [97, -0.5, 1, [], []]
    harness.send("a", "stop", params=params, index=0, logprobs=json.dumps([row]))
    outputs = harness.send(
        "aa", "length", params=params, index=1, logprobs=json.dumps([row, row])
    ).outputs
    assert outputs == {
        "output_log_probs": [[-0.5, 0.0], [-0.5, -0.5]],
        "cum_log_probs": [-0.5, -1.0],
    }


def test_stop_string_relays_a_stop_and_answers_on_the_final_chunk(harness):
    assert harness.send("x", params={"stop": ["cd"]}).outputs["text_output"][0] == "x"
    assert harness.send("abcdef") is None
    assert harness.stops == [("k", 0)]
    assert harness.send("gh") is None
    last = only(harness.send("", "abort").outputs)
    assert (last["text_output"], last["finish_reason"]) == ("ab", "stop")
    assert last["num_output_tokens"] == 4
    assert bytes(last["output_token_ids"]) == b"abcd"


def test_stop_string_in_the_final_chunk_needs_no_relay(harness):
    last = only(harness.send("abcdef", "length", params={"stop": ["cd"]}).outputs)
    assert (last["text_output"], last["finish_reason"]) == ("ab", "stop")
    assert harness.stops == []


def test_what_may_begin_a_stop_string_is_released_at_the_end(harness):
    assert harness.send("abc", params={"stop": ["cd"]}).outputs["text_output"][0] == "ab"
    assert harness.send("", "length").outputs["text_output"][0] == "c"


def test_a_stop_tokens_text_is_left_out(harness):
    last = only(harness.send("ab", "stop", params={}).outputs)
    assert (last["text_output"], last["num_output_tokens"]) == ("a", 2)


def test_cancel_is_relayed_once(harness, monkeypatch):
    monkeypatch.setattr("pagestream.serving.postprocessing.CANCEL_CHECK_INTERVAL_S", 0.0)
    harness.send("a", params={})
    harness.cancelled = True
    harness.send("b")
    harness.send("c")
    assert harness.stops == [("k", -1)]


def test_a_failure_mid_stream_is_answered_on_the_final_chunk_only(harness, monkeypatch):
    harness.send("a", params={})
    (state,) = harness.post._states.values()
    monkeypatch.setattr(type(state.decoder), "append", lambda *a, **k: 1 / 0)
    assert harness.send("b") is None
    assert harness.stops == [("k", -1)]
    assert harness.send("c") is None
    monkeypatch.undo()
    assert harness.send("", "abort").error == "the text of the answer could not be made"


@pytest.mark.parametrize("text_params", ["{", "[]", "{}", '{"prompt_tail": 3}'])
def test_unusable_text_params_stop_the_request_and_answer_at_the_end(harness, text_params):
    assert harness.send("a", text_params=text_params) is None
    assert harness.stops == [("k", 0)]
    assert "text_params" in harness.send("", "abort").error


def test_an_error_from_the_engine_is_passed_on(harness):
    harness.send("a", params={})
    assert harness.send("", "error", error="the queue is full").error == "the queue is full"


def test_a_chunk_without_state_is_an_error_never_a_fresh_decoder(harness):
    assert harness.send("a") is None
    assert "unknown" in harness.send("", "length").error


def test_state_ends_with_the_request(harness):
    harness.send("a", "length", params={})
    assert harness.post._states == {}


def test_silent_requests_are_forgotten(harness, monkeypatch):
    harness.send("a", params={})
    harness.post._silence_limit_s = -1.0
    monkeypatch.setattr("pagestream.serving.postprocessing._SWEEP_INTERVAL_S", 0.0)
    harness.send("a", params={}, key="other")
    assert [key for key, _ in harness.post._states] == ["other"]


def test_requests_do_not_mix(harness):
    harness.send("\xc3", params={}, key="a")
    harness.send("x", params={}, key="b")
    assert harness.send("\xa9", "length", key="a").outputs["text_output"][0] == "é"
    assert harness.send("y", "length", key="b").outputs["text_output"][0] == "y"


def test_unstreamed_answers_of_one_request_come_together_in_order(harness):
    params = {"n": 3, "stream": False}
    for index, text in enumerate("abc"):
        assert harness.send(text, params=params, index=index) is None
    assert harness.send("z", "length", index=2) is None
    assert harness.send("", "abort", index=0) is None
    outputs = harness.send("yy", "stop", index=1).outputs
    assert outputs["text_output"] == ["a", "by", "cz"]
    assert outputs["finish_reason"] == ["abort", "stop", "length"]
    assert outputs["index"] == [0, 1, 2]
    assert outputs["num_output_tokens"] == [1, 3, 2]
    assert outputs["num_input_tokens"] == 3
    assert bytes(outputs["output_token_ids"]) == b"abyycz"
    assert harness.post._requests == {}


def test_streamed_answers_of_one_request_carry_their_index(harness):
    params = {"n": 2}
    assert harness.send("a", params=params, index=1).outputs["index"] == [1]
    assert harness.send("b", "length", params=params, index=0).outputs["index"] == [0]
    assert harness.send("c", "length", index=1).outputs["text_output"] == ["c"]


def test_an_error_of_one_answer_waits_for_the_last(harness):
    params = {"n": 2}
    assert harness.send("", "error", error="boom", params=params, index=0) is None
    assert harness.send("b", "length", params=params, index=1).error == "boom"


def test_logprobs_are_cut_with_the_text_and_named(harness):
    rows = [[ord(c), -0.5, 2, [ord("x")], [-0.25]] for c in "abcd"]
    last = harness.send(
        "abcd", "length", params={"stop": ["bc"]}, logprobs=json.dumps(rows)
    ).outputs
    named = json.loads(last["output_logprobs"][0])
    assert len(named) == last["num_output_tokens"][0] == 3
    assert named[0] == {
        "97": {"logprob": -0.5, "rank": 2, "decoded_token": "a"},
        "120": {"logprob": -0.25, "rank": 1, "decoded_token": "x"},
    }


def test_prompt_logprobs_and_stop_reason_reach_the_client(harness):
    first = harness.send(
        "a",
        params={},
        prompt_logprobs=json.dumps([None, [98, -1.0, 1, [98], [-1.0]]]),
        num_cached_tokens=7,
    ).outputs
    assert json.loads(first["prompt_token_logprobs"]) == [
        None,
        {"98": {"logprob": -1.0, "rank": 1, "decoded_token": "b"}},
    ]
    assert "num_cached_tokens" not in first
    last = harness.send("z", "stop", stop_reason="122").outputs
    assert (last["stop_reason"], last["num_cached_tokens"]) == (["122"], [7])
    assert "prompt_token_logprobs" not in last
