"""Demands 1-3, 24-26: streamed text is the whole text, character for character."""

import itertools
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import pytest
from demand_chains import EMOJI_FAMILY, LONG, NUMBERS
from e2e_support import ENSEMBLES, MODES
from script_model import BYTE_LEVEL, METASPACE

from pagestream_client import Completion, StreamChunk

pytestmark = pytest.mark.server

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
CHARACTERS = {
    "emoji": "Hi 😀!",
    "emoji family": f"A{EMOJI_FAMILY}e\u0301.",
    "cyrillic": "Привет, мир",
    "chinese": "你好，世界。",
}
SPACES = {BYTE_LEVEL: "x    . ,  ! ? n't 's    .", METASPACE: "x   ., !?n't's   ."}
LONG_TOKENS = 4000


@pytest.mark.parametrize("ensemble", ENSEMBLES)
@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("words", " The quick brown foxes jump\n\n over.  "),
        ("joined", "ing and so-on"),
        ("numbers", "".join(NUMBERS)),
    ],
)
def test_row_01_streamed_text_has_its_spaces(each_script, ensemble, name, text):
    """Joined stream == whole text == the tokenizer's decoding of all ids."""
    chunks = each_script.chunks(name, ensemble)
    assert len(chunks) > 3
    assert "".join(chunk.text_output for chunk in chunks) == text
    assert each_script.ask(name, ensemble, stream=False).text_output == text
    assert each_script.script.text(name) == text


@MODES
@pytest.mark.parametrize("ensemble", ENSEMBLES)
@pytest.mark.parametrize("name", CHARACTERS)
def test_row_02_characters_split_over_tokens_stay_whole(each_script, ensemble, name, stream):
    chunks = each_script.chunks(name, ensemble, stream=stream)
    assert len(chunks) > 1 if stream else len(chunks) == 1
    assert not any(REPLACEMENT in chunk.text_output for chunk in chunks)
    text = "".join(chunk.text_output for chunk in chunks)
    assert text == CHARACTERS[name] == each_script.script.text(name)


@MODES
@pytest.mark.parametrize(
    ("name", "text"), [("cut", f"end{REPLACEMENT}"), ("stray", f"a{REPLACEMENT}b{REPLACEMENT}c")]
)
def test_row_02_what_is_no_character_is_replaced_once(each_script, name, text, stream):
    chunks = each_script.chunks(name, stream=stream)
    assert "".join(chunk.text_output for chunk in chunks) == text
    if stream and name == "cut":
        assert REPLACEMENT in chunks[-1].text_output


@MODES
def test_row_03_chunks_of_a_hundred_requests_arrive_in_order(script, stream):
    expected = script.script.ids("numbers")

    def ask(_: int):
        return script.ask("numbers", stream=stream, return_token_ids=True, max_tokens=len(expected))

    with ThreadPoolExecutor(25) as pool:
        answers = list(pool.map(ask, range(100)))
    assert {answer.text_output for answer in answers} == {"".join(NUMBERS)}
    assert {answer.output_token_ids for answer in answers} == {tuple(expected)}


@dataclass(frozen=True)
class LongAnswer:
    chunks: list[StreamChunk]
    whole: Completion
    post_ms: list[float]
    """Of postprocessing per response, over each 250 responses of the stream."""


@pytest.fixture(scope="module")
def long_answer(scripts) -> LongAnswer:
    """4,000 tokens, streamed and whole at once."""
    script = scripts[METASPACE]
    params = {"max_tokens": LONG_TOKENS}
    with ThreadPoolExecutor(1) as pool:
        whole = pool.submit(script.ask, "long", stream=False, **params)
        chunks, marks = [], [post_costs(script)]
        for chunk in script.client.stream(**script.inputs("long", "ensemble", params)):
            chunks.append(chunk)
            if len(chunks) % 250 == 0:
                marks.append(post_costs(script))
        # Where this process lags, the server may have done several windows' work before.
        pairs = itertools.pairwise([mark for mark, _ in itertools.groupby(marks)])
        post_ms = [(us - us0) / (num - num0) / 1000 for (num0, us0), (num, us) in pairs]
        return LongAnswer(chunks, whole.result(), post_ms)


def post_costs(script) -> tuple[float, float]:
    """Of `ensemble`'s postprocessing so far: how often it ran, and the microseconds of that."""
    label = '{model="postprocessing_batched",version="1"}'
    names = ("nv_inference_exec_count", "nv_inference_compute_infer_duration_us")
    with urllib.request.urlopen(script.metrics_url) as response:
        samples = dict(line.rsplit(" ", 1) for line in response.read().decode().splitlines())
    num, us = (float(samples[name + label]) for name in names)
    return num, us


def test_row_24_postprocessing_costs_the_same_at_token_10_and_4000(long_answer):
    """Of a streamed answer; the least of several windows, because others use the machine too."""
    early, late = min(long_answer.post_ms[:5]), min(long_answer.post_ms[-5:])
    assert late < 1.5 * early, f"{early:.2f} ms, then {late:.2f} ms"
    longest = max(len(chunk.text_output) / chunk.num_output_tokens for chunk in long_answer.chunks)
    assert longest <= max(map(len, LONG)), "a response has more than its own tokens"


@MODES
def test_row_24_64_streams_do_not_wait_for_pre_and_postprocessing(script, stream):
    """10 ms per token would be far from what they take, and far from 40 ms of looking things up."""

    def ask(_: int):
        return script.ask("numbers", stream=stream)

    started = time.monotonic()
    with ThreadPoolExecutor(64) as pool:
        answers = list(pool.map(ask, range(64)))
    elapsed = time.monotonic() - started
    assert {answer.text_output for answer in answers} == {"".join(NUMBERS)}
    assert elapsed < 0.010 * sum(answer.num_output_tokens for answer in answers)


@MODES
@pytest.mark.parametrize("ensemble", ENSEMBLES)
def test_row_25_decoding_loses_no_space_and_no_punctuation(each_script, ensemble, stream):
    """The metaspace tokenizer cleans up spaces, as transformers does it in the whole text."""
    answer = each_script.ask("spaces", ensemble, stream=stream)
    assert answer.text_output == each_script.script.text("spaces") == SPACES[each_script.family]


def test_row_25_four_thousand_tokens(scripts, long_answer):
    script = scripts[METASPACE].script
    rounds, rest = divmod(LONG_TOKENS, len(LONG))
    text = script.decode("long", script.ids("long") * rounds + script.ids("long")[:rest])
    assert "".join(chunk.text_output for chunk in long_answer.chunks) == text
    assert long_answer.whole.text_output == text
    assert len(long_answer.chunks) > LONG_TOKENS / 4


@MODES
@pytest.mark.parametrize("ensemble", ENSEMBLES)
@pytest.mark.parametrize(
    ("name", "skip", "text"),
    [
        ("tool", None, " a  b"),
        ("tool", True, " a  b"),
        ("tool", False, "<tool> a </tool> b"),
        ("think", None, "<think>hm</think> so"),
        ("think", False, "<think>hm</think> so"),
    ],
)
def test_row_26_special_tokens_are_skipped_or_shown(
    each_script, ensemble, name, skip, text, stream
):
    options = {} if skip is None else {"skip_special_tokens": skip}
    answer = each_script.ask(name, ensemble, stream=stream, **options)
    assert answer.text_output == text
    assert each_script.script.text(name, skip_special_tokens=skip is not False) == text
