"""The engine on a tiny random model: token for token what a naive full recompute gives."""

import dataclasses
import random

import pytest
import torch

from pagestream.config import EngineConfig
from pagestream.engine.llm_engine import LLMEngine
from pagestream.sampling_params import SamplingParams

NUM_TOKENS = 24
TOLERANCE = 1e-3
"""Of logprobs: the tiny model's logits are in the hundreds, where float32 is this coarse."""


@pytest.fixture(scope="module")
def prompts():
    generator = random.Random(1)
    lengths = [1, 2, 15, 16, 17, 40, 63, 64, 65, 100]
    return [[generator.randrange(3, 256) for _ in range(length)] for length in lengths]


@pytest.fixture(scope="module")
def naive(tiny_model, prompts):
    """Greedy continuations by transformers, recomputing everything for every token."""
    from transformers import LlamaForCausalLM

    model = LlamaForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    answers, gaps = [], []
    with torch.inference_mode():
        for prompt in prompts:
            ids = list(prompt)
            for _ in range(NUM_TOKENS):
                best = model(torch.tensor([ids])).logits[0, -1].topk(2)
                gaps.append((best.values[0] - best.values[1]).item())
                ids.append(int(best.indices[0]))
            answers.append(ids[len(prompt) :])
    assert sorted(gaps)[len(gaps) // 2] > 1, "the model is too undecided to compare by token"
    assert min(gaps) > 1e-4, "a greedy tie: pick another seed for the model"
    return answers


def run(engine, prompts, params=None, order=None, arrivals=None):
    """Answers by prompt; ``arrivals``: the step before which each prompt is added."""
    params = params or SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
    order = list(order or range(len(prompts)))
    arrivals = dict(zip(order, arrivals or [0] * len(order), strict=True))
    answers, finished, step = {index: [] for index in order}, [], 0
    while arrivals or engine.has_unfinished_requests():
        for index in [index for index, when in arrivals.items() if when <= step]:
            engine.add_request(str(index), prompts[index], params)
            del arrivals[index]
        for output in engine.step():
            answers[int(output.request_id)] += output.token_ids
            finished += [output.request_id] if output.finish_reason is not None else []
        step += 1
    assert sorted(map(int, finished)) == sorted(order)
    assert engine.stats.kv_blocks_free == engine.stats.kv_blocks_total
    return [answers[index] for index in range(len(prompts))]


def make_engine(tiny_model, **options):
    values = {"num_blocks": 200, "block_size": 16, "max_num_batched_tokens": 64, "num_threads": 1}
    return LLMEngine(EngineConfig(str(tiny_model), **{**values, **options}))


@pytest.mark.parametrize("budget", [1, 7, 16, 64, 512])
@pytest.mark.parametrize("block_size", [16, 32, 64])
def test_any_budget_and_block_size(tiny_model, prompts, naive, budget, block_size):
    engine = make_engine(tiny_model, max_num_batched_tokens=budget, block_size=block_size)
    assert run(engine, prompts) == naive


@pytest.mark.parametrize("budget", [5, 64])
def test_preemption_changes_no_token(tiny_model, prompts, naive, budget):
    engine = make_engine(tiny_model, num_blocks=12, max_num_batched_tokens=budget)
    assert run(engine, prompts) == naive
    assert engine.stats.preemptions_total > 0


@pytest.mark.parametrize("options", [{}, {"num_blocks": 12}, {"max_num_batched_tokens": 5}])
@pytest.mark.parametrize("caching", [True, False])
def test_overlap_changes_no_token(tiny_model, prompts, naive, options, caching):
    engine = make_engine(
        tiny_model, overlap_scheduling="on", enable_prefix_caching=caching, **options
    )
    assert run(engine, prompts) == naive
    assert run(engine, prompts) == naive


def test_prefix_hits_change_no_token_and_are_reported(tiny_model, prompts, naive):
    engine = make_engine(tiny_model)
    assert run(engine, prompts) == naive
    before = engine.stats.prefix_hits_total
    assert run(engine, prompts) == naive
    expected = sum((len(prompt) - 1) // 16 * 16 for prompt in prompts)
    assert engine.stats.prefix_hits_total - before == expected
    turn = prompts[5] + naive[5] + [9, 9]
    engine.add_request("next turn", turn, SamplingParams(temperature=0, max_tokens=2))
    (first,) = [output for output in engine.step() if output.token_ids]
    assert first.num_cached_tokens == (len(turn) - 3) // 16 * 16


def test_deadline_ends_a_running_request_with_what_it_has(tiny_model, prompts):
    engine = make_engine(tiny_model)
    params = SamplingParams(deadline_ms=1, ignore_eos=True, max_tokens=400)
    engine.add_request("late", prompts[0], params)
    engine.add_request("fine", prompts[1], SamplingParams(max_tokens=3, ignore_eos=True))
    outputs = []
    while engine.has_unfinished_requests():
        outputs += engine.step()
    last = {output.request_id: output for output in outputs}
    assert (str(last["late"].finish_reason), last["late"].stop_reason) == ("abort", "deadline")
    assert str(last["fine"].finish_reason) == "length"
    assert engine.stats.expired_total == 1
    assert engine.stats.kv_blocks_free == engine.stats.kv_blocks_total


@pytest.mark.parametrize("seed", range(4))
def test_any_order_and_time_of_arrival(tiny_model, prompts, naive, seed):
    generator = random.Random(seed)
    order = generator.sample(range(len(prompts)), len(prompts))
    arrivals = sorted(generator.randrange(60) for _ in prompts)
    engine = make_engine(tiny_model, max_num_seqs=4, num_blocks=20)
    assert run(engine, prompts, order=order, arrivals=arrivals) == naive


def test_alone_equals_together(tiny_model, prompts, naive):
    engine = make_engine(tiny_model)
    for prompt, answer in zip(prompts, naive, strict=True):
        assert run(engine, [prompt]) == [answer]


SEEDED = SamplingParams(temperature=1.5, top_k=40, top_p=0.95, seed=77, max_tokens=NUM_TOKENS)


def test_seeded_draws_do_not_depend_on_company_or_preemption(tiny_model, prompts):
    alone = [run(make_engine(tiny_model), [prompt], SEEDED)[0] for prompt in prompts[:4]]
    together = run(make_engine(tiny_model), prompts, SEEDED)
    squeezed_engine = make_engine(tiny_model, num_blocks=12)
    squeezed = run(squeezed_engine, prompts, SEEDED)
    assert squeezed_engine.stats.preemptions_total > 0
    assert together[:4] == alone
    assert squeezed == together


def test_without_a_seed_answers_differ(tiny_model, prompts):
    engine = make_engine(tiny_model)
    params = SamplingParams(temperature=5.0, max_tokens=NUM_TOKENS, ignore_eos=True)
    answers = run(engine, [prompts[5]] * 5, params)
    assert len({tuple(answer) for answer in answers}) == 5


@pytest.mark.parametrize(
    "params", [{"temperature": 0}, {"top_p": 0.0}, {"top_k": 1}, {"temperature": 1e-6}]
)
def test_every_spelling_of_greedy(tiny_model, prompts, naive, params):
    engine = make_engine(tiny_model)
    greedy = SamplingParams(**params, max_tokens=NUM_TOKENS, ignore_eos=True)
    assert run(engine, prompts, greedy) == naive


def test_stop_token_ends_where_the_naive_answer_has_it(tiny_model, prompts, naive):
    stop = naive[3][5]
    first = naive[3].index(stop)
    params = SamplingParams(
        temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True, stop_token_ids=[stop]
    )
    assert run(make_engine(tiny_model), [prompts[3]], params) == [naive[3][: first + 1]]


def test_min_tokens_masks_the_stop_token(tiny_model, prompts, naive):
    stop = naive[3][0]
    params = SamplingParams(
        temperature=0, max_tokens=10, ignore_eos=True, stop_token_ids=[stop], min_tokens=4
    )
    answer = run(make_engine(tiny_model), [prompts[3]], params)[0]
    assert stop not in answer[:4]
    assert len(answer) > 4


def test_ends_at_max_model_len_with_length(tiny_model, prompts):
    engine = make_engine(tiny_model, max_model_len=110)
    engine.add_request("a", prompts[-1], SamplingParams(temperature=0, ignore_eos=True))
    outputs = []
    while engine.has_unfinished_requests():
        outputs += engine.step()
    assert sum(len(output.token_ids) for output in outputs) == 10
    assert str(outputs[-1].finish_reason) == "length"


def test_pool_smaller_than_max_model_len_still_ends(tiny_model, prompts):
    engine = make_engine(tiny_model, num_blocks=4)
    engine.add_request("a", prompts[5], SamplingParams(temperature=0, ignore_eos=True))
    count = 0
    while engine.has_unfinished_requests():
        count += sum(len(output.token_ids) for output in engine.step())
    assert count == 64 - 40
    with pytest.raises(ValueError, match="KV cache holds 64"):
        engine.add_request("b", prompts[7], SamplingParams())


def test_abort_in_flight_reports_once_and_frees(tiny_model, prompts):
    engine = make_engine(tiny_model)
    engine.add_request("a", prompts[2], SamplingParams(ignore_eos=True))
    engine.step()
    engine.abort_request("a")
    engine.abort_request("a")
    outputs = engine.step()
    assert [str(output.finish_reason) for output in outputs] == ["abort"]
    assert not engine.has_unfinished_requests()
    assert engine.stats.kv_blocks_free == engine.stats.kv_blocks_total
    assert engine.stats.cancelled_total == 1


def test_warm_up_leaves_no_trace(tiny_model, prompts, naive):
    engine = make_engine(tiny_model)
    engine.warm_up()
    assert engine.stats.generated_tokens_total == engine.stats.prefix_queries_total == 0
    assert engine.stats.kv_blocks_cached == 0
    assert run(engine, prompts) == naive


def test_batches_are_counted(tiny_model, prompts):
    engine = make_engine(tiny_model, max_num_batched_tokens=512)
    for index, prompt in enumerate(prompts):
        engine.add_request(str(index), prompt, SamplingParams(max_tokens=3, ignore_eos=True))
    engine.step()
    assert engine.stats.step_batch_size == len(prompts)
    assert engine.stats.requests_running == len(prompts)
    assert engine.stats.generated_tokens_total == len(prompts)


def collect(engine, request_id, prompt, params):
    """All outputs of one request, by index."""
    engine.add_request(request_id, prompt, params)
    outputs = {}
    while engine.has_unfinished_requests():
        for output in engine.step():
            outputs.setdefault(output.index, []).append(output)
    return outputs


@pytest.mark.parametrize("options", [{}, {"max_num_batched_tokens": 7}, {"num_blocks": 12}])
def test_logprobs_equal_a_transformers_forward_pass(tiny_model, prompts, options):
    from transformers import LlamaForCausalLM

    model = LlamaForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    engine = make_engine(tiny_model, **options)
    params = SamplingParams(
        temperature=1.0, seed=3, max_tokens=8, ignore_eos=True, logprobs=4, prompt_logprobs=3
    )
    for index, prompt in enumerate(prompts):
        engine.add_request(str(index), prompt, params)
    outputs = {}
    while engine.has_unfinished_requests():
        for output in engine.step():
            outputs.setdefault(int(output.request_id), []).append(output)
    for index, prompt in enumerate(prompts):
        (first, *_) = outputs[index]
        tokens = [token for output in outputs[index] for token in output.token_ids]
        found = [item for output in outputs[index] for item in output.logprobs]
        assert len(found) == len(tokens) == 8
        assert first.prompt_logprobs[0] is None
        assert len(first.prompt_logprobs) == len(prompt)
        assert all(output.prompt_logprobs is None for output in outputs[index][1:])
        with torch.inference_mode():
            exact = model(torch.tensor([prompt + tokens])).logits[0].log_softmax(-1)
        rows = first.prompt_logprobs[1:] + found
        for position, (item, token) in enumerate(zip(rows, (prompt + tokens)[1:], strict=True)):
            row = exact[position]
            assert item.logprob == pytest.approx(row[token].item(), abs=TOLERANCE)
            k = 3 if position < len(prompt) - 1 else 4
            best = row.topk(k).values.tolist()
            assert item.top_logprobs == pytest.approx(best, abs=TOLERANCE)


def test_prompt_logprobs_read_nothing_from_the_prefix_cache(tiny_model, prompts):
    engine = make_engine(tiny_model)
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
    runs = [collect(engine, name, prompts[-1], params)[0][0] for name in "ab"]
    assert runs[1].num_cached_tokens == 0
    assert runs[0].prompt_logprobs == runs[1].prompt_logprobs
    assert collect(engine, "c", prompts[-1], SamplingParams(max_tokens=1))[0][0].num_cached_tokens


def test_n_answers_have_draws_of_their_own_from_one_seed(tiny_model, prompts):
    params = dataclasses.replace(SEEDED, n=5, temperature=4.0, top_k=0, top_p=1.0)
    answers = []
    for options in ({}, {"num_blocks": 12}, {"max_num_seqs": 2}):
        engine = make_engine(tiny_model, **options)
        outputs = collect(engine, "a", prompts[4], params)
        answers.append([[t for o in outputs[i] for t in o.token_ids] for i in range(5)])
        assert all(outputs[i][-1].finish_reason is not None for i in range(5))
    assert answers[0] == answers[1] == answers[2]
    assert len({tuple(answer) for answer in answers[0]}) == 5
    single = collect(engine, "b", prompts[4], dataclasses.replace(params, n=1))
    assert [t for o in single[0] for t in o.token_ids] == answers[0][0]


def test_one_of_n_can_be_aborted(tiny_model, prompts):
    engine = make_engine(tiny_model)
    engine.add_request("a", prompts[0], SamplingParams(n=3, max_tokens=20, ignore_eos=True))
    engine.step()
    engine.abort_request("a", 1)
    ended = {}
    while engine.has_unfinished_requests():
        for output in engine.step():
            if output.finish_reason is not None:
                ended[output.index] = str(output.finish_reason)
    assert ended == {0: "length", 1: "abort", 2: "length"}


def test_n_counts_against_the_queue(tiny_model, prompts):
    engine = make_engine(tiny_model, max_num_waiting=4)
    with pytest.raises(ValueError, match="5 came, and max_num_waiting is 4"):
        engine.add_request("a", prompts[0], SamplingParams(n=5))
    assert not engine.has_unfinished_requests()
    engine.add_request("a", prompts[0], SamplingParams(n=4, max_tokens=1))


def test_penalties_survive_a_preemption(tiny_model, prompts):
    params = SamplingParams(
        temperature=0, frequency_penalty=2.0, repetition_penalty=1.5, max_tokens=NUM_TOKENS
    )
    squeezed = make_engine(tiny_model, num_blocks=12)
    assert run(squeezed, prompts, params) == run(make_engine(tiny_model), prompts, params)
    assert squeezed.stats.preemptions_total > 0
