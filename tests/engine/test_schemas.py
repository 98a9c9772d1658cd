"""Fifty varied bounded JSON schemas: what finishes parses, and is what its schema says."""

import itertools
import json
import random

import jsonschema
import pytest

from pagestream import LLM, SamplingParams

pytestmark = [pytest.mark.smollm2, pytest.mark.long]


def leaf(generator):
    return generator.choice(
        [
            {"type": "string", "maxLength": 12},
            {"type": "string", "enum": ["red", "green", "blue"]},
            {"type": "integer", "minimum": 0, "maximum": 1000},
            {"type": "boolean"},
            {"type": "null"},
            {"const": "fixed"},
            {"type": "string", "pattern": "^[a-z]{2,6}$"},
            {"anyOf": [{"type": "boolean"}, {"type": "integer", "minimum": 0, "maximum": 9}]},
        ]
    )


def schema(generator, depth):
    kind = generator.choice(["object", "object", "array", "leaf"]) if depth else "leaf"
    if kind == "leaf":
        return leaf(generator)
    if kind == "array":
        return {
            "type": "array",
            "items": schema(generator, depth - 1),
            "minItems": 1,
            "maxItems": generator.randint(1, 3),
        }
    names = generator.sample(["id", "name", "size", "tags", "owner", "ok"], generator.randint(1, 4))
    properties = {name: schema(generator, depth - 1) for name in names}
    return {
        "type": "object",
        "properties": properties,
        "required": names[: generator.randint(1, len(names))],
        "additionalProperties": False,
    }


def test_fifty_schemas(smollm2):
    generator = random.Random(0)
    schemas = [
        schema(generator, depth) for depth in itertools.islice(itertools.cycle([1, 2, 3]), 50)
    ]
    assert len({json.dumps(each) for each in schemas}) > 30
    llm = LLM(str(smollm2), max_num_seqs=16)
    prompts = [f"Write a JSON value for this schema: {json.dumps(each)}\n" for each in schemas]
    params = [
        SamplingParams(max_tokens=512, seed=index, structured_output={"json_schema": each})
        for index, each in enumerate(schemas)
    ]
    completions = llm.generate(prompts, params, use_tqdm=False)
    finished = 0
    for each, completion in zip(schemas, completions, strict=True):
        if str(completion.finish_reason) == "stop":
            finished += 1
            jsonschema.validate(json.loads(completion.text), each)
    print(f"{finished} of 50 schemas finished; all of them parse and validate")
    assert finished >= 45
