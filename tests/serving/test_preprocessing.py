"""Preprocessor: conventions, defaults and refusals, on the real tokenizer."""

import json

import pytest

from pagestream.serving.conventions import JSON_OPTIONS, KNOWN
from pagestream.serving.preprocessing import Preprocessor

pytestmark = pytest.mark.smollm2
CHAT = json.dumps([{"role": "user", "content": "Hi"}])


@pytest.fixture(scope="module")
def preprocessor(smollm2):
    return Preprocessor(smollm2, max_model_len=512)


def prepare(preprocessor, parameters=None, **inputs):
    prepared = preprocessor.prepare(inputs, parameters or {})
    return (
        prepared.prompt_token_ids,
        json.loads(prepared.sampling_params),
        json.loads(prepared.text_params),
    )


def test_keys_cannot_be_guessed_or_collide(preprocessor):
    keys = {preprocessor.prepare({"text_input": "Hi"}, {}).request_key for _ in range(100)}
    assert len(keys) == 100
    assert all(len(key) == 32 for key in keys)


@pytest.mark.parametrize(
    ("inputs", "convention"),
    [
        ({"text_input": "Hi"}, "ensemble"),
        ({"prompt_token_ids": [1, 2]}, "ensemble"),
        ({"vllm_text_input": "Hi"}, "vllm"),
        ({"messages": CHAT}, "chat"),
        ({"chat_prompt_token_ids": [1, 2]}, "chat"),
    ],
)
def test_the_prompt_tells_the_convention(preprocessor, inputs, convention):
    ids, sampling, text = prepare(preprocessor, **inputs)
    assert text["convention"] == convention
    assert text["num_input_tokens"] == len(ids)
    assert sampling.pop("arrival_time_ns") > 0
    assert sampling == {"stream": False}


def test_chat_renders_the_template_with_its_special_tokens_once(preprocessor, smollm2):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(smollm2)
    ids, _, _ = prepare(preprocessor, messages=CHAT)
    expected = tokenizer.apply_chat_template(json.loads(CHAT), add_generation_prompt=True)
    assert ids == expected["input_ids"]


def test_options_reach_those_they_concern(preprocessor):
    _, sampling, text = prepare(
        preprocessor,
        text_input="Hi",
        max_tokens=5,
        temperature=0.5,
        min_tokens=2,
        stop_words=["a", ""],
        skip_special_tokens=False,
        stream=True,
        return_token_ids=True,
    )
    del sampling["arrival_time_ns"]
    assert sampling == {"max_tokens": 5, "temperature": 0.5, "min_tokens": 2, "stream": True}
    assert (text["stop"], text["min_tokens"]) == (["a"], 2)
    assert (text["skip_special_tokens"], text["stream"]) == (False, True)
    assert "output_token_ids" in text["outputs"]


def test_a_stop_string_that_is_a_special_token_also_stops_by_id(preprocessor):
    _, sampling, text = prepare(preprocessor, text_input="Hi", stop_words=["<|im_end|>", "the"])
    assert sampling["stop_token_ids"] == [2]
    assert text["stop"] == ["<|im_end|>", "the"]


def test_vllm_json_with_numbers_as_strings(preprocessor):
    options = {"max_tokens": "7", "temperature": "0.1", "ignore_eos": "true", "stop": "x"}
    _, sampling, text = prepare(
        preprocessor, vllm_text_input="Hi", sampling_parameters=json.dumps(options)
    )
    del sampling["arrival_time_ns"]
    expected = {"max_tokens": 7, "temperature": 0.1, "ignore_eos": True, "stream": False}
    assert sampling == expected
    assert text["stop"] == ["x"]


def test_request_parameters_are_options_too(preprocessor):
    parameters = {"temperature": 0.3, "id": "7", "triton_enable_empty_final_response": True}
    _, sampling, _ = prepare(preprocessor, parameters, text_input="Hi")
    assert sampling["temperature"] == 0.3


