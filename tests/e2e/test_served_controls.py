"""Every control and result of the engine, through the real server."""

import json
import time
from pathlib import Path

import pytest
from e2e_support import Service

pytestmark = [pytest.mark.server, pytest.mark.smollm2]
PROMPT = "The capital of France is the city of"
GREEDY = {"text_input": PROMPT, "temperature": 0.0, "max_tokens": 12, "ignore_eos": True}


def generate(service: Service, **params):
    return service.client.generate(**{**GREEDY, **params})


@pytest.mark.parametrize("stream", [True, False])
def test_n_answers(service, stream):
    params = {**GREEDY, "n": 4, "temperature": 2.0, "seed": 5, "return_token_ids": True}
    answers = service.client.generate_all(stream=stream, **params)
    assert [answer.index for answer in answers] == [0, 1, 2, 3]
    assert len({answer.output_token_ids for answer in answers}) == 4
    for answer in answers:
        assert answer.finish_reason == "length"
        assert answer.num_output_tokens == len(answer.output_token_ids) == 12
    first = service.client.generate(**{**params, "n": 1})
    assert first.output_token_ids == answers[0].output_token_ids


def test_n_answers_over_http_are_one_response(service):
    body = {**GREEDY, "n": 2, "temperature": 1.5, "seed": 1}
    answer = service.generate("ensemble", body)
    assert answer.status == 200
    assert len(answer.body["text_output"]) == len(answer.body["finish_reason"]) == 2


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("ensemble", ["ensemble", "chat"])
def test_logprobs(service, ensemble, stream):
    messages = [{"role": "user", "content": "Hi"}]
    prompt = {"messages": messages, "text_input": None} if ensemble == "chat" else {}
    answer = service.client.generate(
        ensemble,
        stream=stream,
        **{**GREEDY, **prompt, "logprobs": 3, "prompt_logprobs": 0, "return_token_ids": True},
    )
    assert len(answer.output_logprobs) == 12
    for token_id, row in zip(answer.output_token_ids, answer.output_logprobs, strict=True):
        best = max(row, key=lambda key: row[key]["logprob"])
        assert int(best) == token_id
        assert row[best]["rank"] == 1
        assert len(row) == 3
        assert row[best]["logprob"] <= 0
    assert "".join(
        row[str(token)]["decoded_token"]
        for token, row in zip(answer.output_token_ids, answer.output_logprobs, strict=True)
    )
    assert len(answer.prompt_token_logprobs) == answer.num_input_tokens
    assert answer.prompt_token_logprobs[0] is None


def test_timing_is_told_at_the_end(service):
    timing = generate(service).timing
    assert 0 <= timing["queued_ms"] <= timing["ttft_ms"] <= timing["e2e_ms"]


def test_prefix_hits_salts_and_off(service):
    prompt = "Once upon a time, " * 20
    salted = {"text_input": prompt, "cache_salt": "a salt of this test"}
    assert generate(service, **salted).num_cached_tokens == 0
    hit = generate(service, **salted)
    assert hit.num_cached_tokens >= 64
    assert generate(service, **salted, prefix_cache=False).num_cached_tokens == 0
    assert generate(service, text_input=prompt, cache_salt="another").num_cached_tokens == 0


def test_bad_words_bias_and_allowed_ids(service):
    assert " Paris" in generate(service).text_output
    assert "Paris" not in generate(service, bad_words=["Paris"]).text_output
    assert "Paris" not in generate(service, logit_bias={7042: -100.0}).text_output
    allowed = generate(service, allowed_token_ids=[28, 30], return_token_ids=True)
    assert set(allowed.output_token_ids) <= {28, 30}


def test_penalties_end_a_loop(service):
    golden = json.loads((Path(__file__).parents[1] / "data/smollm2_greedy.json").read_text())
    (prompt,) = [p["prompt_ids"] for p in golden["prompts"] if p["name"] == "chat_unicode"]
    loop = {"text_input": None, "prompt_token_ids": prompt, "max_tokens": 40}
    repeats = [
        40 - len(set(generate(service, **loop, **penalty, return_token_ids=True).output_token_ids))
        for penalty in ({}, {"frequency_penalty": 2.0}, {"repetition_penalty": 3.0})
    ]
    assert repeats[0] > 10
    assert max(repeats[1:]) < repeats[0] / 2


