"""Runs every kernel of sampling, so that none compiles while a request waits for it.

A kernel is compiled for the types of its arguments, and logits are the model's until a processor
has made float32 of them: filters and draws are run on both. Called by ModelRunner.
"""

from __future__ import annotations

import torch

from pagestream.sampling.row_tokens import RowTokens
from pagestream.sampling.sampler import Sampler
from pagestream.sampling.sampling_states import SamplingStates
from pagestream.sampling_params import SamplingParams
from pagestream.scheduler.scheduler_output import NewRequest

_STOP = 1
_DRAWS = (
    {"temperature": 0.0, "logprobs": 1},
    {"temperature": 1.0},
    {"temperature": 1.0, "top_k": 2, "top_p": 0.5, "min_p": 0.1},
)
_PROCESSORS = {
    "allowed_token_ids": (0, _STOP),
    "bad_words_token_ids": ((_STOP,),),
    "min_tokens": 1,
    "logit_bias": {0: 1.0},
    "repetition_penalty": 1.1,
}


def warm_up(states: SamplingStates, token_ids: torch.Tensor, logits: torch.Tensor) -> None:
    """While no state row is in use.

    Args:
        token_ids: int32 [num_states, max_seq_len], of RequestStates.
        logits: [1, vocab_size], as the model makes them.
    """
    device = logits.device
    tokens = RowTokens([0], torch.ones(1, dtype=torch.int64, device=device), token_ids)
    words = -(-logits.shape[1] // 32)
    bitmask = torch.full((1, words), -1, dtype=torch.int32, device=device)
    for processors in ({}, _PROCESSORS):
        for draw in _DRAWS:
            params = SamplingParams.from_dict({**draw, **processors})
            states.add([(0, NewRequest("", [0], 1, 0, params, frozenset({_STOP}), 0))])
            drawn = Sampler().sample(logits, states, tokens, bitmask if processors else None)
            states.count_tokens([0], drawn.token_ids)
            states.remove(0)
