"""The text of any ids, in every tokenizer family: streamed, whole, and as the reference has it.

The reference is the definition, written out: each id's piece as bytes by the family's rules, all
joined, decoded once with a replacement character for each maximal part that is not UTF-8. For ids
that come from encoding a text it must also be what transformers decodes.
"""

import random
import sys

import pytest
from families import FAMILIES, make_tokenizer
from scripts import real_texts
from transformers import AutoTokenizer

from pagestream.text.stream_decoder import StreamDecoder
from pagestream.text.tokenizer import Tokenizer

SIZES = (1, 2, 3, 8)
NUM_SEQUENCES = 10_000


class Reference:
    def __init__(self, family, directory):
        self.family = family
        self.tokenizer = AutoTokenizer.from_pretrained(directory)
        added = self.tokenizer.added_tokens_decoder
        self.special = {token_id for token_id, token in added.items() if token.special}
        self.pieces = self.tokenizer.convert_ids_to_tokens(range(len(self.tokenizer)))
        self.alphabet = byte_alphabet()

    def text(self, ids, *, skip_special_tokens=True):
        kept = [i for i in ids if not (skip_special_tokens and i in self.special)]
        pieces = [self.pieces[i] for i in kept]
        if self.family == "unigram":
            parts = [piece.replace("\u2581", " " if i else "") for i, piece in enumerate(pieces)]
            return self.tokenizer.clean_up_tokenization("".join(parts))
        if self.family in ("llama2", "metaspace"):
            joined = b"".join(self.fallback(piece) for piece in pieces)
            return joined.decode("utf-8", errors="replace").removeprefix(" ")
        joined = b"".join(self.byte_level(piece) for piece in pieces)
        return joined.decode("utf-8", errors="replace")

    def fallback(self, piece):
        if len(piece) == 6 and piece.startswith("<0x"):
            return bytes.fromhex(piece[3:5])
        return piece.replace("\u2581", " ").encode()

    def byte_level(self, piece):
        if all(character in self.alphabet for character in piece):
            return bytes(self.alphabet[character] for character in piece)
        return piece.encode()


def byte_alphabet():
    """GPT-2's: printable bytes are themselves, the others come after 255, in order."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(b): b for b in printable} | {chr(256 + n): b for n, b in enumerate(others)}


@pytest.fixture(scope="module", params=[*sorted(FAMILIES), "smollm2"])
def case(request, tmp_path_factory):
    if request.param == "smollm2":
        directory = request.getfixturevalue("smollm2")
    else:
        directory = tmp_path_factory.mktemp(request.param)
        make_tokenizer(request.param, directory)
    return Tokenizer(directory), Reference(request.param, directory)


def streamed(tokenizer, ids, size, **options):
    decoder = StreamDecoder(tokenizer.token_bytes, [], **options)
    deltas = [decoder.append(ids[start : start + size]).text for start in range(0, len(ids), size)]
    return "".join(deltas) + decoder.finish().text


@pytest.mark.smollm2
@pytest.mark.parametrize("skip_special_tokens", [True, False])
def test_any_ids_have_one_text_however_they_come(case, skip_special_tokens):
    tokenizer, reference = case
    generator = random.Random(2)
    vocab_size = len(reference.pieces)
    # Bytes that are no characters by themselves, and special tokens, come often.
    odd = [i for i in range(vocab_size) if not tokenizer.token_bytes.begins_character(i)]
    odd += sorted(reference.special)
    for number in range(NUM_SEQUENCES // 2):
        ids = [
            generator.choice(odd) if generator.random() < 0.4 else generator.randrange(vocab_size)
            for _ in range(generator.randrange(1, 20))
        ]
        expected = reference.text(ids, skip_special_tokens=skip_special_tokens)
        for size in (*SIZES, len(ids)):
            text = streamed(tokenizer, ids, size, skip_special_tokens=skip_special_tokens)
            assert text == expected, (number, size, ids)


def check_real_texts(case, texts):
    tokenizer, reference = case
    for text in texts:
        ids = reference.tokenizer(text)["input_ids"]
        expected = reference.tokenizer.decode(ids, skip_special_tokens=True)
        assert streamed(tokenizer, ids, 1) == streamed(tokenizer, ids, 3) == expected, text
        assert reference.text(ids) == expected, text


@pytest.mark.smollm2
def test_encoded_texts_come_back_as_transformers_decodes_them(case):
    check_real_texts(case, real_texts(500))


@pytest.mark.long
@pytest.mark.smollm2
def test_a_thousand_more_encoded_texts(case):
    check_real_texts(case, real_texts(1000, seed=1))


@pytest.mark.smollm2
def test_the_text_is_exact_where_nothing_is_unknown(case):
    tokenizer, reference = case
    if reference.family == "unigram":
        pytest.skip("its vocabulary has no bytes for unknown characters")
    for text in real_texts(100, seed=3):
        ids = reference.tokenizer(text)["input_ids"]
        # Metaspace takes the space that it puts in front off again, which a text may lack.
        assert streamed(tokenizer, ids, 2) in (text, text.removeprefix(" "))


@pytest.mark.smollm2
def test_a_continuation_is_what_follows_the_prompt(case):
    """decode(prompt + output) without decode(prompt), for any cut of a text."""
    tokenizer, reference = case
    generator = random.Random(4)
    for text in real_texts(150, seed=5):
        ids = reference.tokenizer(text)["input_ids"]
        cut = generator.randrange(1, len(ids) + 1)
        prompt, output = ids[:cut], ids[cut:]
        decoder = StreamDecoder(tokenizer.token_bytes, tokenizer.prompt_tail(prompt))
        deltas = [decoder.append([token]).text for token in output]
        answer = "".join(deltas) + decoder.finish().text
        if reference.family == "unigram":  # cleaning may reach back over the cut
            continue
        whole, before = reference.text(ids), reference.text(prompt)
        before = before.rstrip("\ufffd") if not whole.startswith(before) else before
        assert whole.endswith(answer), (text, cut)
        assert whole.startswith(before), (text, cut)
        assert len(answer) == len(whole) - len(before), (text, cut)


def lines_run(function):
    """How many lines of code a call runs: work that no other load of the machine changes."""
    count = 0

    def trace(frame, event, arg):
        nonlocal count
        count += event == "line"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        function()
    finally:
        sys.settrace(before)
    return count


@pytest.mark.smollm2
def test_a_token_is_as_much_work_at_the_end_of_a_long_answer(case):
    tokenizer, reference = case
    ids = [i for text in real_texts(200, seed=6) for i in reference.tokenizer(text)["input_ids"]]
    ids = ids[:16] + (ids[16:] * 10)[:4000] + ids[:16]
    stop = ("\n\nUser:", "</answer>")
    decoder = StreamDecoder(tokenizer.token_bytes, [], stop=stop)
    early = [lines_run(lambda i=i: decoder.append([i])) for i in ids[:16]]
    for token_id in ids[16:-16]:
        decoder.append([token_id])
    late = [lines_run(lambda i=i: decoder.append([i])) for i in ids[-16:]]
    assert sum(late) <= 1.3 * sum(early)
    held = len(decoder._stops._held)
    assert held < max(map(len, stop))
