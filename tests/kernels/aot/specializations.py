"""Which compilations a step causes: run in a process of its own, on tensors without memory.

Triton compiles a kernel for the types of its arguments, and for what it can make use of: pointers
at multiples of 16 bytes, integers that are multiples of 16 or 1. Tensors of torch's meta device
have addresses, so that everything but the compilation itself happens as on a GPU.
"""

from __future__ import annotations

import dataclasses
import os
import random

os.environ["TRITON_INTERPRET"] = "0"  # without a GPU, kernels are loaded if this is set at all

import torch
from compile_kernels import TargetDriver
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from pagestream.config import ModelConfig
from pagestream.runner.block_tables import BlockTables
from pagestream.runner.input_batch import build_input_batch
from pagestream.runner.request_states import RequestStates
from pagestream.sampling.row_tokens import RowTokens
from pagestream.sampling.sampler import Sampler
from pagestream.sampling.sampling_states import SamplingStates
from pagestream.sampling.warm_up import warm_up
from pagestream.sampling_params import SamplingParams
from pagestream.scheduler.scheduler_output import NewRequest, ScheduledRequest, SchedulerOutput
from pagestream_kernels import append_tokens, dispatch

VOCAB, STATES, MAX_LEN, PAGE = 151936, 7, 512, 16
META = torch.device("meta")
KINDS = [
    {"temperature": 0.0},
    {"temperature": 0.7, "logprobs": 2},
    {"top_p": 0.9},
    {"top_k": 5, "min_p": 0.1},
    {"presence_penalty": 0.5},
    {"logit_bias": dict.fromkeys(range(40), 1.0)},
    {"allowed_token_ids": (3, 4, 5)},
    {"bad_words_token_ids": ((1, 2, 3, 4), (5,), (6, 7))},
    {"min_tokens": 5, "logprobs": 0},
]


def compilations(capability: int) -> tuple[list[str], list[str]]:
    """Kernels that the warm-up would compile, and those that later steps would."""
    seen: list[tuple[str, str]] = []

    def record(self, key, *rest):
        if (self.__name__, str(key)) not in seen:
            seen.append((self.__name__, str(key)))

    driver.set_active(TargetDriver(capability))
    JITFunction._do_compile = record
    dispatch.INTERPRETED = True  # as if tensors were where kernels run
    sampling = SamplingStates(STATES, _model_config(), META)
    states = RequestStates(STATES, MAX_LEN, META)
    tables = BlockTables(STATES, MAX_LEN // PAGE, META)
    logits = torch.empty((STATES, VOCAB), dtype=torch.bfloat16, device=META)
    warm_up(sampling, states.token_ids, logits[:1])
    generator = random.Random(0)
    _step(generator, [SamplingParams()], states, tables, sampling, logits)
    count = len(seen)
    for _ in range(100):
        chosen = [generator.choice(KINDS) for _ in range(generator.randint(1, STATES))]
        params = [SamplingParams(**kind) for kind in chosen]
        _step(generator, params, states, tables, sampling, logits)
    return [name for name, _ in seen[:count]], [name for name, _ in seen[count:]]


def _step(generator, params, states, tables, sampling, logits) -> None:
    """All requests are new, and gone after it."""
    requests = [
        NewRequest(str(index), [0] * generator.randint(1, 40), 1, 0, one, frozenset({2, 7}), 5)
        for index, one in enumerate(params)
    ]
    rows = states.add(requests)
    for row in rows:
        tables.reset(row)
    sampling.add(list(zip(rows, requests, strict=True)))
    tables.append([(row, list(range(generator.randint(0, 3)))) for row in rows])
    shares = [
        ScheduledRequest(request.request_id, generator.randint(1, 9), 1, [], 0)
        for request in requests
    ]
    batch = build_input_batch(SchedulerOutput([], [], shares), states, tables, PAGE)
    hidden = torch.empty((len(batch.input_ids), 64), dtype=torch.bfloat16, device=META)
    found = batch.logits_rows(hidden)
    tokens = RowTokens(batch.state_rows, found.positions, states.token_ids)
    bitmask = torch.empty((len(rows), VOCAB // 32), dtype=torch.int32, device=META)
    use = generator.random() < 0.2
    drawn = Sampler().sample(logits[: len(rows)], sampling, tokens, bitmask if use else None)
    append_tokens(found.states, found.positions, drawn.token_ids, states.token_ids)
    sampling.count_tokens(batch.state_rows, drawn.token_ids)
    for request in requests:
        sampling.remove(states.remove(request.request_id))


def _model_config() -> ModelConfig:
    numbers = {field.name: 1 for field in dataclasses.fields(ModelConfig)}
    defaults = {"temperature": None, "top_k": None, "top_p": None}
    return ModelConfig(**{**numbers, **defaults, "vocab_size": VOCAB})
