"""Recorded decode steps: the runner's code path on CUDA, with graphs replaced by direct calls.

A mix of requests must get the same tokens as from an engine that builds every step anew.
"""

import random
from dataclasses import replace

import pytest
import torch

from pagestream.config import EngineConfig
from pagestream.engine.llm_engine import LLMEngine
from pagestream.runner.decode_graphs import DecodeGraphs, DirectRecorder, graph_sizes
from pagestream.sampling_params import SamplingParams

GREEDY = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
KINDS = {
    "greedy": GREEDY,
    "drawn": replace(GREEDY, temperature=0.9, top_p=0.9, top_k=40, seed=7),
    "penalised": replace(GREEDY, repetition_penalty=1.3, frequency_penalty=0.5, logprobs=2),
    "short": replace(GREEDY, max_tokens=3, prompt_logprobs=1),
    "biased": replace(GREEDY, logit_bias={5: 3.0}, min_tokens=4, n=2, temperature=1.0, seed=3),
}


class CountingRecorder(DirectRecorder):
    def __init__(self):
        self.replays = 0

    def record(self, run):
        replay, filled = super().record(run)

        def counted():
            self.replays += 1
            replay()

        return counted, filled


def answers(tiny_model, recorder, **options):
    config = {"num_blocks": 40, "block_size": 16, "max_num_batched_tokens": 32, "max_num_seqs": 6}
    engine = LLMEngine(
        EngineConfig(str(tiny_model), num_threads=1, **{**config, **options}), recorder=recorder
    )
    generator = random.Random(3)
    found: dict[tuple[str, int], list[int]] = {}
    for step in range(1000):
        for index in [i for i in range(10) if i * 2 == step]:
            kind = list(KINDS)[index % len(KINDS)]
            prompt = [generator.randrange(3, 256) for _ in range(generator.randint(1, 70))]
            engine.add_request(f"{index} {kind}", prompt, KINDS[kind])
        for output in engine.step():
            found.setdefault((output.request_id, output.index), []).extend(output.token_ids)
        if step > 20 and not engine.has_unfinished_requests():
            break
    stats = engine.stats
    assert stats.kv_blocks_free == stats.kv_blocks_total
    return found, stats


@pytest.mark.parametrize("overlap", ["on", "off"])
@pytest.mark.parametrize("num_blocks", [40, 9])
def test_replayed_steps_change_no_token(tiny_model, overlap, num_blocks):
    options = {"overlap_scheduling": overlap, "num_blocks": num_blocks}
    recorder = CountingRecorder()
    replayed, stats = answers(tiny_model, recorder, **options)
    assert recorder.replays > 20
    assert (stats.preemptions_total > 0) == (num_blocks == 9)
    assert replayed == answers(tiny_model, None, **options)[0]


def test_padded_rows_are_nobodys():
    seen = []

    def run(rows):
        seen.append(rows.tolist())
        return torch.zeros(len(rows), 4), rows + 100

    graphs = DecodeGraphs([1, 4], run, 9, torch.device("cpu"), DirectRecorder())
    graphs.record()
    assert seen == [[9, 9, 9, 9], [9]]  # the largest first
    logits, positions, rows = graphs.replay([2, 7])
    assert seen[-1] == [2, 7, 9, 9]
    assert positions.tolist() == [102, 107]
    assert rows.tolist() == [2, 7]
    assert logits.shape == (2, 4)
    graphs.replay([3])
    assert seen[-1] == [3]


@pytest.mark.parametrize("most", [1, 2, 3, 8, 64, 100, 512])
def test_sizes_end_with_the_largest_batch_and_waste_little(most):
    sizes = graph_sizes(most)
    assert sizes == sorted(set(sizes))
    assert sizes[-1] == most
    for num_reqs in range(1, most + 1):
        size = next(size for size in sizes if size >= num_reqs)
        assert size - num_reqs <= max(7, num_reqs // 4)
