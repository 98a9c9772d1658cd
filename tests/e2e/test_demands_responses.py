"""Demands 30-34, 38, 39, 65: how many responses an answer has, and what they say beside text."""

import itertools
import json

import pytest
from e2e_support import ENSEMBLES, MODES, RawRequest, is_final, text_of
from tritonclient.grpc import InferenceServerClient
from tritonclient.utils import InferenceServerException

pytestmark = pytest.mark.server

# (chain, options in each ensemble's words, finish reason, text, tokens)
ENDS = [
    ("goodbye", {}, "stop", "Bye!", 3),
    ("numbers", {"max_tokens": 7}, "length", " 0 1 2 3 4 5 6", 7),
    ("numbers", {"max_tokens": 1}, "length", " 0", 1),
    ("alphabet", {"stop": ["HIJ"]}, "stop", " ABCDEFG", 5),
    ("cut", {}, "stop", "end\N{REPLACEMENT CHARACTER}", 5),
]
ALL_ENDS = pytest.mark.parametrize(("name", "options", "reason", "text", "num_tokens"), ENDS)


def in_words_of(ensemble, options):
    if ensemble == "vllm" or "stop" not in options:
        return options
    return {"stop_words": options["stop"]}


@pytest.mark.parametrize("ensemble", ENSEMBLES)
@pytest.mark.parametrize("asked", [{}, {"stream": False}], ids=["by default", "whole"])
def test_row_30_generate_gives_one_answer(script, ensemble, asked):
    inputs = http_inputs(script, "words", ensemble) | asked
    answer = script.generate(ensemble, inputs)
    assert answer.status == 200
    assert answer.body["text_output"] == script.script.text("words")
    (event,) = script.generate_stream(ensemble, inputs).body
    assert event["text_output"] == answer.body["text_output"]


@pytest.mark.parametrize("ensemble", ENSEMBLES)
def test_row_30_generate_stream_gives_one_in_parts(script, ensemble):
    inputs = http_inputs(script, "words", ensemble) | {"stream": True}
    events = script.generate_stream(ensemble, inputs).body
    assert len(events) > 3
    assert all(event["text_output"] for event in events[:-1])
    assert "".join(event["text_output"] for event in events) == script.script.text("words")
    # Of the wrong endpoint tritonserver itself complains, with a status that cannot be changed.
    assert "use generate stream" in script.generate(ensemble, inputs).body["error"]


def http_inputs(script, name, ensemble):
    inputs = script.inputs(name, ensemble, {})
    if ensemble == "vllm":
        inputs["sampling_parameters"] = json.dumps(inputs["sampling_parameters"])
        inputs["exclude_input_in_output"] = True
    return inputs


@MODES
@pytest.mark.parametrize("ensemble", ENSEMBLES)
def test_row_31_plain_infer_is_refused_in_words_that_help(script, ensemble, stream):
    """It is tritonserver's to refuse; a stream is what works."""
    request = script.raw("words", ensemble, stream=stream)
    with InferenceServerClient(script.grpc_url) as client:
        with pytest.raises(InferenceServerException, match="decoupled") as caught:
            client.infer(ensemble, request.inputs())
        assert caught.value.status() == "StatusCode.UNIMPLEMENTED"
    tensors = [{"name": "stream", "shape": [1], "datatype": "BOOL", "data": [stream]}]
    answer = script.post(f"/v2/models/{ensemble}/infer", {"inputs": tensors})
    assert answer.status == 501
    assert "decoupled" in answer.body["error"]
    assert "".join(map(text_of, script.exchange(request))).endswith(script.script.text("words"))


@MODES
@ALL_ENDS
@pytest.mark.parametrize("ensemble", ENSEMBLES)
def test_row_32_the_last_response_says_why_and_that_it_is_the_last(
    each_script, ensemble, name, options, reason, text, num_tokens, stream
):
    request = each_script.raw(name, ensemble, stream=stream, **in_words_of(ensemble, options))
    if ensemble == "vllm":
        request.values["return_finish_reason"] = True
    results = each_script.exchange(request)
    assert [is_final(result) for result in results] == [False] * (len(results) - 1) + [True]
    reasons = [result.as_numpy("finish_reason").item().decode() for result in results]
    assert reasons == ["None" if ensemble == "vllm" else ""] * (len(results) - 1) + [reason]


