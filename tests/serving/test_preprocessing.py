"""Preprocessor: conventions, defaults and refusals, on the real tokenizer."""

import json

import pytest

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
    assert text["return_token_ids"] is True


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
        ({"text_input": "a", "stop_words": ["b"]}, {"stop": "c"}, "stop is given twice"),
        ({"messages": "{"}, {}, "messages is not valid JSON"),
        ({"messages": "[" * 40_000}, {}, "messages is not valid JSON"),
        ({"messages": "3"}, {}, "messages must be a JSON list"),
        ({"messages": "[]"}, {}, "messages is empty"),
        ({"messages": "[3]"}, {}, r"messages\[0\] must be an object"),
        ({"messages": '[{"role": "user"}]'}, {}, r"messages\[0\].content must be a string"),
        ({"messages": '[{"content": "x"}]'}, {}, r"messages\[0\].role must be a string"),
        ({"vllm_text_input": "a", "sampling_parameters": "{"}, {}, "sampling_parameters is not"),
        ({"vllm_text_input": "a", "sampling_parameters": "[]"}, {}, "must be a JSON object"),
        (
            {"vllm_text_input": "a", "sampling_parameters": '{"beam": 2}'},
            {},
            "unknown field 'beam' in sampling_parameters",
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
