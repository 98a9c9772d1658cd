"""The engine on a CUDA device: what only a device can show."""

import logging

import pytest
import torch
from test_decode_graphs import KINDS, answers

from pagestream.config import EngineConfig
from pagestream.engine.llm_engine import LLMEngine

pytestmark = pytest.mark.gpu
PROMPTS = [[3 + index] * length for index, length in enumerate((1, 16, 40, 65, 100))]


def make_engine(tiny_model, **options):
    values = {"block_size": 16, "max_num_seqs": 6, "max_num_batched_tokens": 64, "device": "cuda"}
    return LLMEngine(EngineConfig(str(tiny_model), **{**values, **options}))


@pytest.mark.filterwarnings("ignore:Synchronization debug mode:UserWarning")
@pytest.mark.parametrize("enforce_eager", [False, True], ids=["graphs", "eager"])
def test_no_step_waits_for_the_device(tiny_model, enforce_eager):
    engine = make_engine(tiny_model, enforce_eager=enforce_eager)
    engine.warm_up()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for prompt, (name, params) in zip(PROMPTS, KINDS.items(), strict=True):
            engine.add_request(name, prompt, params)
            engine.step()
        while engine.has_unfinished_requests():
            engine.step()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("num_blocks", [40, 9])
def test_recorded_steps_give_the_tokens_of_launched_ones(tiny_model, num_blocks):
    options = {"device": "cuda", "num_blocks": num_blocks}
    recorded, stats = answers(tiny_model, None, **options)
    assert (stats.preemptions_total > 0) == (num_blocks == 9)
    assert recorded == answers(tiny_model, None, enforce_eager=True, **options)[0]
    assert recorded == answers(tiny_model, None, overlap_scheduling="off", **options)[0]


def test_nothing_compiles_after_the_warm_up(tiny_model, caplog):
    engine = make_engine(tiny_model)
    engine.warm_up()
    with caplog.at_level(logging.WARNING):
        for prompt, (name, params) in zip(PROMPTS, KINDS.items(), strict=True):
            engine.add_request(name, prompt, params)
            engine.step()
        while engine.has_unfinished_requests():
            engine.step()
    assert [message for message in caplog.messages if "compiled" in message] == []


def test_more_memory_than_there_is_names_the_setting(tiny_model):
    with pytest.raises(ValueError, match=r"gpu_memory_utilization is 0\.0001"):
        make_engine(tiny_model, gpu_memory_utilization=0.0001)