@MODES
@ALL_ENDS
@pytest.mark.parametrize("ensemble", ENSEMBLES)
def test_row_33_no_response_is_empty_but_one_that_tells_the_end(
    each_script, ensemble, name, options, reason, text, num_tokens, stream
):
    """Without text there may be only a last one, of a token that ends the answer and has none."""
    request = each_script.raw(name, ensemble, stream=stream, **in_words_of(ensemble, options))
    if ensemble != "chat":
        request.values["exclude_input_in_output"] = True
    results = each_script.exchange(request)
    texts = [text_of(result) for result in results]
    assert "".join(texts) == text
    assert all(texts[:-1])
    assert texts[0]
    if not stream:
        assert len(texts) == 1
    if reason == "length":
        assert texts[-1]


PROMPT = "Say  it,\tplease: 你好 #words"
ECHOED = {
    # (ensemble, stream, exclude_input_in_output): whether the answer starts with the prompt
    ("ensemble", False, None): False,
    ("ensemble", False, True): False,
    ("ensemble", False, False): True,
    ("ensemble", True, None): False,
    ("ensemble", True, True): False,
    ("ensemble", True, False): False,
    ("vllm", False, None): True,
    ("vllm", False, True): False,
    ("vllm", False, False): True,
    ("vllm", True, None): False,
    ("vllm", True, True): False,
}


@pytest.mark.parametrize(("ensemble", "stream", "exclude"), ECHOED)
def test_row_34_the_prompt_is_repeated_where_the_convention_says_so(
    each_script, ensemble, stream, exclude
):
    inputs = http_inputs(each_script, "words", ensemble)
    inputs |= {"text_input": PROMPT, "stream": stream, "exclude_input_in_output": exclude}
    if exclude is None:
        del inputs["exclude_input_in_output"]
    events = each_script.generate_stream(ensemble, inputs).body
    before = PROMPT if ECHOED[ensemble, stream, exclude] else ""
    text = "".join(event["text_output"] for event in events)
    assert text == before + each_script.script.text("words")


def test_row_34_a_stream_on_vllm_cannot_repeat_it(script):
    inputs = http_inputs(script, "words", "vllm") | {"exclude_input_in_output": False}
    answer = script.generate_stream("vllm", inputs | {"stream": True})
    assert answer.status == 400
    assert "exclude_input_in_output" in answer.body[0]["error"]


@pytest.fixture(scope="module")
def colour_logprobs(scripts):
    """By family: transformers' log-probabilities of each token of the greedy answer."""
    import torch
    from transformers import LlamaForCausalLM

    rows = {}
    for family, script in scripts.items():
        model = LlamaForCausalLM.from_pretrained(script.script.directory)
        prompt = script.script.prompt_token_ids("colour")
        answer = [*script.script.ids("colour"), model.config.eos_token_id]
        with torch.no_grad():
            logits = model(torch.tensor([prompt + answer])).logits[0].double()
        logprobs = torch.log_softmax(logits[len(prompt) - 1 : -1], dim=-1)
        rows[family] = logprobs[range(len(answer)), answer].tolist()
    return rows


GREEDY = [{"temperature": 0.0}, {"temperature": 0.5, "top_k": 1}]


@MODES
@pytest.mark.parametrize("options", GREEDY, ids=["greedy", "top_k 1"])
def test_row_38_tensorrt_llms_log_probs_are_the_models_own(
    each_script, colour_logprobs, options, stream
):
    request = each_script.raw("colour", "ensemble", stream=stream, **options)
    request.values["return_log_probs"] = True
    results = each_script.exchange(request)
    expected = colour_logprobs[each_script.family]
    logprobs = [row for r in results for row in r.as_numpy("output_log_probs").reshape(-1).tolist()]
    assert logprobs == pytest.approx(expected, abs=1e-3)
    assert max(logprobs[:3]) < -0.1
    assert results[-1].as_numpy("cum_log_probs").item() == pytest.approx(sum(expected), abs=1e-3)


