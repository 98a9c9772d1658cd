"""Every sampling control against transformers' logits processors on random logits, and draws
against the exact distribution."""

import dataclasses

import pytest
import torch
import transformers as hf

from pagestream.config import ModelConfig
from pagestream.sampling.row_tokens import RowTokens
from pagestream.sampling.sampler import NOTHING_ALLOWED, Sampler
from pagestream.sampling.sampling_states import SamplingStates
from pagestream.sampling_params import SamplingParams
from pagestream.scheduler.scheduler_output import NewRequest

VOCAB = 211
ROWS = 40
MODEL = ModelConfig(
    **{
        **{item.name: 1 for item in dataclasses.fields(ModelConfig)},
        "architecture": "x",
        "vocab_size": VOCAB,
        "temperature": None,
        "top_k": None,
        "top_p": None,
    }
)


class Bench:
    """Rows with random prompts and outputs, all with the same parameters."""

    def __init__(self, params, num_rows=ROWS, stop_token_ids=(), seed_step=1):
        torch.manual_seed(0)
        self.logits = torch.randn(num_rows, VOCAB) * 4
        self.prompts = torch.randint(0, VOCAB, (num_rows, 12))
        self.outputs = torch.randint(0, VOCAB, (num_rows, 9))
        self.token_ids = torch.cat((self.prompts, self.outputs), 1)
        self.states = SamplingStates(num_rows, MODEL, torch.device("cpu"))
        requests = [
            NewRequest(
                request_id=str(row),
                token_ids=self.token_ids[row].tolist(),
                num_prompt_tokens=12,
                num_computed_tokens=0,
                sampling_params=params,
                stop_token_ids=frozenset(stop_token_ids),
                seed=row * seed_step,
            )
            for row in range(num_rows)
        ]
        self.states.add(list(enumerate(requests)))
        padded = torch.nn.functional.pad(self.token_ids, (0, 3)).to(torch.int32)
        self.rows = RowTokens(list(range(num_rows)), torch.full((num_rows,), 21), padded)

    def sample(self, bitmask=None):
        return Sampler().sample(self.logits.clone(), self.states, self.rows, bitmask)

    def expected(self, *processors, ids=None):
        scores = self.logits.clone()
        for processor in processors:
            scores = processor(self.token_ids if ids is None else ids, scores)
        return scores


def greedy(**controls):
    return SamplingParams(temperature=0, **controls)


@pytest.mark.parametrize("penalty", [0.5, 1.3, 2.0])
def test_repetition_penalty(penalty):
    bench = Bench(greedy(repetition_penalty=penalty))
    expected = bench.expected(hf.RepetitionPenaltyLogitsProcessor(penalty))
    assert bench.sample().token_ids.equal(expected.argmax(-1))


def test_presence_and_frequency_penalties_count_the_output_alone():
    bench = Bench(greedy(presence_penalty=1.5, frequency_penalty=1.1))
    counts = torch.stack([row.bincount(minlength=VOCAB) for row in bench.outputs])
    expected = bench.logits - 1.5 * (counts > 0) - 1.1 * counts
    assert bench.sample().token_ids.equal(expected.argmax(-1))


def test_penalties_follow_what_is_drawn():
    bench = Bench(greedy(frequency_penalty=2.0))
    first = bench.sample().token_ids
    for _ in range(9):
        bench.states.count_tokens(bench.rows.state_rows, first)
    assert not (bench.sample().token_ids == first).any()


def test_logit_bias():
    bias = {5: 100.0, 7: 3.5, 9: -100.0}
    bench = Bench(greedy(logit_bias={5: 2.0, 7: 3.5, 9: -100.0}))
    expected = bench.expected(hf.SequenceBiasLogitsProcessor({(5,): 2.0, (7,): 3.5, (9,): -100.0}))
    assert bench.sample().token_ids.equal(expected.argmax(-1))
    assert (Bench(greedy(logit_bias=bias)).sample().token_ids == 5).all()


