"""The table of names, and its agreement with every config.pbtxt."""

import importlib.util
from pathlib import Path

import numpy as np
import pytest

from pagestream.sampling_params import SamplingParams
from pagestream.serving import tensor_specs as specs
from pagestream.serving import tensors
from pagestream.text.chat import ChatOptions
from pagestream_client.inputs import RequestInputs

ROOT = Path(__file__).parents[2]
REPOSITORY = ROOT / "model_repository"


def written():
    spec = importlib.util.spec_from_file_location("configs", ROOT / "scripts/write_configs.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.configs()


def test_config_files_are_what_the_table_says():
    for model, text in written().items():
        assert (REPOSITORY / model / "config.pbtxt").read_text() == text, "run write_configs.py"
    assert set(written()) == {path.parent.name for path in REPOSITORY.glob("*/config.pbtxt")}


def test_every_input_is_optional_and_nothing_is_batched_or_runs_twice():
    for text in written().values():
        inputs = text[text.index("input [") : text.index("output [")]
        assert inputs.count("name:") == inputs.count("optional: true")
        assert "dynamic_batching {" not in text
        if "backend:" in text:
            assert "instance_group [ { kind: KIND_MODEL count: 1 } ]" in text


def test_every_option_of_a_request_has_a_tensor():
    fields = set(SamplingParams().__dataclass_fields__) - {"stop", "bad_words_token_ids"}
    assert set(specs.SAMPLING) - {"stop_words", "sampling_parameters"} == fields
    assert set(specs.CHAT) == set(ChatOptions.__dataclass_fields__)


def test_every_output_of_an_ensemble_has_a_name_of_its_own():
    """An ensemble's inputs and outputs share one name space."""
    for ensemble, inputs in specs.ENSEMBLES.items():
        post = "postprocessing_batched" if ensemble == "ensemble" else "postprocessing"
        outputs = specs.RENAMED_OUTPUTS.get(ensemble, {})
        assert not inputs.keys() & {outputs.get(name, name) for name in specs.ANSWERS[post]}


def test_our_client_knows_all_but_the_foreign_names():
    known = {*specs.PROMPTS, *specs.SAMPLING, *specs.RETURNS, *specs.CHAT, "stream"}
    own = known - {"vllm_text_input", "chat_prompt_token_ids"} | {"exclude_input_in_output"}
    assert set(RequestInputs.__annotations__) | {"stream"} == own


def test_reading(make_request, strings):
    request = make_request(
        {
            "text_input": strings("héllo"),
            "max_tokens": np.array([[5]], np.int32),
            "stop_words": strings("a", "b"),
            "unknown": strings("x"),
        }
    )
    values = tensors.read_inputs(request, specs.PREPROCESSING_INPUTS)
    assert values == {"text_input": "héllo", "max_tokens": 5, "stop_words": ["a", "b"]}


@pytest.mark.parametrize(
    ("name", "array", "words"),
    [
        ("max_tokens", np.array([1, 2], np.int32), "max_tokens must hold one value, got 2"),
        ("beam_width", np.array([[1, 2]], np.int32), "beam_width must hold one value, got 2"),
        ("text_input", np.array([], dtype=object), "text_input must hold one value, got 0"),
        ("text_input", np.array([b"ok\xff"], dtype=object), "text_input is not valid UTF-8"),
    ],
)
def test_reading_names_the_field(make_request, name, array, words):
    with pytest.raises(ValueError, match=words):
        tensors.read_inputs(make_request({name: array}), specs.PREPROCESSING_INPUTS)


def test_writing_is_always_valid_utf8_and_leaves_out_what_is_not_there():
    response = tensors.write_outputs(
        {"token_ids": [1, 2], "finish_reason": None, "error": "a\ud800b"}, specs.ENGINE_OUTPUTS
    )
    assert set(response.tensors) == {"token_ids", "error"}
    assert response.tensors["token_ids"].dtype == np.int32
    assert response.tensors["error"].tolist() == [b"a?b"]