@pytest.mark.parametrize(
    ("foreign", "ours"),
    [
        ({"random_seed": 5}, {"seed": 5}),
        ({"min_length": 3}, {"min_tokens": 3}),
        ({"num_return_sequences": 2}, {"n": 2}),
        ({"end_id": 7, "pad_id": 2}, {"stop_token_ids": [7]}),
        ({"end_id": -1, "stop_token_ids": [3]}, {"stop_token_ids": [3]}),
        ({"end_id": 7, "stop_token_ids": [3]}, {"stop_token_ids": [3, 7]}),
        ({"beam_width": 1, "length_penalty": 1.0, "decoder_text_input": ""}, {}),
        ({"bad_words": [""], "stop_words": [""]}, {}),
        ({"return_log_probs": True}, {"logprobs": 0}),
        ({"return_log_probs": True, "logprobs": 3}, {"logprobs": 3}),
        ({"guided_decoding_guide_type": "regex", "guided_decoding_guide": "a+"}, "a+"),
        ({"structured_outputs": {"regex": "a+", "json": None}}, "a+"),
        ({"guided_decoding": {"regex": "a+"}}, "a+"),
        ({"best_of": 2, "n": 2}, {"n": 2}),
        ({"seed": None, "structured_output": "", "tools": ""}, {}),
    ],
)
@pytest.mark.parametrize("convention", ["ensemble", "vllm"])
def test_foreign_names_mean_ours(preprocessor, foreign, ours, convention):
    if isinstance(ours, str):
        ours = {"structured_output": {"regex": ours}}
    known = {name: value for name, value in foreign.items() if name in KNOWN[convention]}
    if known != foreign:
        return
    name = {"ensemble": "text_input", "vllm": "vllm_text_input"}[convention]
    json_only = {name: value for name, value in foreign.items() if name in JSON_OPTIONS}
    tensors = {name: value for name, value in foreign.items() if name not in json_only}
    if convention == "vllm":
        json_only, tensors = foreign, {}
    inputs = {**tensors, name: "Hi", "sampling_parameters": json.dumps(json_only)}
    _, sampling, _ = prepare(preprocessor, **{k: v for k, v in inputs.items() if v is not None})
    del sampling["arrival_time_ns"], sampling["stream"]
    assert sampling == ours


@pytest.mark.parametrize(
    ("inputs", "echo"),
    [
        ({"text_input": "Hi"}, ""),
        ({"text_input": "Hi", "exclude_input_in_output": False}, "Hi"),
        ({"text_input": "Hi", "exclude_input_in_output": False, "stream": True}, ""),
        ({"vllm_text_input": "Hi"}, "Hi"),
        ({"vllm_text_input": "Hi", "exclude_input_in_output": True}, ""),
        ({"vllm_text_input": "Hi", "stream": True}, ""),
        ({"messages": CHAT}, ""),
    ],
)
def test_the_prompt_is_repeated_where_the_convention_does(preprocessor, inputs, echo):
    assert prepare(preprocessor, **inputs)[2]["echo"] == echo


def test_an_operator_may_have_ensemble_repeat_the_prompt(smollm2):
    preprocessor = Preprocessor(smollm2, max_model_len=512, exclude_input_in_output=False)
    assert prepare(preprocessor, text_input="Hi")[2]["echo"] == "Hi"
    assert prepare(preprocessor, text_input="Hi", exclude_input_in_output=True)[2]["echo"] == ""
    assert prepare(preprocessor, prompt_token_ids=[1])[2]["echo"] == ""


def test_vllm_returns_only_what_is_asked_for(preprocessor):
    def outputs(**inputs):
        return prepare(preprocessor, vllm_text_input="Hi", **inputs)[2]["outputs"]

    assert outputs() == ["text_output"]
    assert outputs(sampling_parameters='{"n": 2}') == ["text_output", "index"]
    assert outputs(return_finish_reason=True) == ["text_output", "finish_reason", "stop_reason"]
    assert outputs(return_logprobs=True)[1] == "output_logprobs"
    assert outputs(return_cumulative_logprob=True)[1] == "cumulative_logprob"
    assert "num_input_tokens" in outputs(return_num_input_tokens=True)
    assert "num_output_tokens" in outputs(return_num_output_tokens=True)


def test_a_word_biases_its_tokens(preprocessor):
    _, sampling, _ = prepare(
        preprocessor,
        text_input="Hi",
        embedding_bias_words=["Hello", "Hello world"],
        embedding_bias_weights=[2.0, -1.0],
        logit_bias='{"5": 1}',
    )
    hello, world = preprocessor._tokenizer.encode("Hello world", add_special_tokens=False)
    assert sampling["logit_bias"] == {"5": 1.0, str(hello): -1.0, str(world): -1.0}


def test_the_chat_options_reach_the_template(preprocessor):
    plain, _, _ = prepare(preprocessor, messages=CHAT)
    bare, _, _ = prepare(preprocessor, messages=CHAT, add_generation_prompt=False)
    assert plain[: len(bare)] == bare
    assert len(plain) > len(bare)


