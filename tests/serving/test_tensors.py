"""The table of names, and its agreement with every config.pbtxt."""

import re
from pathlib import Path

import numpy as np
import pytest

from pagestream.serving import tensors
from pagestream.serving.tensors import Spec

REPOSITORY = Path(__file__).parents[2] / "model_repository"
FIELD = re.compile(r'\{ name: "(\w+)" data_type: TYPE_(\w+) dims: \[ (-?1) \]( optional: true)? \}')


def declared(model):
    """({input: Spec}, {output: Spec}, {optional inputs}) of a config.pbtxt."""
    text = (REPOSITORY / model / "config.pbtxt").read_text()
    sections = {}
    for kind in ("input", "output"):
        body = re.search(rf"^{kind} \[\n(.*?)^\]", text, re.M | re.S)[1]
        sections[kind] = FIELD.findall(body)
        assert len(sections[kind]) == body.count("name:")
    specs = [
        {name: Spec(kind, dims == "-1") for name, kind, dims, _ in sections[section]}
        for section in ("input", "output")
    ]
    return *specs, {name for name, *_, optional in sections["input"] if optional}


@pytest.mark.parametrize(
    ("model", "inputs", "outputs"),
    [
        ("preprocessing", tensors.PREPROCESSING_INPUTS, tensors.PREPROCESSING_OUTPUTS),
        ("engine", tensors.ENGINE_INPUTS, tensors.ENGINE_OUTPUTS),
        ("postprocessing", tensors.CHUNK, tensors.ANSWERS["postprocessing"]),
        ("postprocessing_batched", tensors.CHUNK, tensors.ANSWERS["postprocessing_batched"]),
    ],
)
def test_steps_declare_the_table_and_every_input_is_optional(model, inputs, outputs):
    declared_inputs, declared_outputs, optional = declared(model)
    assert declared_inputs == inputs
    assert declared_outputs == outputs
    assert optional == set(inputs)


@pytest.mark.parametrize(
    ("ensemble", "prompts", "post"),
    [
        ("ensemble", {"text_input", "prompt_token_ids"}, "postprocessing_batched"),
        ("chat", {"messages", "prompt_token_ids"}, "postprocessing"),
        ("vllm", {"text_input"}, "postprocessing"),
    ],
)
def test_ensembles_chain_the_steps(ensemble, prompts, post):
    inputs, outputs, optional = declared(ensemble)
    assert optional == set(inputs)
    options = {"stream", "sampling_parameters"} if ensemble == "vllm" else set(tensors.OPTIONS)
    assert set(inputs) == prompts | options
    assert outputs == tensors.ANSWERS[post]
    text = (REPOSITORY / ensemble / "config.pbtxt").read_text()
    assert re.findall(r'model_name: "(\w+)"', text) == ["preprocessing", "engine", post]
    assert "dynamic_batching" not in text
    mapped = set(re.findall(r'input_map \{ key: "\w+" value: "([a-z]\w+)" \}', text))
    assert mapped == set(inputs)
    for name in tensors.CHUNK:
        assert f'output_map {{ key: "{name}" value: "_chunk_{name}" }}' in text
        assert f'input_map {{ key: "{name}" value: "_chunk_{name}" }}' in text


def test_no_step_is_batched_by_tritonserver_or_runs_twice():
    for config in REPOSITORY.glob("*/config.pbtxt"):
        text = config.read_text()
        assert "dynamic_batching" not in text.replace("no dynamic_batching", "").replace(
            "no\n# dynamic_batching", ""
        )
        if "backend:" in text:
            assert "instance_group [ { kind: KIND_MODEL count: 1 } ]" in text


def test_reading(make_request, strings):
    request = make_request(
        {
            "text_input": strings("héllo"),
            "max_tokens": np.array([[5]], np.int32),
            "stop_words": strings("a", "b"),
            "unknown": strings("x"),
        }
    )
    values = tensors.read_inputs(request, tensors.PREPROCESSING_INPUTS)
    assert values == {"text_input": "héllo", "max_tokens": 5, "stop_words": ["a", "b"]}


@pytest.mark.parametrize(
    ("name", "array", "words"),
    [
        ("max_tokens", np.array([1, 2], np.int32), "max_tokens must hold one value, got 2"),
        ("text_input", np.array([], dtype=object), "text_input must hold one value, got 0"),
        ("text_input", np.array([b"ok\xff"], dtype=object), "text_input is not valid UTF-8"),
    ],
)
def test_reading_names_the_field(make_request, name, array, words):
    with pytest.raises(ValueError, match=words):
        tensors.read_inputs(make_request({name: array}), tensors.PREPROCESSING_INPUTS)


def test_writing_is_always_valid_utf8_and_leaves_out_what_is_not_there():
    response = tensors.write_outputs(
        {"token_ids": [1, 2], "finish_reason": None, "error": "a\ud800b"}, tensors.ENGINE_OUTPUTS
    )
    assert set(response.tensors) == {"token_ids", "error"}
    assert response.tensors["token_ids"].dtype == np.int32
    assert response.tensors["error"].tolist() == [b"a?b"]
