"""Demands 6-8, 20, 21, 27-29: what ends an answer, and what must not be said."""

import time

import pytest
from demand_chains import LONG
from e2e_support import ENSEMBLES, MODES, wait_until
from script_model import EOS, TURN_END

pytestmark = pytest.mark.server

LETTERS = ("a", ",", "b", ",", "d", ",", "e")
# (chain, stop strings, text, the one that ends it, tokens up to its end)
STOPS = [
    ("lines", ["\n"], "first line", "\n", 3),
    ("words", ["\n\n"], " The quick brown foxes jump", "\n\n", 8),
    ("code", ["quickSort"], " call ", "quickSort", 3),
    ("code", [" quickSort"], " call", " quickSort", 3),
    ("code", ["ort(li"], " call quickS", "ort(li", 5),
    ("code", ["\nend"], " call quickSort(list)", "\nend", 8),
    ("list", ["b,c"], "a, ", "b,c", 5),
    ("list", [", "], "a", ", ", 3),
    ("list", [";", "c; d", ",c"], "a, b", ",c", 5),
    ("code", ["list)", "(list", "Sort"], " call quick", "Sort", 3),
    ("emoji", ["😀"], "Hi ", "😀", 5),
    ("long", ["again over"], " over and over ", "again over", 5),
]


def stop_at(ensemble: str, stops: list[str]) -> dict[str, object]:
    return {"stop" if ensemble == "vllm" else "stop_words": stops}


@MODES
@pytest.mark.parametrize("ensemble", ENSEMBLES)
@pytest.mark.parametrize(("name", "stops", "text", "stop", "num_tokens"), STOPS)
def test_row_06_stop_strings_are_found_at_any_token_boundary(
    each_script, ensemble, name, stops, text, stop, num_tokens, stream
):
    answer = each_script.ask(name, ensemble, stream=stream, **stop_at(ensemble, stops))
    assert answer.text_output == text
    assert (answer.finish_reason, answer.stop_reason) == ("stop", stop)
    assert answer.num_output_tokens == num_tokens


@MODES
@pytest.mark.parametrize("ensemble", ENSEMBLES)
def test_row_06_the_end_of_sequence_token_may_be_spelled(each_script, ensemble, stream):
    options = {"ignore_eos": True, "max_tokens": 10, **stop_at(ensemble, ["</s>"])}
    answer = each_script.ask("past the end", ensemble, stream=stream, **options)
    assert (answer.text_output, answer.finish_reason) == ("one", "stop")


@MODES
def test_row_06_empty_stop_words_are_none(script, stream):
    """Over HTTP, where clients of tensorrtllm_backend send empty strings."""
    for empty in ("", [""], []):
        body = {"stream": stream, "stop_words": empty, "bad_words": empty}
        body |= script.inputs("code", "ensemble", {})
        if stream:
            events = script.generate_stream("ensemble", body).body
            text = "".join(event["text_output"] for event in events)
        else:
            text = script.generate("ensemble", body).body["text_output"]
        assert text == script.script.text("code")


@MODES
def test_row_06_a_stop_string_ends_the_work_too(script, stream):
    wait_until(script.is_idle, 5, "idle before the test")
    before = script.metrics()["generated_tokens_total"]
    answer = script.ask("long", stream=stream, stop_words=[" again"], max_tokens=8000)
    assert answer.text_output == " over and over"
    wait_until(script.is_idle, 1, "idle after the stop")
    assert script.metrics()["generated_tokens_total"] - before < 2000


@MODES
@pytest.mark.parametrize("ensemble", ENSEMBLES)
def test_row_07_no_part_of_a_stop_string_leaks(each_script, ensemble, stream):
    options = stop_at(ensemble, ["DEFGHIJ"])
    chunks = each_script.chunks("alphabet", ensemble, stream=stream, **options)
    assert [chunk.text_output for chunk in chunks if chunk.text_output] == [" ABC"]
    assert chunks[-1].finish_reason == "stop"