def test_seed_and_filters(service):
    drawn = {"temperature": 1.5, "min_p": 0.02, "top_k": 50, "top_p": 0.95, "seed": 9}
    assert generate(service, **drawn).text_output == generate(service, **drawn).text_output
    assert (
        generate(service, temperature=3.0, min_p=1.0).text_output == generate(service).text_output
    )


def test_deadline_ends_with_what_there_is(service):
    answer = generate(service, deadline_ms=300, max_tokens=900)
    assert (answer.finish_reason, answer.stop_reason) == ("abort", "deadline")
    assert 0 < answer.num_output_tokens < 900


def test_stop_reason_is_the_string_or_the_id(service):
    assert generate(service, stop_words=["Paris"]).stop_reason == "Paris"
    answer = generate(service, stop_token_ids=[7042])
    assert (answer.finish_reason, answer.stop_reason) == ("stop", "7042")
    included = generate(service, stop_words=["Paris"], include_stop_str_in_output=True)
    assert included.text_output.endswith("Paris")


def test_vllm_takes_the_same_in_json(service):
    params = {"max_tokens": 4, "temperature": 0, "logit_bias": {"7042": -100}, "logprobs": 1}
    body = {"text_input": PROMPT, "sampling_parameters": json.dumps(params)}
    answer = service.generate("vllm", {**body, "return_logprobs": True})
    assert answer.status == 200
    text = answer.body["text_output"]
    assert text.startswith(PROMPT)  # as that backend does, unless told not to or streaming
    assert "Paris" not in text
    assert len(json.loads(answer.body["logprobs"])) == 4


SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 20}, "big": {"type": "boolean"}},
    "required": ["city", "big"],
}


@pytest.mark.parametrize("stream", [True, False])
def test_structured_output(service, stream):
    messages = [{"role": "user", "content": "Name a city."}]
    answer = service.client.generate(
        "chat",
        messages=messages,
        structured_output={"json_schema": SCHEMA},
        max_tokens=200,
        seed=2,
        stream=stream,
    )
    assert answer.finish_reason == "stop"
    assert set(json.loads(answer.text_output)) == {"city", "big"}
    chosen = generate(service, structured_output={"choice": ["left", "right"]}, max_tokens=20)
    assert chosen.text_output in ("left", "right")


@pytest.mark.parametrize(
    "wanted",
    [{"regex": "foo**"}, {"json_schema": "{"}, {"json_schema": "x" * 10**6}, {"grammar": "x"}],
    ids=lambda wanted: next(iter(wanted)),
)
def test_bad_grammars_are_refused_at_once_and_the_next_works(service, wanted):
    started = time.monotonic()
    answer = service.generate("ensemble", {**GREEDY, "structured_output": json.dumps(wanted)})
    assert time.monotonic() - started < 1
    assert answer.status == 400
    assert f"structured_output.{next(iter(wanted))}" in answer.body["error"]
    assert generate(service, max_tokens=1).num_output_tokens == 1


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("n", 0),
        ("n", 10**9),
        ("min_p", -0.5),
        ("min_p", 2.0),
        ("repetition_penalty", 0.0),
        ("presence_penalty", 5.0),
        ("frequency_penalty", -5.0),
        ("logprobs", 21),
        ("logprobs", -1),
        ("prompt_logprobs", 1000),
        ("priority", 10**6),
        ("deadline_ms", 0),
        ("cache_salt", "s" * 300),
        ("stop_token_ids", [49152]),
        ("allowed_token_ids", [-1]),
        ("allowed_token_ids", []),
        ("logit_bias", '{"49152": 1}'),
        ("logit_bias", '{"1": 1e39}'),
        ("logit_bias", "{"),
        ("bad_words", ["x" * 300]),
        ("structured_output", "{}"),
        ("structured_output", "["),
    ],
)
def test_out_of_range_is_refused_by_name_and_the_next_works(service, field, value):
    answer = service.generate("ensemble", {**GREEDY, field: value})
    assert answer.status == 400
    assert field in answer.body["error"]
    assert generate(service, max_tokens=1).num_output_tokens == 1
