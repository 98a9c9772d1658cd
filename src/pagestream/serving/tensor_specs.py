"""The one table of tensor names and types of all models and ensembles.

Every name here is also the JSON key, the field and the variable everywhere else; names of another
convention are translated once, by conventions.py. The config.pbtxt files are written from it by
scripts/write_configs.py (a test compares them). It knows no values (tensors.py does) and no
pb_utils.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Spec:
    """``dims`` without the batch dimension; a spec with one of -1 holds a list of values."""

    datatype: str
    dims: tuple[int, ...] = (1,)

    @property
    def many(self) -> bool:
        return self.dims != (1,)


LIST = (-1,)
STRING, BOOL = Spec("STRING"), Spec("BOOL")
INT32, UINT64, FP32 = Spec("INT32"), Spec("UINT64"), Spec("FP32")
STRINGS, FP32S = Spec("STRING", LIST), Spec("FP32", LIST)
INT32S, INT64S = Spec("INT32", LIST), Spec("INT64", LIST)

PROMPTS = {
    "text_input": STRING,
    "vllm_text_input": STRING,
    "messages": STRING,
    "prompt_token_ids": INT32S,
    "chat_prompt_token_ids": INT32S,
}
"""By its name preprocessing knows which ensemble a prompt came through (RENAMED_INPUTS)."""
CHAT = {
    "tools": STRING,
    "add_generation_prompt": BOOL,
    "continue_final_message": BOOL,
    "chat_template_kwargs": STRING,
    "parse_special_tokens": BOOL,
}
RETURNS = {
    "return_finish_reason": BOOL,
    "return_num_input_tokens": BOOL,
    "return_num_output_tokens": BOOL,
    "return_token_ids": BOOL,
    "return_logprobs": BOOL,
    "return_perf_metrics": BOOL,
}
"""Which outputs a response has; the defaults are each convention's (conventions.py)."""
SAMPLING = {
    "max_tokens": INT32,
    "min_tokens": INT32,
    "n": INT32,
    "seed": UINT64,
    "temperature": FP32,
    "top_k": INT32,
    "top_p": FP32,
    "min_p": FP32,
    "repetition_penalty": FP32,
    "presence_penalty": FP32,
    "frequency_penalty": FP32,
    "logit_bias": STRING,
    "allowed_token_ids": INT32S,
    "bad_words": STRINGS,
    "structured_output": STRING,
    "stop_words": STRINGS,
    "stop_token_ids": INT32S,
    "ignore_eos": BOOL,
    "include_stop_str_in_output": BOOL,
    "skip_special_tokens": BOOL,
    "logprobs": INT32,
    "prompt_logprobs": INT32,
    "priority": INT32,
    "deadline_ms": INT32,
    "prefix_cache": BOOL,
    "cache_salt": STRING,
    "sampling_parameters": STRING,
}
"""``sampling_parameters`` is a JSON object of any options."""
TRTLLM = {
    "num_return_sequences": INT32,
    "exclude_input_in_output": BOOL,
    "end_id": INT32,
    "pad_id": INT32,
    "min_length": INT32,
    "random_seed": UINT64,
    "length_penalty": FP32,
    "beam_width": INT32,
    "embedding_bias_words": STRINGS,
    "embedding_bias_weights": FP32S,
    "guided_decoding_guide_type": STRING,
    "guided_decoding_guide": STRING,
    "return_log_probs": BOOL,
    "return_context_logits": BOOL,
    "return_generation_logits": BOOL,
    "decoder_text_input": STRING,
    "prompt_embedding_table": Spec("FP16", (-1, -1)),
    "prompt_table_extra_id": UINT64,
    "prompt_vocab_size": INT32,
    "lora_task_id": UINT64,
    "lora_weights": Spec("FP16", (-1, -1)),
    "lora_config": Spec("INT32", (-1, 3)),
}
"""What TensorRT-LLM's ensemble takes beside or instead of ours."""
VLLM = {
    "stream": BOOL,
    "sampling_parameters": STRING,
    "exclude_input_in_output": BOOL,
    "return_finish_reason": BOOL,
    "return_cumulative_logprob": BOOL,
    "return_logprobs": BOOL,
    "return_num_input_tokens": BOOL,
    "return_num_output_tokens": BOOL,
    "image": STRINGS,
    "embedding_request": STRING,
}
"""All that the vLLM backend takes beside text_input."""
OPTIONS = {"stream": BOOL, **SAMPLING, **RETURNS, **CHAT, **TRTLLM, **VLLM}
PREPROCESSING_INPUTS = {**PROMPTS, **OPTIONS}
ENGINE_INPUTS = {
    "request_key": STRING,
    "prompt_token_ids": INT32S,
    "sampling_params": STRING,
    "text_params": STRING,
    "control": STRING,
}
PREPROCESSING_OUTPUTS = {name: spec for name, spec in ENGINE_INPUTS.items() if name != "control"}
CHUNK = {
    "request_key": STRING,
    "index": INT32,
    "token_ids": INT32S,
    "finish_reason": STRING,
    "stop_reason": STRING,
    "error": STRING,
    "num_cached_tokens": INT32,
    "logprobs": STRING,
    "prompt_logprobs": STRING,
    "timing": STRING,
    "text_params": STRING,
}
ENGINE_OUTPUTS = {**CHUNK, "stats": STRING}


