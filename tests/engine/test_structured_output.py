"""Structured output on the real model: what comes out is what was asked for, under any schedule."""

import json
import re

import pytest

from pagestream import LLM, SamplingParams

pytestmark = pytest.mark.smollm2

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 20},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "tags": {"type": "array", "items": {"enum": ["a", "b"]}, "maxItems": 3},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
REGEX = "[A-Z][a-z]{2,8} [0-9]{3}-[0-9]{4}"
EBNF = 'root ::= "(" inner ")"\ninner ::= [0-9] | root'


@pytest.fixture(scope="module")
def llm(smollm2):
    return LLM(str(smollm2), num_blocks=60, block_size=16, max_num_seqs=8)


def run(llm, wanted, prompts=("Make one up: ",), **controls):
    values = {"temperature": 1.0, "seed": 1, "max_tokens": 200, **controls}
    params = SamplingParams(structured_output=wanted, **values)
    return llm.generate(list(prompts), params, use_tqdm=False)


def check_person(completion):
    assert str(completion.finish_reason) == "stop"
    person = json.loads(completion.text)
    assert set(person) == {"name", "age", "tags"}
    assert 0 <= person["age"] <= 120
    assert set(person["tags"]) <= {"a", "b"}


@pytest.mark.parametrize("schema", [PERSON, json.dumps(PERSON)], ids=["object", "text"])
def test_json_schema(llm, schema):
    (completion,) = run(llm, {"json_schema": schema})
    check_person(completion)


def test_regex_grammar_and_choice(llm):
    (completion,) = run(llm, {"regex": REGEX})
    assert re.fullmatch(REGEX, completion.text)
    (completion,) = run(llm, {"grammar": EBNF}, seed=4)
    assert re.fullmatch(r"\(+[0-9]\)+", completion.text)
    choices = ['say "yes"', "no\n", "maybe é"]
    texts = {run(llm, {"choice": choices}, seed=seed)[0].text for seed in range(8)}
    assert texts <= set(choices)
    assert len(texts) > 1


@pytest.mark.parametrize(
    ("wanted", "words"),
    [
        ({"regex": "foo**"}, "structured_output.regex is not usable: .*repetition"),
        ({"json_schema": "{"}, "structured_output.json_schema is not usable"),
        ({"json_schema": '{"type": "nope"}'}, "Unsupported type"),
        ({"json_schema": '{"$ref": "http://elsewhere"}'}, "is not in the schema itself"),
        ({"grammar": "root ::= missing"}, "missing"),
    ],
)
def test_bad_grammars_are_an_error_of_their_request_alone(llm, wanted, words):
    good, bad = SamplingParams(max_tokens=3), SamplingParams(structured_output=wanted)
    llm.engine.add_request("good", [1, 2, 3], good)
    llm.engine.add_request("bad", [1, 2, 3], bad)
    ended = {}
    while llm.engine.has_unfinished_requests():
        for output in llm.engine.step():
            if output.finish_reason is not None:
                ended[output.request_id] = output
    assert str(ended["bad"].finish_reason) == "error"
    assert re.search(words, ended["bad"].error)
    assert "/" not in ended["bad"].error.replace("http://", "")
    assert str(ended["good"].finish_reason) in ("length", "stop")


@pytest.mark.parametrize(
    "wanted",
    [
        {},
        {"regex": "a", "grammar": "b"},
        {"json": "{}"},
        {"regex": 3},
        {"choice": []},
        {"choice": [""]},
        {"json_schema": "x" * 10**6},
        [],
        "text",
    ],
    ids=str,
)
def test_refused_before_anything_is_compiled(wanted):
    with pytest.raises(ValueError, match="structured_output"):
        SamplingParams(structured_output=wanted)


@pytest.mark.parametrize(
    "controls",
    [
        {"min_tokens": 100},
        {"ignore_eos": True},
        {"frequency_penalty": 2.0, "repetition_penalty": 1.5},
        {"temperature": 0},
        {"logprobs": 2},
        {"logit_bias": {2: 100.0}},
    ],
    ids=str,
)
def test_together_with_other_controls(llm, controls):
    (completion,) = run(llm, {"json_schema": PERSON}, **controls)
    check_person(completion)


def test_in_company_after_preemption_and_one_step_ahead(smollm2, llm):
    prompts = [f"Person number {index}: " for index in range(6)]
    alone = [run(llm, {"json_schema": PERSON}, [prompt])[0].text for prompt in prompts]
    for options in ({"num_blocks": 9}, {"overlap_scheduling": "on"}):
        values = {"num_blocks": 60, "block_size": 16, "max_num_seqs": 8, **options}
        squeezed = LLM(str(smollm2), **values)
        plain = SamplingParams(max_tokens=40, ignore_eos=True)
        grammar = SamplingParams(
            temperature=1.0, seed=1, max_tokens=200, structured_output={"json_schema": PERSON}
        )
        params = [grammar] * 6 + [plain] * 2
        completions = squeezed.generate([*prompts, "x", "y"], params, use_tqdm=False)
        assert [completion.text for completion in completions[:6]] == alone
        if "num_blocks" in options:
            assert squeezed.engine.stats.preemptions_total > 0


def test_n_answers_each_follow_the_grammar(llm):
    completions = run(llm, {"json_schema": PERSON}, n=3, temperature=1.5)
    for completion in completions:
        check_person(completion)
    assert len({completion.text for completion in completions}) == 3


def test_abort_while_compiling(llm):
    slow = {f"field{index}": {"type": "string"} for index in range(300)}
    schema = {"type": "object", "properties": slow}
    llm.engine.add_request(
        "slow", [1, 2, 3], SamplingParams(structured_output={"json_schema": schema})
    )
    assert llm.engine.stats.requests_waiting == 1
    llm.engine.abort_request("slow")
    (ended,) = llm.engine.step()
    assert str(ended.finish_reason) == "abort"
    assert not llm.engine.has_unfinished_requests()
