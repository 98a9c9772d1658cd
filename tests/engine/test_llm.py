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


def test_stream_gives_the_completion_in_parts(llm):
    whole = llm.generate("1, 2, 3,", GREEDY, use_tqdm=False)[0]
    deltas = list(llm.stream("1, 2, 3,", GREEDY))
    assert "".join(delta.text for delta in deltas) == whole.text
    assert [token for delta in deltas for token in delta.token_ids] == whole.token_ids
    assert [delta.finish_reason for delta in deltas[:-1]] == [None] * (len(deltas) - 1)
    assert str(deltas[-1].finish_reason) == "length"


def test_leaving_a_stream_early_aborts_it(llm):
    for _ in llm.stream("Hello", SamplingParams(max_tokens=500, ignore_eos=True)):
        break
    assert not llm.engine.has_unfinished_requests()
    assert llm.engine.stats.kv_blocks_free == llm.engine.stats.kv_blocks_total


def test_chat(llm, smollm2):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(smollm2)
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    params = SamplingParams(temperature=0, max_tokens=20)
    (one,) = llm.chat(messages, params, use_tqdm=False)
    assert "Paris" in one.text
    rendered = tokenizer.apply_chat_template(messages, add_generation_prompt=True)["input_ids"]
    assert one.prompt_token_ids == rendered
    both = llm.chat([messages, messages], params, use_tqdm=False)
    assert [completion.text for completion in both] == [one.text] * 2
    assert "".join(delta.text for delta in llm.stream(messages, params)) == one.text
    with pytest.raises(ValueError, match="messages"):
        llm.chat([{"role": "user"}], params)


def test_n_answers_follow_one_another(llm):
    params = SamplingParams(n=3, temperature=2.0, seed=1, max_tokens=6, ignore_eos=True)
    completions = llm.generate(["Hello", "World"], params, use_tqdm=False)
    assert [completion.index for completion in completions] == [0, 1, 2] * 2
    assert len({completion.text for completion in completions}) == 6


def test_results_carry_timing_cache_hits_and_logprobs(llm):
    prompt = "word " * 100
    params = SamplingParams(
        temperature=0, max_tokens=5, ignore_eos=True, logprobs=2, cache_salt="timing"
    )
    (first,) = llm.generate(prompt, params, use_tqdm=False)
    (second,) = llm.generate(prompt, params, use_tqdm=False)
    assert (first.num_cached_tokens, second.num_cached_tokens) == (0, 64)
    assert first.token_ids == second.token_ids
    timing = second.timing
    assert 0 <= timing.queued_s <= timing.ttft_s <= timing.e2e_s
    assert timing.token_times_s == sorted(timing.token_times_s)
    assert len(timing.token_times_s) == len(second.logprobs) == 5
    assert timing.tpot_s > 0
    assert all(item.rank == 1 for item in second.logprobs)
    assert [item.top_ids[0] for item in second.logprobs] == second.token_ids


@pytest.mark.parametrize("word", ["Paris", " Paris"])
def test_bad_words_in_every_spelling(llm, word):
    prompt = "The capital of France is the city of"
    plain = llm.generate(prompt, GREEDY, use_tqdm=False)[0]
    assert " Paris" in plain.text
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, bad_words=[word])
    assert "Paris" not in llm.generate(prompt, params, use_tqdm=False)[0].text


def test_more_prompts_than_the_queue_holds(smollm2):
    llm = LLM(str(smollm2), num_blocks=20, max_num_seqs=2, max_num_waiting=2)
    params = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True)
    assert len(llm.generate(["a"] * 9, params, use_tqdm=False)) == 9
    with pytest.raises(ValueError, match="max_num_waiting"):
        llm.generate("a", SamplingParams(n=3), use_tqdm=False)
    assert not llm.engine.has_unfinished_requests()