@MODES
@pytest.mark.parametrize("ensemble", ENSEMBLES)
@pytest.mark.parametrize("stop", ["DEFGHIX", "MNO", "BCD ", "CDEFGHIJKLMNO"])
def test_row_07_what_only_began_like_a_stop_string_is_released(each_script, ensemble, stop, stream):
    answer = each_script.ask("alphabet", ensemble, stream=stream, **stop_at(ensemble, [stop]))
    assert answer.text_output == " ABCDEFGHIJKLMN"
    assert (answer.finish_reason, answer.stop_reason) == ("stop", "")


@MODES
@pytest.mark.parametrize("ensemble", ENSEMBLES)
@pytest.mark.parametrize(
    ("name", "text", "num_tokens"),
    [("turn", "Hi!", 3), ("goodbye", "Bye!", 3), ("past the end", "one", 2)],
)
@pytest.mark.parametrize(
    "setting",
    [
        {},
        {"top_p": 0.9},
        {"stop_token_ids": [0]},
        {"stop": ["never said"]},
        {"skip_special_tokens": False},
        {"logit_bias": {"0": 1.0}},
    ],
    ids=lambda setting: next(iter(setting), "no setting"),
)
def test_row_08_every_end_of_sequence_id_ends_the_answer(
    script, ensemble, name, text, num_tokens, setting, stream
):
    """The tokenizer's and generation_config's, whatever else a request sets."""
    if ensemble != "vllm" and "stop" in setting:
        setting = {"stop_words": setting["stop"]}
    answer = script.ask(name, ensemble, stream=stream, max_tokens=20, **setting)
    assert (answer.text_output, answer.finish_reason) == (text, "stop")
    assert answer.num_output_tokens == num_tokens


@MODES
def test_row_08_end_id_is_one_more(script, stream):
    """TensorRT-LLM's clients name one; a wrong one must not replace the others."""
    (last_word,) = script.script.chains["lines"][4]
    inputs = {"lines": last_word, "turn": last_word}
    texts = {"lines": "first line\nsecond", "turn": "Hi!"}
    for name, end_id in inputs.items():
        body = script.inputs(name, "ensemble", {"end_id": end_id, "pad_id": 0, "stream": stream})
        answer = script.generate_stream("ensemble", body).body
        assert "".join(event["text_output"] for event in answer) == texts[name]
        assert answer[-1]["finish_reason"] == "stop"


def sent_text(text: str, stops: list[str]) -> str:
    """What may be sent of a text that goes on: all but the longest end that may begin a stop."""
    held = max(
        (n for stop in stops for n in range(1, len(stop)) if text.endswith(stop[:n])), default=0
    )
    return text[: len(text) - held]


@pytest.mark.parametrize("ensemble", ENSEMBLES)
@pytest.mark.parametrize(
    "stops", [["b,c"], ["d,ee", "b,dx"], ["e."], [f"{i:03}{'x' * 1000}" for i in range(64)]]
)
def test_row_20_only_what_may_begin_a_stop_string_is_held(each_script, ensemble, stops):
    chunks = each_script.chunks("letters", ensemble, **stop_at(ensemble, stops))
    num_tokens, text = 0, ""
    for chunk in chunks[:-1]:
        assert chunk.text_output, "an empty chunk"
        text += chunk.text_output
        num_tokens += chunk.num_output_tokens
        assert text == sent_text("".join(LETTERS[:num_tokens]), stops)
    assert text + chunks[-1].text_output == "".join(LETTERS)
    assert len(chunks) > 3
    whole = each_script.ask("letters", ensemble, stream=False, **stop_at(ensemble, stops))
    assert whole.text_output == "".join(LETTERS)


def test_row_20_a_long_stop_list_does_not_delay_the_first_text(script):
    """In a chain without end, so that the whole answer would come later than the bound."""
    stops = [f"{word}{'x' * 1000}" for word in LONG[:4] for _ in range(16)]
    started = time.monotonic()
    inputs = script.inputs("long", "ensemble", {"max_tokens": 8000, "stop_words": stops})
    with script.client.stream(**inputs) as chunks:
        first = next(chunks)
    assert first.text_output
    assert first.received_at - started < 1