def test_bad_words_single_and_multi_token():
    bench = Bench(greedy())
    best = bench.logits.argmax(-1)
    before = bench.token_ids[:, -2:]
    single = [[int(best[0])], [int(best[1])]]
    multi = [[*before[row].tolist(), int(best[row])] for row in range(2, ROWS)]
    words = single + multi + [[int(before[0, 1]) + 1, 3]]
    processor = hf.NoBadWordsLogitsProcessor(words, eos_token_id=VOCAB - 1)
    bench = Bench(greedy(bad_words_token_ids=words))
    drawn = bench.sample().token_ids
    assert drawn.equal(bench.expected(processor).argmax(-1))
    assert not (drawn == best).any()


def test_bad_ending_longer_than_the_sequence_never_matches():
    bench = Bench(greedy(bad_words_token_ids=[[0] * 30 + [int(i)] for i in range(VOCAB)]))
    assert bench.sample().token_ids.equal(bench.logits.argmax(-1))


def test_allowed_token_ids():
    allowed = [3, 50, 51, 200]
    drawn = Bench(greedy(allowed_token_ids=allowed)).sample().token_ids
    assert set(drawn.tolist()) <= set(allowed)
    bench = Bench(greedy(allowed_token_ids=allowed, bad_words_token_ids=[[3], [50]]))
    assert set(bench.sample().token_ids.tolist()) <= {51, 200}


def test_min_tokens():
    stops = list(range(0, VOCAB, 2))
    bench = Bench(greedy(min_tokens=10), stop_token_ids=stops)
    processor = hf.MinNewTokensLengthLogitsProcessor(12, 10, stops)
    assert bench.sample().token_ids.equal(bench.expected(processor).argmax(-1))
    bench.states.count_tokens(bench.rows.state_rows, bench.sample().token_ids)
    assert bench.sample().token_ids.equal(bench.logits.argmax(-1))


def test_controls_that_leave_nothing_draw_nothing():
    bench = Bench(greedy(allowed_token_ids=[3, 4], bad_words_token_ids=[[3], [4]]))
    assert (bench.sample().token_ids == NOTHING_ALLOWED).all()
    drawn = Bench(SamplingParams(allowed_token_ids=[3], bad_words_token_ids=[[3]], logprobs=1))
    output = drawn.sample()
    assert (output.token_ids == NOTHING_ALLOWED).all()
    assert output.logprobs is not None


def test_min_tokens_yields_where_only_a_stop_is_left():
    bench = Bench(greedy(allowed_token_ids=[7], min_tokens=20), stop_token_ids=[7])
    assert (bench.sample().token_ids == 7).all()


