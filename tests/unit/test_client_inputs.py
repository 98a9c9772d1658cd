"""Requests on the wire: names, dtypes, shapes, and the values that are refused before sending."""

import json

import numpy as np
import pytest
from tritonclient.utils import deserialize_bytes_tensor

from pagestream_client.inputs import build_request


def test_ensemble_tensors_carry_a_batch_dimension_and_the_others_do_not():
    inputs = {"text_input": "hi", "prompt_token_ids": [1, 2, 3]}
    batched = build_request("ensemble", "", inputs)
    plain = build_request("chat", "", inputs)
    assert [list(tensor.shape) for tensor in batched.inputs] == [[1, 1], [1, 3]]
    assert [list(tensor.shape) for tensor in plain.inputs] == [[1], [3]]


@pytest.mark.parametrize(
    ("name", "value", "datatype", "expected"),
    [
        ("max_tokens", 7, "INT32", np.array([7], np.int32)),
        ("seed", 2**64 - 1, "UINT64", np.array([2**64 - 1], np.uint64)),
        ("temperature", 1, "FP32", np.array([1.0], np.float32)),
        ("stream", False, "BOOL", np.array([False])),
        ("prompt_token_ids", (5, -1), "INT32", np.array([5, -1], np.int32)),
        ("prompt_token_ids", [], "INT32", np.array([], np.int32)),
    ],
)
def test_number_inputs(name, value, datatype, expected):
    request = build_request("chat", "", {name: value})
    (tensor,) = request.inputs
    assert (tensor.name, tensor.datatype) == (name, datatype)
    assert request.raw_input_contents[0] == expected.tobytes()


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("text_input", "grüße ", ["grüße "]),
        ("text_input", "", [""]),
        ("stop_words", ["a", "bé"], ["a", "bé"]),
        ("messages", "not json", ["not json"]),
    ],
)
def test_text_inputs_arrive_as_they_are(name, value, expected):
    request = build_request("chat", "", {name: value})
    decoded = [item.decode() for item in deserialize_bytes_tensor(request.raw_input_contents[0])]
    assert decoded == expected
    assert list(request.inputs[0].shape) == [len(expected)]


def test_no_stop_words_is_an_empty_tensor():
    request = build_request("chat", "", {"stop_words": []})
    assert list(request.inputs[0].shape) == [0]
    assert request.raw_input_contents[0] == b""


def test_messages_and_sampling_parameters_are_sent_as_json():
    messages = [{"role": "user", "content": "é"}]
    request = build_request("chat", "", {"messages": messages})
    (text,) = deserialize_bytes_tensor(request.raw_input_contents[0])
    assert json.loads(text) == messages
    request = build_request("vllm", "", {"sampling_parameters": {"max_tokens": 3}})
    (text,) = deserialize_bytes_tensor(request.raw_input_contents[0])
    assert json.loads(text) == {"max_tokens": 3}


def test_none_is_left_out_and_tensors_stay_aligned():
    request = build_request("chat", "id-1", {"temperature": None, "seed": 3})
    assert request.id == "id-1"
    assert [tensor.name for tensor in request.inputs] == ["seed"]
    assert len(request.raw_input_contents) == 1


@pytest.mark.parametrize(
    ("name", "value", "error", "part"),
    [
        ("max_token", 5, TypeError, "unknown input 'max_token'"),
        ("max_tokens", "5", TypeError, "max_tokens must hold INT32"),
        ("max_tokens", True, TypeError, "got True"),
        ("stream", 1, TypeError, "stream must hold BOOL"),
        ("stop_words", "ab", TypeError, "stop_words must be a list"),
        ("max_tokens", 2**31, ValueError, "max_tokens does not fit INT32"),
        ("seed", -1, ValueError, "seed does not fit UINT64"),
    ],
)
def test_what_the_wire_cannot_carry_is_refused_by_name(name, value, error, part):
    with pytest.raises(error, match=part):
        build_request("chat", "", {name: value})