@MODES
@pytest.mark.parametrize("ensemble", ENSEMBLES)
def test_row_21_ignore_eos_holds_for_every_end_of_sequence_id(each_script, ensemble, stream):
    options = {"ignore_eos": True, "max_tokens": 20, "return_token_ids": True}
    answer = each_script.ask("past the end", ensemble, stream=stream, **options)
    assert answer.num_output_tokens == 20
    assert answer.text_output == "one two three" * 4
    assert answer.finish_reason == "length"
    assert list(answer.output_token_ids) == each_script.script.ids("past the end") * 4


@MODES
@pytest.mark.parametrize("ensemble", ENSEMBLES)
@pytest.mark.parametrize("setting", ["alone", "stop string", "stop tokens"])
def test_row_21_nothing_ends_an_answer_before_min_tokens(each_script, ensemble, setting, stream):
    """Its best successor is EOS, then the other end of sequence, at every place."""
    special = each_script.script.tokenizer.convert_tokens_to_ids([EOS, TURN_END])
    settings = {
        "stop string": stop_at(ensemble, ["bc"]),
        "stop tokens": {"ignore_eos": True, "stop_token_ids": special},
    }
    options = {"min_tokens": 5, "max_tokens": 20, **settings.get(setting, {})}
    answer = each_script.ask("eager", ensemble, stream=stream, **options)
    assert answer.text_output == "abcde"
    assert answer.num_output_tokens == 6
    assert answer.finish_reason == "stop"


@MODES
@pytest.mark.parametrize("ensemble", ENSEMBLES)
@pytest.mark.parametrize("skip", [True, False])
def test_row_27_a_stop_string_that_is_a_special_token(each_script, ensemble, skip, stream):
    options = {"skip_special_tokens": skip, **stop_at(ensemble, ["<|mark|>"])}
    answer = each_script.ask("mark", ensemble, stream=stream, **options)
    assert answer.text_output == "before"
    assert answer.finish_reason == "stop"
    assert answer.num_output_tokens == 2
    unstopped = each_script.ask("mark", ensemble, stream=stream, skip_special_tokens=skip)
    assert unstopped.text_output == ("beforeafter" if skip else "before<|mark|>after")


@MODES
@pytest.mark.parametrize("ensemble", ENSEMBLES)
@pytest.mark.parametrize("include", [True, False])
def test_row_28_the_stop_string_may_be_included_and_is_named(
    each_script, ensemble, include, stream
):
    options = {"include_stop_str_in_output": include}
    stops = stop_at(ensemble, ["list", "Sort(", "call x"])
    answer = each_script.ask("code", ensemble, stream=stream, **options, **stops)
    assert answer.text_output == (" call quickSort(" if include else " call quick")
    assert (answer.finish_reason, answer.stop_reason) == ("stop", "Sort(")
    special = stop_at(ensemble, ["<|mark|>"])
    marked = each_script.ask(
        "mark", ensemble, stream=stream, skip_special_tokens=False, **options, **special
    )
    assert marked.text_output == ("before<|mark|>" if include else "before")
    assert marked.stop_reason == "<|mark|>"


@MODES
@pytest.mark.parametrize("ensemble", ENSEMBLES)
def test_row_28_a_stop_token_is_named(each_script, ensemble, stream):
    (stop_id,) = each_script.script.chains["code"][2]
    answer = each_script.ask("code", ensemble, stream=stream, stop_token_ids=[stop_id])
    assert (answer.text_output, answer.stop_reason) == (" call quick", str(stop_id))


BAD_WORDS = [
    ("capital", [], " London is"),
    ("capital", ["london", "LONDON"], " London is"),
    ("capital", ["London"], " Lon is"),
    ("capital", ["London", "Lon"], " Paris is"),
    ("river", [], "Riverside."),
    ("river", ["Riverside"], "Riverbank."),
    ("river", ["side"], "Riverbank."),
]


@MODES
@pytest.mark.parametrize("ensemble", ENSEMBLES)
@pytest.mark.parametrize(("name", "bad_words", "text"), BAD_WORDS)
def test_row_29_bad_words_are_blocked_in_every_spelling(
    each_script, ensemble, name, bad_words, text, stream
):
    """After a space and not, and over several tokens; with capitals as given."""
    answer = each_script.ask(name, ensemble, stream=stream, bad_words=bad_words)
    assert answer.text_output == text