def test_bitmask():
    bench = Bench(greedy())
    bitmask = torch.randint(-(2**31), 2**31 - 1, (ROWS, -(-VOCAB // 32)), dtype=torch.int32)
    bits = (bitmask[:, :, None] >> torch.arange(32)) & 1
    forbidden = ~bits.flatten(1)[:, :VOCAB].bool()
    expected = bench.logits.masked_fill(forbidden, -torch.inf)
    assert bench.sample(bitmask).token_ids.equal(expected.argmax(-1))


def test_processors_combine_in_the_documented_order():
    controls = {
        "logit_bias": {8: 5.0, 9: 5.0},
        "bad_words_token_ids": [[8]],
        "repetition_penalty": 1.4,
        "frequency_penalty": 0.5,
    }
    bench = Bench(greedy(**controls))
    counts = torch.stack([row.bincount(minlength=VOCAB) for row in bench.outputs])
    scores = bench.expected(
        hf.NoBadWordsLogitsProcessor([[8]], eos_token_id=VOCAB - 1),
        hf.SequenceBiasLogitsProcessor({(8,): 5.0, (9,): 5.0}),
        hf.RepetitionPenaltyLogitsProcessor(1.4),
    )
    assert bench.sample().token_ids.equal((scores - 0.5 * counts).argmax(-1))


DISTRIBUTIONS = [
    {},
    {"temperature": 0.7},
    {"temperature": 3.0},
    {"top_k": 5},
    {"top_p": 0.6},
    {"min_p": 0.1},
    {"temperature": 1.7, "min_p": 0.02, "top_k": 12, "top_p": 0.9},
    {"temperature": 0.8, "repetition_penalty": 1.2, "top_p": 0.95},
]


@pytest.mark.parametrize("controls", DISTRIBUTIONS, ids=str)
def test_draws_follow_the_exact_distribution(controls):
    """Chi-square at 0.1 % over 30,000 draws of one row; cells below 5 expected are pooled."""
    count = 30_000
    bench = Bench(SamplingParams(**controls), num_rows=1)
    bench.logits *= 0.4
    scores = bench.expected(
        hf.RepetitionPenaltyLogitsProcessor(float(controls.get("repetition_penalty", 1.0))),
        hf.TemperatureLogitsWarper(float(controls.get("temperature", 1.0))),
        hf.MinPLogitsWarper(controls.get("min_p", 0.0)),
        hf.TopKLogitsWarper(controls.get("top_k", VOCAB)),
        *([hf.TopPLogitsWarper(controls["top_p"])] if "top_p" in controls else []),
    )
    exact = scores[0].double().softmax(-1)
    drawn = torch.empty(count, dtype=torch.int64)
    rows = RowTokens([0] * 1000, torch.zeros(1000, dtype=torch.int64), bench.rows.token_ids)
    for start in range(0, count, 1000):
        shifted = dataclasses.replace(rows, positions=torch.arange(start, start + 1000))
        logits = bench.logits.expand(1000, -1).clone()
        drawn[start : start + 1000] = Sampler().sample(logits, bench.states, shifted).token_ids
    seen = drawn.bincount(minlength=VOCAB).double()
    assert seen[exact == 0].sum() == 0
    expected = exact * count
    large = expected >= 5
    cells = torch.stack((seen, expected))[:, large]
    pooled = torch.stack((seen, expected))[:, ~large].sum(1, keepdim=True)
    cells = torch.cat((cells, pooled), 1) if pooled[1] > 0 else cells
    statistic = ((cells[0] - cells[1]) ** 2 / cells[1]).sum().item()
    freedom = cells.shape[1] - 1
    assert freedom >= 2
    # Wilson-Hilferty: the 99.9 % quantile of chi-square.
    limit = freedom * (1 - 2 / (9 * freedom) + 3.09 * (2 / (9 * freedom)) ** 0.5) ** 3
    assert statistic < limit


def test_draws_do_not_depend_on_the_batch():
    params = SamplingParams(top_k=50, top_p=0.9, min_p=0.01, repetition_penalty=1.1)
    together = Bench(params, seed_step=77).sample().token_ids
    alone = []
    for row in range(ROWS):
        bench = Bench(params, seed_step=77)
        rows = RowTokens([row], bench.rows.positions[:1], bench.rows.token_ids)
        logits = bench.logits[row : row + 1].clone()
        alone.append(Sampler().sample(logits, bench.states, rows).token_ids.item())
    assert together.tolist() == alone


def test_logprobs_are_the_models_own_whatever_the_processors():
    params = greedy(logprobs=3, logit_bias={5: 100.0}, repetition_penalty=2.0)
    bench = Bench(params)
    output = bench.sample()
    exact = bench.logits.log_softmax(-1)
    found = output.logprobs
    torch.testing.assert_close(found.logprobs, exact[:, 5])
    torch.testing.assert_close(found.top_logprobs, exact.topk(3).values)
    assert found.ranks.tolist() == ((exact > exact[:, 5:6]).sum(-1) + 1).tolist()


def test_only_rows_that_ask_get_logprobs():
    bench = Bench(greedy())
    assert bench.sample().logprobs is None
    other = NewRequest("x", [1, 2], 1, 0, greedy(logprobs=0), frozenset(), 0)
    bench.states.remove(4)
    bench.states.add([(4, other)])
    output = bench.sample()
    assert output.logprob_rows == [4]
    assert output.logprobs.top_ids.shape == (1, 0)