@MODES
@pytest.mark.parametrize("options", GREEDY, ids=["greedy", "top_k 1"])
@pytest.mark.parametrize("ensemble", ["vllm", "chat"])
def test_row_38_logprobs_as_vllm_writes_them(
    each_script, colour_logprobs, ensemble, options, stream
):
    request = each_script.raw("colour", ensemble, stream=stream, logprobs=2, **options)
    output = "output_logprobs"
    if ensemble == "vllm":
        request.values.update(return_logprobs=True, return_cumulative_logprob=True)
        output = "logprobs"
    results = each_script.exchange(request)
    rows = [row for r in results for row in json.loads(r.as_numpy(output).item())]
    expected = colour_logprobs[each_script.family]
    best = [max(row.values(), key=lambda entry: entry["logprob"]) for row in rows]
    assert [entry["logprob"] for entry in best] == pytest.approx(expected, abs=1e-3)
    assert [entry["rank"] for entry in best] == [1] * len(expected)
    assert [entry["decoded_token"] for entry in best[:3]] == [" red", " light", "."]
    if ensemble == "vllm":
        last = results[-1].as_numpy("cumulative_logprob").item()
        assert last == pytest.approx(sum(expected), abs=1e-3)


@MODES
@ALL_ENDS
@pytest.mark.parametrize("ensemble", ENSEMBLES)
def test_row_39_counts_are_of_each_response_and_add_up(
    each_script, ensemble, name, options, reason, text, num_tokens, stream
):
    """Also where a stop string cut the text."""
    options = {**in_words_of(ensemble, options), "return_token_ids": True}
    chunks = each_script.chunks(name, ensemble, stream=stream, **options)
    assert [len(chunk.output_token_ids) for chunk in chunks] == [
        chunk.num_output_tokens for chunk in chunks
    ]
    assert sum(chunk.num_output_tokens for chunk in chunks) == num_tokens
    num_prompt = len(each_script.script.prompt_token_ids(name))
    assert {chunk.num_input_tokens for chunk in chunks} == {num_prompt}


@MODES
@pytest.mark.parametrize("ensemble", ENSEMBLES)
def test_row_65_one_bad_request_of_three_is_told_by_its_id(script, ensemble, stream):
    ids = ("first", "second", "third")
    requests = [script.raw("numbers", ensemble, stream=stream, request_id=name) for name in ids]
    requests[1].values["sampling_parameters"] = "{"
    if ensemble != "vllm":
        requests[1].values["max_tokens"] = 0
    errors, texts = by_id(script.exchange(*requests))
    (error,) = errors
    assert "[request id: second]" in error
    assert texts.keys() == {"first", "third"}
    for text in texts.values():
        assert text.endswith(script.script.text("numbers"))


@MODES
@pytest.mark.parametrize("ensemble", ENSEMBLES)
@pytest.mark.parametrize("request_id", ["same", ""])
def test_row_65_ids_may_be_absent_or_the_same(script, ensemble, request_id, stream):
    names = ("numbers", "alphabet")
    results = script.exchange(
        *(script.raw(name, ensemble, stream=stream, request_id=request_id) for name in names)
    )
    assert {result.get_response().id for result in results} == {request_id}
    assert sum(map(is_final, results)) == 2
    # Which of the two a response belongs to can be told by its characters.
    if stream:
        numbers = "".join(text for text in map(text_of, results) if not text.strip().isalpha())
        letters = "".join(text for text in map(text_of, results) if text.strip().isalpha())
        assert (numbers, letters) == tuple(map(script.script.text, names))
    else:
        endings = itertools.product(map(text_of, results), map(script.script.text, names))
        assert sum(text.endswith(ending) for text, ending in endings) == 2


def by_id(results):
    """Messages of errors, and the joined text of each id's responses."""
    errors, texts = [], {}
    for result in results:
        if isinstance(result, InferenceServerException):
            errors.append(result.message())
            continue
        request_id = result.get_response().id
        texts[request_id] = texts.get(request_id, "") + text_of(result)
    return errors, texts


def test_row_65_a_stop_request_with_a_known_id_stops_nothing_of_others(script):
    """Some clients send one after each answer; ours has no such input and says so."""
    request = script.raw("numbers", "ensemble", stream=True, request_id="7")
    stop = RawRequest("ensemble", {"max_tokens": 5}, id="7")
    results = script.exchange(request, stop)
    errors, texts = by_id(results)
    assert texts == {"7": script.script.text("numbers")}
    assert len(errors) == 1
