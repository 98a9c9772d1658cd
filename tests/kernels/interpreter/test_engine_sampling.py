"""Every control of sampling through the kernels: the tokens, and log-probabilities, of the CPU."""

from dataclasses import replace

import pytest

from pagestream.config import EngineConfig
from pagestream.engine.llm_engine import LLMEngine
from pagestream.runner.decode_graphs import DirectRecorder
from pagestream.sampling_params import SamplingParams
from pagestream_kernels import dispatch

GREEDY = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)
DRAWN = replace(GREEDY, temperature=0.9, seed=2**63 + 7)
REQUESTS = {
    "greedy": replace(GREEDY, prompt_logprobs=1),
    "drawn": replace(DRAWN, logprobs=2),
    "filtered": replace(DRAWN, temperature=3.0, top_k=40, top_p=0.9, min_p=1e-4),
    "penalised": replace(DRAWN, repetition_penalty=1.3, frequency_penalty=1.5, logprobs=1),
    "listed": replace(
        DRAWN,
        temperature=20.0,
        ignore_eos=False,
        min_tokens=2,
        stop_token_ids=tuple(range(0, 256, 3)),
        logit_bias={5: 50.0, 7: -9.0},
        allowed_token_ids=tuple(range(200)),
    ),
    "bad words": replace(DRAWN, temperature=20.0, bad_words_token_ids=((11,), (4, 9), (3, 4, 5))),
}


def answers(tiny_model):
    """Six requests in one batch, so that a recorded step is padded to eight."""
    config = EngineConfig(
        str(tiny_model), num_blocks=16, block_size=16, max_num_seqs=8, num_threads=1
    )
    engine = LLMEngine(config, recorder=DirectRecorder())
    for index, (name, params) in enumerate(REQUESTS.items()):
        engine.add_request(name, list(range(20 * index, 20 * index + 4 + index)), params)
    tokens = {name: [] for name in REQUESTS}
    logprobs = []
    while engine.has_unfinished_requests():
        for output in engine.step():
            assert output.error is None
            tokens[output.request_id] += output.token_ids
            for found in [*(output.logprobs or []), *(output.prompt_logprobs or [])]:
                if found is not None:
                    logprobs += [found.logprob, *found.top_logprobs]
    return tokens, logprobs


@pytest.mark.long
@pytest.mark.skipif(not dispatch.INTERPRETED, reason="compares with the same tensors on the CPU")
def test_tokens_of_the_cpu(tiny_model, monkeypatch):
    tokens, logprobs = answers(tiny_model)
    monkeypatch.setattr(dispatch, "INTERPRETED", False)
    expected_tokens, expected_logprobs = answers(tiny_model)
    assert tokens == expected_tokens
    assert logprobs == pytest.approx(expected_logprobs, abs=1e-3)
    assert len(logprobs) == 3 * 3 + 3 * 2 + 3 * 2
    assert all(len(ids) == 3 or name == "listed" for name, ids in tokens.items())
