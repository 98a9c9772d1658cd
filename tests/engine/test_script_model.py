"""The script model says what is written, to this engine and to transformers."""

import pytest
from script_model import BYTE_LEVEL, EOS, METASPACE, TURN_END, Script, single_bytes

from pagestream import LLM, SamplingParams

COLOURS = (" red", " green", " blue")
GREEDY = SamplingParams(temperature=0, max_tokens=12)


@pytest.fixture(scope="module", params=[BYTE_LEVEL, METASPACE])
def model(request, tmp_path_factory):
    script = Script(request.param)
    script.chain("repeats", " a", " a", "\n", " a", *single_bytes("é"), TURN_END)
    script.chain("second best", {" a": 20.0, " b": 10.0}, {EOS: 30.0, "!": 20.0}, "?")
    script.chain("colours", dict.fromkeys(COLOURS, 30.0), loop=True)
    return script.write(tmp_path_factory.mktemp(request.param), chat_template="")


@pytest.fixture(scope="module")
def llm(model):
    return LLM(str(model.directory), num_blocks=8, max_num_seqs=4, max_model_len=64)


def say(llm, model, name, params=GREEDY):
    (completion,) = llm.generate(model.prompt(name), params, use_tqdm=False)
    return completion


def test_greedy_decoding_walks_the_chain(llm, model):
    completion = say(llm, model, "repeats")
    assert completion.text == model.text("repeats") == " a a\n aé"
    assert list(completion.token_ids) == model.ids("repeats")
    assert str(completion.finish_reason) == "stop"


def test_transformers_walks_it_too(model):
    import torch
    from transformers import LlamaForCausalLM

    reference = LlamaForCausalLM.from_pretrained(model.directory)
    prompt = torch.tensor([model.prompt_token_ids("repeats")])
    output = reference.generate(prompt, max_new_tokens=12, do_sample=False, pad_token_id=0)
    assert output[0, prompt.shape[1] :].tolist() == model.ids("repeats")


def test_a_choice_has_a_second_best_that_leads_on(llm, model):
    assert say(llm, model, "second best").text == " a"
    first, second = model.chains["second best"][:2]
    params = SamplingParams(temperature=0, logit_bias={first[0]: -100.0}, min_tokens=2)
    completion = say(llm, model, "second best", params)
    assert completion.token_ids[:3] == [first[1], second[1], model.chains["second best"][2][0]]
    assert completion.text == " b!?"


def test_equal_successors_are_drawn_alike(llm, model):
    drawn = [
        say(llm, model, "colours", SamplingParams(temperature=1, max_tokens=12, seed=seed)).text
        for seed in range(20)
    ]
    assert len(set(drawn)) == 20
    counts = ["".join(drawn).count(colour) for colour in COLOURS]
    assert sum(counts) == 240
    assert min(counts) > 50


def test_what_cannot_be_said_is_refused():
    script = Script(METASPACE)
    with pytest.raises(ValueError, match="no piece"):
        script.chain("a", b"\xf0\x9f")
    script.chain("b", EOS, "more")
    with pytest.raises(ValueError, match="two different"):
        script.chain("c", EOS, "else")