def _answer(count: str) -> dict[str, Spec]:
    """Lists, because an unstreamed answer to n > 1 has one entry for each.

    An ensemble's inputs and outputs share one name space, hence not plainly ``logprobs``.
    """
    return {
        "text_output": STRINGS,
        "finish_reason": STRINGS,
        "stop_reason": STRINGS,
        "index": INT32S,
        "num_input_tokens": Spec(count),
        "num_output_tokens": Spec(count, LIST),
        "num_cached_tokens": INT32S,
        "output_token_ids": INT32S,
        "output_logprobs": STRINGS,
        "prompt_token_logprobs": STRING,
        "timing": STRINGS,
    }


ANSWERS = {
    "postprocessing": {**_answer("UINT32"), "cumulative_logprob": FP32S},
    "postprocessing_batched": {
        **_answer("INT32"),
        "cum_log_probs": FP32S,
        "output_log_probs": Spec("FP32", (-1, -1)),
        "batch_index": INT32S,
        "sequence_index": INT32S,
        "kv_cache_alloc_new_blocks": INT32S,
        "kv_cache_reused_blocks": INT32S,
        "kv_cache_alloc_total_blocks": INT32S,
        "arrival_time_ns": INT64S,
        "first_scheduled_time_ns": INT64S,
        "first_token_time_ns": INT64S,
        "last_token_time_ns": INT64S,
        "context_logits": Spec("FP32", (-1, -1)),
        "generation_logits": Spec("FP32", (-1, -1, -1)),
        "acceptance_rate": FP32S,
        "total_accepted_draft_tokens": INT32S,
        "total_draft_tokens": INT32S,
    },
}
"""The last five are only declared, so that clients may ask for them: asking for logits is refused,
and nothing is drafted."""
ENSEMBLES = {
    "ensemble": {
        "text_input": STRING,
        "prompt_token_ids": INT32S,
        "stream": BOOL,
        **SAMPLING,
        **RETURNS,
        **TRTLLM,
    },
    "chat": {
        "messages": STRING,
        "prompt_token_ids": INT32S,
        "stream": BOOL,
        **SAMPLING,
        **RETURNS,
        **CHAT,
    },
    "vllm": {"text_input": STRING, **VLLM},
}
"""What clients may send to each."""
RENAMED_INPUTS = {
    "vllm": {"text_input": "vllm_text_input"},
    "chat": {"prompt_token_ids": "chat_prompt_token_ids"},
}
"""Of an ensemble: the client's name -> preprocessing's."""
RENAMED_OUTPUTS = {"vllm": {"output_logprobs": "logprobs"}}
"""Of an ensemble: postprocessing's name -> the client's."""
