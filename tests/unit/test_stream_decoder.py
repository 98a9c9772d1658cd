"""StreamDecoder: the joined deltas are the text, whatever the cut into tokens and responses."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pagestream.text.stream_decoder import StreamDecoder
from pagestream.text.token_bytes import TokenBytes, read_token_bytes

BYTES = TokenBytes([bytes([i]) for i in range(256)] + [b"<eos>"], frozenset({256}), False)


def ids(text):
    return list(text.encode())


def pieces(decoder, token_ids, size=1):
    """The deltas in groups of ``size`` tokens, up to a stop string, and the flush at the end."""
    deltas = []
    for start in range(0, len(token_ids), size):
        delta = decoder.append(token_ids[start : start + size])
        deltas.append(delta.text)
        if delta.stop is not None:
            return deltas, delta.stop
    last = decoder.finish()
    return [*deltas, last.text], last.stop


@settings(max_examples=300, deadline=None)
@given(data=st.binary(max_size=60), size=st.integers(1, 16))
def test_any_bytes_at_any_size_give_the_replacement_decoding(data, size):
    deltas, _ = pieces(StreamDecoder(BYTES, []), list(data), size)
    assert "".join(deltas) == data.decode("utf-8", errors="replace")


@settings(max_examples=200, deadline=None)
@given(text=st.text(max_size=40), stops=st.lists(st.text(min_size=1, max_size=5), max_size=3))
def test_stop_strings_cut_at_the_earliest_completed_match(text, stops):
    encoded = ids(text)
    runs = []
    for size in (1, 2, 3, 8):
        deltas, stop = pieces(StreamDecoder(BYTES, [], stop=tuple(stops)), encoded, size)
        runs.append(("".join(deltas), stop))
    assert len(set(runs)) == 1
    joined, stop = runs[0]
    assert all(candidate not in joined for candidate in stops)
    if stop is None:
        assert joined == text
    else:
        assert text.startswith(joined + stop)


def test_no_delta_ever_ends_with_the_start_of_a_stop_that_comes():
    text = "Here is the alphabet: ABCDEFGHIJKLM"
    decoder = StreamDecoder(BYTES, [], stop=("DEFGHIJ",))
    deltas, stop = pieces(decoder, ids(text))
    assert "".join(deltas) == "Here is the alphabet: ABC"
    assert stop == "DEFGHIJ"


def test_held_text_is_released_as_soon_as_it_is_harmless():
    decoder = StreamDecoder(BYTES, [], stop=("b,c",))
    released = [decoder.append([token]).text for token in ids("a,b,d")]
    assert released == ["a", ",", "", "", "b,d"]


def test_tokens_are_counted_up_to_the_stop():
    delta = StreamDecoder(BYTES, [], stop=("cd",)).append(ids("abcdef"))
    assert (delta.text, delta.stop, delta.num_tokens) == ("ab", "cd", 4)


def test_stop_string_may_be_included():
    decoder = StreamDecoder(BYTES, [], stop=("cd",), include_stop_str_in_output=True)
    assert decoder.append(ids("abcdef")).text == "abcd"


def test_no_match_before_min_tokens():
    decoder = StreamDecoder(BYTES, [], stop=("b",), min_tokens=3)
    deltas, stop = pieces(decoder, ids("abcbz"))
    assert ("".join(deltas), stop) == ("abc", "b")


def test_emoji_comes_whole_and_a_truncated_one_is_flushed_once():
    smile = ids("\U0001f600")
    decoder = StreamDecoder(BYTES, [])
    assert [decoder.append([token]).text for token in smile] == ["", "", "", "\U0001f600"]
    decoder = StreamDecoder(BYTES, [])
    assert decoder.append(smile[:3]).text == ""
    assert decoder.finish().text == "\ufffd"
    assert decoder.finish().text == ""


def test_prompt_tail_completes_a_character_and_is_not_repeated():
    smile = ids("\U0001f600")
    decoder = StreamDecoder(BYTES, ids("Hi ") + smile[:2])
    assert decoder.append(smile[2:] + ids("!")).text == "\U0001f600!"


@pytest.mark.parametrize(("skip", "text"), [(True, "ab"), (False, "a<eos>b")])
def test_special_tokens(skip, text):
    decoder = StreamDecoder(BYTES, [], skip_special_tokens=skip)
    assert decoder.append([97, 256, 98]).text == text


def test_stop_token_counts_and_leaves_no_text():
    decoder = StreamDecoder(BYTES, [], skip_special_tokens=False)
    delta = decoder.append([97, 256], last_is_stop=True)
    assert (delta.text, delta.num_tokens) == ("a", 2)
    decoder = StreamDecoder(BYTES, [], skip_special_tokens=False, include_stop_str_in_output=True)
    assert decoder.append([97, 256], last_is_stop=True).text == "a<eos>"


@pytest.mark.smollm2
def test_prompt_tail_reaches_back_to_the_start_of_a_character(smollm2):
    from pagestream.text.tokenizer import Tokenizer

    tokenizer = Tokenizer(smollm2)
    prompt = tokenizer.encode("words before " + "\U0001f9ff" * 6)
    tail = tokenizer.prompt_tail(prompt)
    assert prompt[-len(tail) :] == tail
    assert 8 <= len(tail) <= 64
    assert tokenizer.token_bytes.begins_character(tail[0])
    assert tokenizer.prompt_tail(prompt[:3]) == prompt[:3]


def test_unknown_decoder_is_refused(tmp_path):
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps({"model": {"vocab": {"a": 0}}, "decoder": {"type": "WordPiece"}}))
    with pytest.raises(ValueError, match="WordPiece"):
        read_token_bytes(path)
