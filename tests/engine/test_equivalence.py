"""No scheduling decision changes a greedy answer (float32).

Every prompt's answer, alone and with nothing shared, is the reference; every combination of the
factors below has to repeat it token by token. Where our own two best logprobs are closer than TIE
either token is right: the reference's is then forced, and the comparison goes on after it. The
count of such steps is printed. `make equivalence` runs the full product; without `long`, a tiny
model runs combinations that cover all pairs of factor values.
"""

from __future__ import annotations

import dataclasses
import itertools
import random
import statistics
import time
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from pagestream.cli.golden import compare_ids, load_golden
from pagestream.config import EngineConfig
from pagestream.engine.llm_engine import LLMEngine
from pagestream.sampling_params import SamplingParams

TIE = 1e-4
BLOCK_SIZE = 16
ENGINE_FACTORS = {
    "max_num_batched_tokens": (16, 64, 512),
    "enable_prefix_caching": (True, False),
    "blocks": ("ample", "few"),
    "overlap_scheduling": ("off", "on"),
}
FACTORS = {
    **ENGINE_FACTORS,
    "order": ("given", "reversed", "shuffled"),
    "arrivals": ("at once", "every third step", "random"),
}
GOLDEN = Path(__file__).parents[1] / "data/smollm2_greedy.json"


@dataclass
class Subject:
    """A model, its prompts, and their answers when each runs alone."""

    model: Path
    prompts: list[list[int]]
    num_tokens: int
    few_blocks: int
    """Enough for the longest request alone, too few for all."""
    answers: list[list[int]] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)
    """Between the two best logprobs, for each token of the answers."""

    def engine(self, **options) -> LLMEngine:
        values = {"num_blocks": 400, "block_size": BLOCK_SIZE, "num_threads": 1, **options}
        return LLMEngine(EngineConfig(str(self.model), dtype="float32", **values))

    def answer_alone(self) -> None:
        engine = self.engine(max_num_seqs=1, enable_prefix_caching=False)
        for prompt in self.prompts:
            (found,) = generate(engine, [prompt], [self.num_tokens], [0], [0])
            self.answers.append([token_id for token_id, _ in found])
            self.gaps += [gap_of(logprobs) for _, logprobs in found]


@dataclass
class Totals:
    combinations: int = 0
    tokens: int = 0
    forced: int = 0
    preemptions: int = 0
    prefix_hits: int = 0
    differences: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        return (
            f"{self.combinations} combinations, {self.tokens} tokens compared, "
            f"{len(self.differences)} differences, {self.forced} forced steps "
            f"({self.preemptions} preemptions, {self.prefix_hits} tokens from the prefix cache)"
        )

    def __iadd__(self, other: Totals) -> Totals:
        for item in dataclasses.fields(self):
            setattr(self, item.name, getattr(self, item.name) + getattr(other, item.name))
        return self


def generate(engine, prompts, num_tokens, order, arrivals):
    """(token id, its logprobs) of every answer; ``arrivals``: the step before which each of
    ``order`` comes."""
    coming = sorted(zip(arrivals, order, strict=True), key=lambda item: item[0])
    found = [[] for _ in prompts]
    step = 0
    while coming or engine.has_unfinished_requests():
        while coming and coming[0][0] <= step:
            _, index = coming.pop(0)
            params = SamplingParams(
                temperature=0, max_tokens=num_tokens[index], ignore_eos=True, logprobs=2
            )
            engine.add_request(str(index), prompts[index], params)
        for output in engine.step():
            found[int(output.request_id)] += zip(output.token_ids, output.logprobs, strict=True)
        step += 1
    assert engine.stats.kv_blocks_free == engine.stats.kv_blocks_total
    return found


def schedule(case, count, generator):
    """The order of ``count`` prompts, and when each arrives."""
    order = list(range(count))
    if case["order"] == "reversed":
        order.reverse()
    elif case["order"] == "shuffled":
        generator.shuffle(order)
    arrivals = {
        "at once": [0] * count,
        "every third step": [3 * index for index in range(count)],
        "random": sorted(generator.randrange(4 * count) for _ in order),
    }
    return order, arrivals[case["arrivals"]]


def compare(engine, subject, starts, case, generator, totals):
    """Have each answer continued from ``starts`` tokens on, and compare with the reference."""
    known = dict(enumerate(starts))  # tokens of the reference that are given
    while known:
        indices = list(known)
        prompts = [subject.prompts[i] + subject.answers[i][: known[i]] for i in indices]
        left = [subject.num_tokens - known[i] for i in indices]
        order, arrivals = schedule(case, len(indices), generator)
        found = generate(engine, prompts, left, order, arrivals)
        known, before = {}, known
        for index, answer in zip(indices, found, strict=True):
            expected = subject.answers[index][before[index] :]
            assert len(answer) == len(expected)
            step = first_difference([token_id for token_id, _ in answer], expected)
            totals.tokens += step
            if step == len(expected):
                continue
            token_id, logprobs = answer[step]
            if is_tie(token_id, logprobs, expected[step]):
                totals.forced += 1
                if step + 1 < len(expected):
                    known[index] = before[index] + step + 1
            else:
                totals.differences.append(
                    f"{case}: prompt {index}, token {before[index] + step}: {token_id} instead of "
                    f"{expected[step]}, logprobs {logprobs}"
                )


