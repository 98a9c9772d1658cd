"""Every refusal names the field and the limit; nothing is clamped."""

import math

import pytest

from pagestream.sampling_params import Limits, SamplingParams, validate_prompt

LIMITS = Limits(vocab_size=100, max_model_len=512, pool_tokens=256)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_tokens", 0),
        ("max_tokens", -1),
        ("max_tokens", 1.5),
        ("max_tokens", True),
        ("max_tokens", "5"),
        ("temperature", -1.0),
        ("temperature", math.nan),
        ("temperature", math.inf),
        ("temperature", 10**400),
        ("temperature", 101),
        ("temperature", "hot"),
        ("top_k", -2),
        ("top_k", 2**31),
        ("top_p", -0.1),
        ("top_p", 1.01),
        ("top_p", math.nan),
        ("seed", -1),
        ("seed", 2**64),
        ("min_tokens", -1),
        ("min_tokens", None),
        ("ignore_eos", "yes"),
        ("ignore_eos", None),
        ("skip_special_tokens", 1),
        ("stop_token_ids", "abc"),
        ("stop_token_ids", [1.0]),
        ("stop_token_ids", [None]),
        ("stop_token_ids", [1] * 129),
        ("stop", 3),
        ("stop", ["a", 3]),
        ("stop", ["a"] * 65),
        ("stop", ["a" * 1025]),
    ],
)
def test_refused_by_name(field, value):
    with pytest.raises(ValueError, match=field):
        SamplingParams(**{field: value})


def test_min_tokens_above_max_tokens():
    with pytest.raises(ValueError, match="min_tokens is 5, above max_tokens which is 4"):
        SamplingParams(max_tokens=4, min_tokens=5)


@pytest.mark.parametrize(
    ("params", "words"),
    [
        ({"max_tokens": 4097}, "max_tokens is 4097, above the limit of 4096 .*512"),
        ({"max_tokens": 10**30}, "max_tokens"),
        ({"min_tokens": 513}, "min_tokens is 513, above max_model_len"),
        ({"stop_token_ids": [100]}, "stop_token_ids contains 100"),
        ({"stop_token_ids": [-1]}, "stop_token_ids contains -1"),
    ],
)
def test_what_this_model_cannot_serve(params, words):
    with pytest.raises(ValueError, match=words):
        SamplingParams(**params).validate(LIMITS)


def test_frameworks_default_of_a_few_thousand_tokens_is_accepted():
    SamplingParams(max_tokens=4096).validate(LIMITS)
    SamplingParams(max_tokens=9000).validate(Limits(vocab_size=10, max_model_len=9000))


@pytest.mark.parametrize(
    ("ids", "words"),
    [
        ([], "messages is empty"),
        ([1] * 512, "messages has 512 tokens .* max_model_len is 512"),
        ([1] * 256, "messages has 256 tokens .* KV cache holds 256"),
        ([1, 100], "messages contains 100, outside the vocabulary"),
        ([1, -1], "messages contains -1"),
    ],
)
def test_prompts_that_cannot_be_served(ids, words):
    with pytest.raises(ValueError, match=words):
        validate_prompt(ids, LIMITS, "messages")


def test_longest_prompt_that_fits():
    validate_prompt([1] * 255, LIMITS)


def test_dict_round_trip_drops_defaults():
    params = SamplingParams(max_tokens=3, stop="x", stop_token_ids=[1, 2])
    assert params.to_dict() == {"max_tokens": 3, "stop": ("x",), "stop_token_ids": (1, 2)}
    assert SamplingParams.from_dict(params.to_dict()) == params
    assert SamplingParams().to_dict() == {}


def test_empty_stop_strings_are_none():
    assert SamplingParams(stop="").stop == ()
    assert SamplingParams(stop=["", "a", ""]).stop == ("a",)


def test_unknown_field():
    with pytest.raises(ValueError, match="unknown sampling parameter 'temprature'"):
        SamplingParams.from_dict({"temprature": 1.0})
