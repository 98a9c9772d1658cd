"""The one table of tensor names and types of all models and ensembles.

Every name here is also the JSON key, the field and the variable everywhere else. The config.pbtxt
files are written from it by scripts/write_configs.py (a test compares them). It knows no values
(tensors.py does) and no pb_utils.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Spec:
    """``many``: a list of values (dims [-1]) rather than one (dims [1])."""

    datatype: str
    many: bool = False


PROMPTS = {
    "text_input": Spec("STRING"),
    "vllm_text_input": Spec("STRING"),
    "messages": Spec("STRING"),
    "prompt_token_ids": Spec("INT32", many=True),
}
OPTIONS = {
    "max_tokens": Spec("INT32"),
    "min_tokens": Spec("INT32"),
    "n": Spec("INT32"),
    "stream": Spec("BOOL"),
    "seed": Spec("UINT64"),
    "temperature": Spec("FP32"),
    "top_k": Spec("INT32"),
    "top_p": Spec("FP32"),
    "min_p": Spec("FP32"),
    "repetition_penalty": Spec("FP32"),
    "presence_penalty": Spec("FP32"),
    "frequency_penalty": Spec("FP32"),
    "logit_bias": Spec("STRING"),
    "allowed_token_ids": Spec("INT32", many=True),
    "bad_words": Spec("STRING", many=True),
    "structured_output": Spec("STRING"),
    "stop_words": Spec("STRING", many=True),
    "stop_token_ids": Spec("INT32", many=True),
    "ignore_eos": Spec("BOOL"),
    "include_stop_str_in_output": Spec("BOOL"),
    "skip_special_tokens": Spec("BOOL"),
    "return_token_ids": Spec("BOOL"),
    "logprobs": Spec("INT32"),
    "prompt_logprobs": Spec("INT32"),
    "priority": Spec("INT32"),
    "deadline_ms": Spec("INT32"),
    "prefix_cache": Spec("BOOL"),
    "cache_salt": Spec("STRING"),
}
PREPROCESSING_INPUTS = {**PROMPTS, **OPTIONS, "sampling_parameters": Spec("STRING")}
ENGINE_INPUTS = {
    "request_key": Spec("STRING"),
    "prompt_token_ids": Spec("INT32", many=True),
    "sampling_params": Spec("STRING"),
    "text_params": Spec("STRING"),
    "control": Spec("STRING"),
}
PREPROCESSING_OUTPUTS = {name: spec for name, spec in ENGINE_INPUTS.items() if name != "control"}
CHUNK = {
    "request_key": Spec("STRING"),
    "index": Spec("INT32"),
    "token_ids": Spec("INT32", many=True),
    "finish_reason": Spec("STRING"),
    "stop_reason": Spec("STRING"),
    "error": Spec("STRING"),
    "num_cached_tokens": Spec("INT32"),
    "logprobs": Spec("STRING"),
    "prompt_logprobs": Spec("STRING"),
    "timing": Spec("STRING"),
    "text_params": Spec("STRING"),
}
ENGINE_OUTPUTS = {**CHUNK, "stats": Spec("STRING")}


def _answer(count: str) -> dict[str, Spec]:
    """Lists, because an unstreamed answer to n > 1 has one entry for each.

    An ensemble's inputs and outputs share one name space, hence not plainly ``logprobs``.
    """
    return {
        "text_output": Spec("STRING", many=True),
        "finish_reason": Spec("STRING", many=True),
        "stop_reason": Spec("STRING", many=True),
        "index": Spec("INT32", many=True),
        "num_input_tokens": Spec(count),
        "num_output_tokens": Spec(count, many=True),
        "num_cached_tokens": Spec("INT32", many=True),
        "output_token_ids": Spec("INT32", many=True),
        "output_logprobs": Spec("STRING", many=True),
        "prompt_token_logprobs": Spec("STRING"),
        "timing": Spec("STRING", many=True),
    }


ANSWERS = {
    "postprocessing": _answer("UINT32"),
    "postprocessing_batched": _answer("INT32"),
}
ENSEMBLES = {
    "ensemble": {
        "text_input": PROMPTS["text_input"],
        "prompt_token_ids": PROMPTS["prompt_token_ids"],
        **OPTIONS,
    },
    "chat": {
        "messages": PROMPTS["messages"],
        "prompt_token_ids": PROMPTS["prompt_token_ids"],
        **OPTIONS,
    },
    "vllm": {
        "text_input": PROMPTS["text_input"],
        "stream": OPTIONS["stream"],
        "sampling_parameters": PREPROCESSING_INPUTS["sampling_parameters"],
    },
}
"""What clients may send to each; `vllm` maps its text_input to preprocessing's vllm_text_input."""