def first_difference(answer, expected):
    pairs = zip(answer, expected, strict=True)
    return next((i for i, (got, want) in enumerate(pairs) if got != want), len(expected))


def gap_of(logprobs):
    return logprobs.top_logprobs[0] - logprobs.top_logprobs[1]


def is_tie(token_id, logprobs, expected):
    return gap_of(logprobs) < TIE and {token_id, expected} == set(logprobs.top_ids)


def check(subject, case, totals):
    """All prompts, then all again with half of their answers as a further part of the prompt,
    so that with the prefix cache on there is something to hit."""
    engine = subject.engine(
        **{name: case[name] for name in ENGINE_FACTORS if name != "blocks"},
        **({"num_blocks": subject.few_blocks} if case["blocks"] == "few" else {}),
    )
    generator = random.Random(str(case))
    count = len(subject.prompts)
    for start in (0, subject.num_tokens // 2):
        compare(engine, subject, [start] * count, case, generator, totals)
    stats = engine.stats
    assert (stats.preemptions_total > 0) == (case["blocks"] == "few"), stats
    assert (stats.prefix_hits_total > 0) == case["enable_prefix_caching"], stats
    totals.combinations += 1
    totals.preemptions += stats.preemptions_total
    totals.prefix_hits += stats.prefix_hits_total


def check_product(subject, orders=FACTORS["order"], arrivals=FACTORS["arrivals"]):
    """The full product, a line for each engine configuration."""
    totals = Totals()
    for values in itertools.product(*ENGINE_FACTORS.values()):
        started = time.monotonic()
        part = Totals()
        for order, arrival in itertools.product(orders, arrivals):
            case = dict(zip(FACTORS, (*values, order, arrival), strict=True))
            check(subject, case, part)
        budget, caching, blocks, overlap = values
        print(
            f"budget {budget:3}, prefix cache {'on,' if caching else 'off,':4} {blocks:5} blocks, "
            f"overlap {overlap + ':':4} {part}, {time.monotonic() - started:.0f} s",
            flush=True,
        )
        totals += part
    print(f"in all: {totals}; {sum(gap < TIE for gap in subject.gaps)} reference steps are ties")
    assert not totals.differences, "\n".join(totals.differences)


def pairwise(factors):
    """Few combinations in which every two values of different factors meet."""
    candidates = [dict(zip(factors, v, strict=True)) for v in itertools.product(*factors.values())]
    missing = set().union(*map(pairs_of, candidates))
    chosen = []
    while missing:
        best = max(candidates, key=lambda case: len(missing & pairs_of(case)))
        chosen.append(best)
        missing -= pairs_of(best)
    return chosen


def pairs_of(case):
    return set(itertools.combinations(case.items(), 2))


def make_random_model(directory: Path, seed: int) -> Path:
    """A tiny Llama whose two best logits are about 2 apart at half of the positions."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=512,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=512,
        eos_token_id=2,
        tie_word_embeddings=False,
    )
    model = LlamaForCausalLM(config).to(torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(8)
        best = model(torch.randint(3, 512, (4, 128))).logits.topk(2).values
        model.lm_head.weight.mul_(2 / (best[..., 0] - best[..., 1]).median())
    model.save_pretrained(directory)
    return directory


def make_random_subject(directory: Path, seed: int) -> Subject:
    """Prompts of lengths around the block size. Some begin alike, two are the same, two have
    blocks in common that follow different ones."""
    generator = random.Random(seed)

    def draw(length):
        return [generator.randrange(3, 512) for _ in range(length)]

    shared = draw(40)
    prompts = [draw(length) for length in (1, 2, 15, 16, 17, 33, 64, 100)]
    prompts += [shared + draw(length) for length in (1, 8, 30)] + [shared.copy(), shared.copy()]
    prompts += [draw(BLOCK_SIZE) + shared[BLOCK_SIZE:], draw(BLOCK_SIZE) * 3]
    # The longest needs 100 + 24 tokens, 8 blocks.
    subject = Subject(make_random_model(directory, seed), prompts, num_tokens=24, few_blocks=12)
    subject.answer_alone()
    return subject


@pytest.fixture(scope="module", params=[0, 1])
def random_subject(request, tmp_path_factory):
    return make_random_subject(tmp_path_factory.mktemp("random-llama"), request.param)


def golden_subject(model, names, num_tokens, few_blocks):
    """The answers are also compared with the golden ones, which transformers gave."""
    golden = {prompt.name: prompt for prompt in load_golden(GOLDEN)}
    prompts = [list(golden[name].prompt_token_ids) for name in names]
    subject = Subject(model, prompts, num_tokens, few_blocks)
    subject.answer_alone()
    for name, answer in zip(names, subject.answers, strict=True):
        prompt = golden[name]
        prompt = dataclasses.replace(prompt, output_ids=prompt.output_ids[:num_tokens])
        assert compare_ids(prompt, answer).mismatch == ""
    return subject


def test_random_reference_is_right_and_decided(random_subject):
    """One forward pass of transformers over prompt and answer picks the same tokens."""
    import torch
    from transformers import LlamaForCausalLM

    assert statistics.median(random_subject.gaps) > 1
    assert min(random_subject.gaps) > 10 * TIE, "take another seed: transformers may differ here"
    model = LlamaForCausalLM.from_pretrained(random_subject.model, dtype=torch.float32)
    for prompt, answer in zip(random_subject.prompts, random_subject.answers, strict=True):
        with torch.inference_mode():
            best = model(torch.tensor([prompt + answer])).logits[0].argmax(-1).tolist()
        assert best[len(prompt) - 1 : -1] == answer


def test_random_model_looks_far_back(random_subject):
    """Otherwise wrong blocks or positions could go unnoticed."""
    engine = random_subject.engine(enable_prefix_caching=False)
    prompts = [[prompt[0] ^ 1, *prompt[1:]] for prompt in random_subject.prompts]
    count = len(prompts)
    found = generate(
        engine, prompts, [random_subject.num_tokens] * count, range(count), [0] * count
    )
    changed = [[token_id for token_id, _ in answer] for answer in found]
    same = [i for i in range(count) if changed[i] == random_subject.answers[i]]
    assert same == []


def test_pairwise_covers_every_pair():
    cases = pairwise(FACTORS)
    met = set().union(*map(pairs_of, cases))
    for (one, values), (other, others) in itertools.combinations(FACTORS.items(), 2):
        for value, other_value in itertools.product(values, others):
            assert ((one, value), (other, other_value)) in met
    assert len(cases) <= 15


def test_a_difference_is_reported_and_a_tie_is_forced(random_subject, monkeypatch):
    """With a reference that takes the second best token once, and goes on from there."""
    index, step = 5, 3
    engine = random_subject.engine()
    prompt = random_subject.prompts[index] + random_subject.answers[index][:step]
    ((_, logprobs),) = generate(engine, [prompt], [1], [0], [0])[0]
    second = logprobs.top_ids[1]
    left = random_subject.num_tokens - step - 1
    (rest,) = generate(engine, [[*prompt, second]], [left], [0], [0])
    answers = list(map(list, random_subject.answers))
    answers[index][step:] = [second, *(token_id for token_id, _ in rest)]
    other = dataclasses.replace(random_subject, answers=answers)
    case = pairwise(FACTORS)[0]

    strict = Totals()
    check(other, case, strict)
    (difference,) = strict.differences
    assert f"prompt {index}, token {step}: " in difference
    assert strict.forced == 0

    monkeypatch.setattr(f"{__name__}.TIE", 1000.0)
    lenient = Totals()
    check(other, case, lenient)
    assert lenient.differences == []
    assert lenient.forced == 1
    assert lenient.tokens == sum(map(len, answers)) * 3 // 2 - 1


@pytest.mark.parametrize("number", range(len(pairwise(FACTORS))))
def test_pairs(random_subject, number):
    totals = Totals()
    check(random_subject, pairwise(FACTORS)[number], totals)
    print(totals)
    assert totals.differences == []


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_full_product_on_a_random_model(random_subject):
    check_product(random_subject)


@pytest.mark.long
@pytest.mark.smollm2
@pytest.mark.timeout(1800)
def test_full_product_on_golden_prompts(smollm2):
    names = ("chat_capital", "chat_sys_pirate", "chat_multi_turn", "chat_unicode", "raw_short",
             "raw_list")  # fmt: skip
    subject = golden_subject(smollm2, names, num_tokens=16, few_blocks=7)
    check_product(subject, orders=("given", "shuffled"), arrivals=("at once", "random"))


@pytest.mark.long
@pytest.mark.smollm2
@pytest.mark.timeout(1800)
def test_every_engine_configuration_on_a_long_golden_prompt(smollm2):
    """The few blocks hold all prompts, but not their answers: the long one loses its place."""
    names = ("chat_capital", "raw_list", "chat_unicode", "raw_long_code")
    subject = golden_subject(smollm2, names, num_tokens=20, few_blocks=52)
    check_product(subject, orders=("given",), arrivals=("at once",))
