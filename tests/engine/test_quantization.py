"""quantization=int8: close to float32 where it counts, and refused where it cannot be."""

import json
from pathlib import Path

import pytest
import torch

from pagestream import LLM, EngineConfig, SamplingParams
from pagestream.engine.llm_engine import LLMEngine


def logprobs_of(directory, prompts, **options):
    """Of the prompts' own tokens, one after another."""
    engine = LLMEngine(EngineConfig(str(directory), num_blocks=40, num_threads=1, **options))
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
    for number, prompt in enumerate(prompts):
        engine.add_request(str(number), prompt, params)
    rows = {}
    while engine.has_unfinished_requests():
        rows |= {output.request_id: output.prompt_logprobs for output in engine.step()}
    return [row.logprob for number in range(len(prompts)) for row in rows[str(number)][1:]]


def test_logprobs_of_a_random_model_stay_close(tiny_model):
    torch.manual_seed(3)
    prompts = [torch.randint(3, 256, (length,)).tolist() for length in (4, 9, 33)]
    exact = torch.tensor(logprobs_of(tiny_model, prompts))
    close = torch.tensor(logprobs_of(tiny_model, prompts, quantization="int8"))
    error = (exact - close).abs().median() / exact.std()
    assert 0 < error < 0.05


@pytest.mark.smollm2
def test_the_best_token_stays_the_best(smollm2):
    """Teacher-forced over the reference's greedy answers: 12 times 64 steps."""
    golden = json.loads((Path(__file__).parents[1] / "data/smollm2_greedy.json").read_text())
    prompts = [one["prompt_ids"] + one["output_ids"] for one in golden["prompts"]]
    llm = LLM(str(smollm2), num_blocks=40, quantization="int8")
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
    answers = llm.generate(prompt_token_ids=prompts, sampling_params=params, use_tqdm=False)
    ranks = [
        row.rank
        for one, answer in zip(golden["prompts"], answers, strict=True)
        for row in answer.prompt_logprobs[len(one["prompt_ids"]) :]
    ]
    agreement = sum(rank == 1 for rank in ranks) / len(ranks)
    print(f"top-1 agreement with float32: {agreement:.4f} of {len(ranks)} steps")
    assert agreement >= 0.98


def test_other_devices_and_types_are_refused(tiny_model):
    config = EngineConfig(str(tiny_model), quantization="int8", dtype="bfloat16", num_blocks=8)
    with pytest.raises(
        ValueError, match="int8 is for CPU and float32, got device cpu and bfloat16"
    ):
        LLMEngine(config)
