"""Writes model_repository/*/config.pbtxt from the table in pagestream.serving.tensor_specs.

Run it after a change of the table; a test compares the files with what it would write.
"""

from __future__ import annotations

from pathlib import Path

from pagestream.serving import tensor_specs as specs
from pagestream.serving.tensor_specs import Spec

REPOSITORY = Path(__file__).resolve().parents[1] / "model_repository"

STEPS = {
    "preprocessing": (
        "A client's request -> token ids and parameters. Every input is optional, so that\n"
        "# this step can refuse what is missing.",
        0,
        False,
        specs.PREPROCESSING_INPUTS,
        specs.PREPROCESSING_OUTPUTS,
    ),
    "engine": (
        "Token ids -> token ids: the LLM engine. It queues and batches by itself, so there is no\n"
        "# dynamic_batching and one instance.",
        0,
        True,
        specs.ENGINE_INPUTS,
        specs.ENGINE_OUTPUTS,
    ),
    "postprocessing": (
        "Engine responses -> text. One instance and no dynamic_batching: both would let the\n"
        "# chunks of a request overtake each other.",
        0,
        True,
        specs.CHUNK,
        specs.ANSWERS["postprocessing"],
    ),
    "postprocessing_batched": (
        "Engine responses -> text. One instance and no dynamic_batching: both would let the\n"
        "# chunks of a request overtake each other.\n"
        "# max_batch_size 1, so that `ensemble` answers with tensors of shape [1].",
        1,
        True,
        specs.CHUNK,
        specs.ANSWERS["postprocessing_batched"],
    ),
}
ENSEMBLES = {
    "ensemble": (
        "The TensorRT-LLM convention: names as in its ensemble, one request per batch.",
        1,
        "postprocessing_batched",
    ),
    "chat": (
        "Chat: messages is a JSON list of {role, content}, rendered by the model's own template.",
        0,
        "postprocessing",
    ),
    "vllm": (
        "The vLLM backend's convention: sampling_parameters is a JSON object.",
        0,
        "postprocessing",
    ),
}


def configs() -> dict[str, str]:
    """Model name -> text of its config.pbtxt."""
    return {name: _step(name) for name in STEPS} | {name: _ensemble(name) for name in ENSEMBLES}


def _step(name: str) -> str:
    comment, max_batch_size, decoupled, inputs, outputs = STEPS[name]
    lines = [f"# {comment}", 'backend: "python"', f"max_batch_size: {max_batch_size}"]
    if decoupled:
        lines.append("model_transaction_policy { decoupled: true }")
    lines += [*_tensors("input", inputs, " optional: true"), *_tensors("output", outputs, "")]
    lines.append("instance_group [ { kind: KIND_MODEL count: 1 } ]")
    return "\n".join(lines) + "\n"


def _ensemble(name: str) -> str:
    comment, max_batch_size, post = ENSEMBLES[name]
    inputs, outputs = specs.ENSEMBLES[name], specs.ANSWERS[post]
    renamed = specs.RENAMED_INPUTS.get(name, {})
    answer = {
        specs.RENAMED_OUTPUTS.get(name, {}).get(key, key): spec for key, spec in outputs.items()
    }
    chunk = {key: f"_chunk_{key}" for key in specs.CHUNK}
    between = {key: f"_{key}" for key in specs.PREPROCESSING_OUTPUTS}
    steps = [
        ("preprocessing", {renamed.get(key, key): key for key in inputs}, between),
        ("engine", between, chunk),
        (post, chunk, dict(zip(outputs, answer, strict=True))),
    ]
    lines = [f"# {comment}", 'platform: "ensemble"', f"max_batch_size: {max_batch_size}"]
    lines += [*_tensors("input", inputs, " optional: true"), *_tensors("output", answer, "")]
    lines += ["ensemble_scheduling {", "  step ["]
    for model, input_map, output_map in steps:
        lines += ["    {", f'      model_name: "{model}"', "      model_version: -1"]
        lines += [_mapping("input_map", *item) for item in input_map.items()]
        lines += [_mapping("output_map", *item) for item in output_map.items()]
        lines.append("    }" if model == post else "    },")
    return "\n".join([*lines, "  ]", "}"]) + "\n"


def _tensors(kind: str, table: dict[str, Spec], suffix: str) -> list[str]:
    rows = [
        f'  {{ name: "{name}" data_type: TYPE_{spec.datatype} '
        f"dims: [ {', '.join(map(str, spec.dims))} ]{suffix} }}"
        for name, spec in table.items()
    ]
    return [f"{kind} [", *(row + "," for row in rows[:-1]), rows[-1], "]"]


def _mapping(kind: str, key: str, value: str) -> str:
    return f'      {kind} {{ key: "{key}" value: "{value}" }}'


if __name__ == "__main__":
    for name, text in configs().items():
        (REPOSITORY / name / "config.pbtxt").write_text(text)
