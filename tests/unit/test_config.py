"""EngineConfig refuses what cannot work; ModelConfig reads what checkpoints really contain."""

import dataclasses
import json
import re
from pathlib import Path

import pytest

import pagestream
from pagestream.config import EngineConfig, ModelConfig, resolve_max_model_len


def test_unknown_key_names_itself_and_the_known_ones():
    with pytest.raises(ValueError, match=r"unknown config key 'max_model_length'.*max_model_len"):
        EngineConfig.from_dict({"model": "m", "max_model_length": 5})


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("block_size", 48),
        ("block_size", True),
        ("num_blocks", 0),
        ("num_blocks", 2.5),
        ("max_num_seqs", 0),
        ("max_num_batched_tokens", -1),
        ("max_num_waiting", 0),
        ("device", "tpu"),
        ("dtype", "int8"),
        ("load_format", "pickle"),
        ("quantization", "int3"),
        ("model", ""),
        ("model", None),
        ("max_model_len", "8192"),
        ("heartbeat_interval_ms", 1),
    ],
)
def test_impossible_values_name_the_field(field, value):
    with pytest.raises(ValueError, match=field):
        EngineConfig.from_dict({"model": "m", field: value})


def test_json_round_trip(tmp_path):
    config = EngineConfig(model="m", num_blocks=7, control_secret="x")
    path = tmp_path / "engine.json"
    path.write_text(config.to_json())
    assert EngineConfig.from_json(path) == config


@pytest.mark.parametrize("text", ["{", "[]", "3"])
def test_broken_config_file(tmp_path, text):
    path = tmp_path / "engine.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=r"engine\.json"):
        EngineConfig.from_json(path)


def test_every_field_has_a_reader():
    sources = [
        path.read_text()
        for path in Path(pagestream.__file__).parent.rglob("*.py")
        if path.name != "engine_flags.py"
    ]
    for field in dataclasses.fields(EngineConfig):
        reader = re.compile(rf"config\.{field.name}\b")
        assert any(map(reader.search, sources)), field.name


BASE = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 10,
    "hidden_size": 8,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 128,
}


def checkpoint(directory, config=(), generation=None, tokenizer=None):
    (directory / "config.json").write_text(json.dumps({**BASE, **dict(config)}))
    if generation is not None:
        (directory / "generation_config.json").write_text(json.dumps(generation))
    if tokenizer is not None:
        (directory / "tokenizer_config.json").write_text(json.dumps({"eos_token": "</s>"}))
        added = [{"id": tokenizer, "content": "</s>"}, {"id": 9, "content": "<s>"}]
        (directory / "tokenizer.json").write_text(json.dumps({"added_tokens": added}))
    return ModelConfig.from_hf(directory)


def test_eos_ids_are_the_union_of_all_sources(tmp_path):
    config = checkpoint(tmp_path, {"eos_token_id": 1}, {"eos_token_id": [4, 5]}, tokenizer=7)
    assert config.eos_token_ids == {1, 4, 5, 7}


def test_sampling_defaults_count_only_when_the_checkpoint_samples(tmp_path):
    defaults = {"temperature": 0.6, "top_k": 20, "top_p": 0.95}
    assert checkpoint(tmp_path, generation={"do_sample": True, **defaults}).temperature == 0.6
    assert checkpoint(tmp_path, generation=defaults).temperature is None


@pytest.mark.parametrize(
    ("keys", "theta"),
    [
        ({"rope_parameters": {"rope_theta": 5e5, "rope_type": "default"}}, 5e5),
        ({"rope_theta": 1e6}, 1e6),
        ({"rope_theta": 1e6, "rope_scaling": None}, 1e6),
        ({}, 1e4),
    ],
)
def test_rope_theta_in_every_spelling(tmp_path, keys, theta):
    assert checkpoint(tmp_path, keys).rope_theta == theta


@pytest.mark.parametrize(
    ("keys", "word"),
    [
        ({"rope_scaling": {"type": "yarn"}}, "yarn"),
        ({"rope_parameters": {"rope_type": "llama3"}}, "no factor"),
        ({"use_sliding_window": True}, "sliding_window"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "sliding_attention"),
        ({"hidden_act": "gelu"}, "gelu"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"vocab_size": None}, "vocab_size"),
        ({"architectures": []}, "architecture"),
    ],
)
def test_what_would_run_wrongly_is_refused_at_load(tmp_path, keys, word):
    with pytest.raises(ValueError, match=word):
        checkpoint(tmp_path, keys)


def test_max_model_len_is_never_beyond_the_checkpoint(tmp_path):
    model_config = checkpoint(tmp_path)
    assert resolve_max_model_len(EngineConfig("m"), model_config) == 128
    assert resolve_max_model_len(EngineConfig("m", max_model_len=64), model_config) == 64
    with pytest.raises(ValueError, match=r"max_model_len is 129.*128"):
        resolve_max_model_len(EngineConfig("m", max_model_len=129), model_config)


def test_public_surface():
    for name in pagestream.__all__:
        assert getattr(pagestream, name).__name__ == name
    with pytest.raises(AttributeError, match="Engine"):
        _ = pagestream.Engine