@pytest.mark.parametrize(
    ("inputs", "parameters", "words"),
    [
        ({}, {}, "exactly one of text_input, messages and prompt_token_ids is required, got none"),
        ({"text_input": "a", "messages": CHAT}, {}, "exactly one of .* got text_input, messages"),
        ({"text_input": ""}, {}, "text_input is empty"),
        ({"vllm_text_input": ""}, {}, "text_input is empty"),
        ({"prompt_token_ids": []}, {}, "prompt_token_ids is empty"),
        ({"prompt_token_ids": [49152]}, {}, "prompt_token_ids contains 49152"),
        ({"text_input": "a " * 600}, {}, r"text_input has \d+ tokens .* max_model_len is 512"),
        ({"text_input": "a" * 10**6}, {}, "text_input has 1000000 bytes, more than"),
        ({"text_input": "a", "max_tokens": 0}, {}, "max_tokens must be at least 1, got 0"),
        ({"text_input": "a", "max_tokens": 4097}, {}, "max_tokens is 4097, above the limit"),
        ({"text_input": "a", "temperature": -1.0}, {}, "temperature must be between 0 and 100"),
        ({"text_input": "a", "temperature": float("nan")}, {}, "temperature .* got nan"),
        ({"text_input": "a"}, {"temprature": 1}, "unknown field 'temprature' in parameters"),
        ({"text_input": "a", "top_k": 1}, {"top_k": 2}, "top_k is given twice"),
        ({"text_input": "a", "stop_words": ["b"]}, {"stop": "c"}, "stop and stop_words are the"),
        (
            {"text_input": "a", "beam_width": 2},
            {},
            "beam_width: beam search is not supported, got 2",
        ),
        ({"text_input": "a", "length_penalty": 2.0}, {}, "length_penalty: beam search"),
        ({"text_input": "a", "prompt_vocab_size": 1}, {}, "prompt_vocab_size: prompt embeddings"),
        ({"text_input": "a", "prompt_embedding_table": []}, {}, "prompt_embedding_table: prompt"),
        ({"text_input": "a", "lora_task_id": 0}, {}, "lora_task_id: no adapter is loaded"),
        ({"text_input": "a", "return_context_logits": True}, {}, "return_context_logits: logits"),
        ({"text_input": "a", "end_id": 49152}, {}, "end_id contains 49152"),
        ({"text_input": "a", "end_id": -2}, {}, "end_id must be at least -1"),
        ({"text_input": "a", "random_seed": 1, "seed": 1}, {}, "seed and random_seed are the same"),
        ({"text_input": "a", "embedding_bias_words": ["x"]}, {}, "has 0 entries for 1"),
        ({"text_input": "a", "guided_decoding_guide_type": "xml"}, {}, "must be one of json, "),
        ({"text_input": "a", "guided_decoding_guide": "x"}, {}, "needs guided_decoding_guide_type"),
        ({"text_input": "a", "guided_decoding_guide_type": "regex"}, {}, "guide is required"),
        ({"text_input": "a"}, {"best_of": 3}, "best_of: every answer is returned"),
        ({"text_input": "a"}, {"lora_name": "x"}, "lora_name: no adapter is loaded, got 'x'"),
        ({"prompt_token_ids": [1], "exclude_input_in_output": False}, {}, "not given as text"),
        (
            {"vllm_text_input": "a", "exclude_input_in_output": False, "stream": True},
            {},
            "a streamed answer does not repeat its prompt",
        ),
        ({"vllm_text_input": "a", "image": ["x"]}, {}, "image: the model reads text only"),
        ({"messages": CHAT, "tools": "3"}, {}, "tools must be a JSON list of objects"),
        ({"messages": CHAT}, {"beam_width": 1}, "unknown field 'beam_width'"),
        ({"text_input": "a"}, {"tools": "[]"}, "unknown field 'tools' in parameters"),
        ({"messages": "{"}, {}, "messages is not valid JSON"),
        ({"messages": "[" * 40_000}, {}, "messages is not valid JSON"),
        ({"messages": "3"}, {}, "messages must be a JSON list"),
        ({"messages": "[]"}, {}, "messages is empty"),
        ({"messages": "[3]"}, {}, r"messages\[0\] must be an object"),
        ({"messages": '[{"role": "user"}]'}, {}, r"messages\[0\].content"),
        ({"messages": '[{"content": "x"}]'}, {}, r"messages\[0\].role"),
        ({"vllm_text_input": "a", "sampling_parameters": "{"}, {}, "sampling_parameters is not"),
        ({"vllm_text_input": "a", "sampling_parameters": "[]"}, {}, "must be a JSON object"),
        (
            {"vllm_text_input": "a", "sampling_parameters": '{"beam": 2}'},
            {},
            "unknown field 'beam' in sampling_parameters; did you mean",
        ),
        (
            {"vllm_text_input": "a", "sampling_parameters": '{"max_tokens": "many"}'},
            {},
            "max_tokens must be a number",
        ),
    ],
)
def test_refusals_name_the_field(preprocessor, inputs, parameters, words):
    with pytest.raises(ValueError, match=words):
        preprocessor.prepare(inputs, parameters)
