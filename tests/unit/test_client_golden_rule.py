"""The rule that decides whether served token ids equal the reference's."""

from pathlib import Path

import pytest

from pagestream.cli.golden import Comparison, GoldenPrompt, compare_ids, load_golden, worst

REFERENCE = Path(__file__).parent.parent / "data" / "smollm2_greedy.json"
# Step 1 is a tie between 20 and 21, step 2 is not.
PROMPT = GoldenPrompt(
    name="p",
    prompt_token_ids=(1, 2),
    output_ids=(10, 20, 30),
    top_ids=((10, 11, 12), (20, 21, 22), (30, 31, 32)),
    top_logprobs=((-0.1, -2.0, -3.0), (-0.5, -0.5009, -0.5009), (-0.5, -0.502, -3.0)),
)


def test_equal_ids_are_compared_to_the_end():
    assert compare_ids(PROMPT, [10, 20, 30]) == Comparison("p", 3)


def test_a_tie_that_went_the_other_way_ends_the_comparison_without_a_mismatch():
    assert compare_ids(PROMPT, [10, 21, 999]) == Comparison("p", 1, tie_step=1)


def test_a_tie_excuses_only_the_second_best_token():
    assert "step 1: 22" in compare_ids(PROMPT, [10, 22, 30]).mismatch


@pytest.mark.parametrize(("ids", "step"), [([11, 20, 30], 0), ([10, 20, 31], 2)])
def test_the_second_best_token_is_wrong_where_there_is_no_tie(ids, step):
    comparison = compare_ids(PROMPT, ids)
    assert comparison.num_compared == step
    assert f"step {step}" in comparison.mismatch


def test_too_few_and_too_many_ids_are_mismatches():
    assert "ended after 2 of 3" in compare_ids(PROMPT, [10, 20]).mismatch
    assert "ended after 0 of 3" in compare_ids(PROMPT, []).mismatch
    assert "4 ids where the reference has 3" in compare_ids(PROMPT, [10, 20, 30, 40]).mismatch


def test_the_worst_of_several_answers_is_a_mismatch_then_the_least_compared():
    equal, tied = Comparison("p", 3), Comparison("p", 1, tie_step=1)
    wrong = Comparison("p", 2, mismatch="step 2")
    assert worst([equal, tied, wrong]) is wrong
    assert worst([equal, tied]) is tied


def test_the_reference_file_agrees_with_itself():
    prompts = load_golden(REFERENCE)
    assert len(prompts) == 12
    assert sum(compare_ids(prompt, prompt.output_ids).num_compared for prompt in prompts) == 768
    for prompt in prompts:
        assert tuple(step[0] for step in prompt.top_ids) == prompt.output_ids
