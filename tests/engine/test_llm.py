"""LLM.generate: the offline API on the real model, and its refusals."""

import pytest

from pagestream import LLM, SamplingParams

pytestmark = pytest.mark.smollm2


@pytest.fixture(scope="module")
def llm(smollm2):
    return LLM(str(smollm2), num_blocks=40, max_num_seqs=4)


GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)


def test_texts_and_ids_give_the_same_in_order(llm, smollm2):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(smollm2)
    texts = ["The capital of France is", "Count: one, two,", "1 + 1 =", "Hello", "A", "B", "C"]
    by_text = llm.generate(texts, GREEDY, use_tqdm=False)
    ids = [tokenizer(text).input_ids for text in texts]
    by_ids = llm.generate(prompt_token_ids=ids, sampling_params=GREEDY, use_tqdm=False)
    assert [c.token_ids for c in by_text] == [c.token_ids for c in by_ids]
    for completion, prompt in zip(by_text, ids, strict=True):
        assert completion.prompt_token_ids == prompt
        assert completion.text == tokenizer.decode(completion.token_ids, skip_special_tokens=True)
        assert str(completion.finish_reason) == "length"


def test_one_string_is_one_prompt(llm):
    (completion,) = llm.generate("Hello", GREEDY, use_tqdm=False)
    assert len(completion.token_ids) == 12


def test_progress_bar(llm, capsys):
    llm.generate(["Hello", "World"], GREEDY)
    assert "2/2" in capsys.readouterr().err


def test_stop_string_cuts_text_and_ids_together(llm):
    full = llm.generate("1, 2, 3, 4,", GREEDY, use_tqdm=False)[0]
    stop = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, stop=", 6")
    cut = llm.generate("1, 2, 3, 4,", stop, use_tqdm=False)[0]
    assert full.text.startswith(" 5, 6")
    assert cut.text == " 5"
    assert (str(cut.finish_reason), cut.stop_reason) == ("stop", ", 6")
    assert cut.token_ids == full.token_ids[: len(cut.token_ids)]
    assert len(cut.token_ids) < 12
    assert llm.engine.stats.kv_blocks_free == llm.engine.stats.kv_blocks_total


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({}, "either prompts or prompt_token_ids"),
        ({"prompts": ["a"], "prompt_token_ids": [[1]]}, "either prompts or prompt_token_ids"),
        ({"prompts": ["a", ""]}, "prompt 1: the prompt is empty"),
        ({"prompts": [3]}, "prompts must hold strings"),
        ({"prompt_token_ids": [[]]}, "prompt 0: the prompt is empty"),
        ({"prompt_token_ids": [1, 2]}, "list of lists"),
        ({"prompt_token_ids": [[1.5]]}, "must hold integers"),
        ({"prompt_token_ids": [[1], [49152]]}, "prompt 1: .*49152.*vocabulary"),
        ({"prompt_token_ids": [[-1]]}, "prompt 0: .*-1.*vocabulary"),
        ({"prompts": ["a", "b"], "sampling_params": [GREEDY]}, "2 prompts but 1 sampling_params"),
        ({"prompts": ["a"], "sampling_params": SamplingParams(max_tokens=9999)}, "max_tokens"),
        ({"prompt_token_ids": [[1] * 9000]}, "9000 tokens.*8192"),
        ({"prompt_token_ids": [[1] * 3000]}, "3000 tokens.*KV cache holds 2560"),
    ],
)
def test_refusals_come_before_anything_runs(llm, arguments, words):
    before = llm.engine.stats
    with pytest.raises(ValueError, match=words):
        llm.generate(**arguments, use_tqdm=False)
    assert llm.engine.stats == before


def test_unknown_engine_option_raises(smollm2):
    with pytest.raises(ValueError, match="unknown config key 'max_seqs'"):
        LLM(str(smollm2), max_seqs=3)
