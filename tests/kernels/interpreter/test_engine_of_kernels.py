"""The whole engine through the kernels: the tokens of transformers, with and without recording."""

import pytest
import torch

from pagestream.config import EngineConfig
from pagestream.engine.llm_engine import LLMEngine
from pagestream.runner.decode_graphs import DirectRecorder
from pagestream.sampling_params import SamplingParams
from pagestream_kernels.dispatch import INTERPRETED

PROMPTS = [[3], list(range(40, 57)), [9, 8, 7] * 5]
NUM_TOKENS = 3


@pytest.fixture(scope="module")
def expected(tiny_model):
    from transformers import LlamaForCausalLM

    model = LlamaForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    answers = []
    for prompt in PROMPTS:
        ids = list(prompt)
        with torch.inference_mode():
            for _ in range(NUM_TOKENS):
                ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
        answers.append(ids[len(prompt) :])
    return answers


@pytest.mark.skipif(not INTERPRETED, reason="on a GPU, tests/engine runs through the kernels")
@pytest.mark.parametrize("recorded", [pytest.param(False, marks=pytest.mark.long), True])
def test_tokens_of_transformers(tiny_model, expected, recorded):
    """The second request waits until the first decodes: steps mix prefill and decode."""
    config = EngineConfig(
        str(tiny_model),
        num_blocks=12,
        block_size=16,
        max_num_seqs=3,
        max_num_batched_tokens=18,
        num_threads=1,
    )
    engine = LLMEngine(config, recorder=DirectRecorder() if recorded else None)
    params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
    answers = [[] for _ in PROMPTS]
    for index, prompt in enumerate(PROMPTS):
        engine.add_request(str(index), prompt, params)
    while engine.has_unfinished_requests():
        for output in engine.step():
            answers[int(output.request_id)] += output.token_ids
    assert answers == expected
