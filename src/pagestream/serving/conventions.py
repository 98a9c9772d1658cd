"""What the client conventions call things: their options -> ours, or a refusal by name.

Owns which option names each ensemble knows, which outputs its responses have, and whether the
prompt is repeated. It knows no tensors and no tokenizer. Used by Preprocessor, after options.py
has read the values.
"""

from __future__ import annotations

from typing import Any

from pagestream import checks
from pagestream.sampling_params import check_token_ids
from pagestream.serving.tensor_specs import ANSWERS, ENSEMBLES, RETURNS, SAMPLING, VLLM

JSON_OPTIONS = {
    "stop": "LIST",
    "bad_words_token_ids": "LIST",
    "best_of": "INT32",
    "detokenize": "BOOL",
    "early_stopping": "BOOL",
    "guided_decoding": "OBJECT",
    "lora_name": "STRING",
    "spaces_between_special_tokens": "BOOL",
    "structured_outputs": "OBJECT",
    "use_beam_search": "BOOL",
}
"""Option -> kind of those that are no tensor: of sampling_parameters and request parameters."""
_RENAMED = {"random_seed": "UINT64", "min_length": "INT32", "length_penalty": "FP32"}
KNOWN = {
    "ensemble": {*ENSEMBLES["ensemble"], *JSON_OPTIONS},
    "chat": {*ENSEMBLES["chat"], *JSON_OPTIONS, *_RENAMED},
    "vllm": {*VLLM, *SAMPLING, *RETURNS, *JSON_OPTIONS, *_RENAMED},
}
SYNONYMS = {
    "stop_words": "stop",
    "num_return_sequences": "n",
    "random_seed": "seed",
    "min_length": "min_tokens",
    "guided_decoding": "structured_outputs",
}
_BEAM = "beam search is not supported"
_PROMPT_TABLE = "prompt embeddings are not supported"
_LORA = "no adapter is loaded"
_LOGITS = "logits are not returned; ask for logprobs"
_UNSUPPORTED: dict[str, tuple[tuple[Any, ...], str]] = {
    "beam_width": ((1,), _BEAM),
    "use_beam_search": ((False,), _BEAM),
    "length_penalty": ((0.0, 1.0), _BEAM),
    "early_stopping": ((False,), _BEAM),
    "decoder_text_input": (("",), "the model has no decoder of its own"),
    "prompt_embedding_table": ((), _PROMPT_TABLE),
    "prompt_table_extra_id": ((), _PROMPT_TABLE),
    "prompt_vocab_size": ((), _PROMPT_TABLE),
    "lora_task_id": ((), _LORA),
    "lora_weights": ((), _LORA),
    "lora_config": ((), _LORA),
    "lora_name": (("",), _LORA),
    "return_context_logits": ((False,), _LOGITS),
    "return_generation_logits": ((False,), _LOGITS),
    "image": (([], [""]), "the model reads text only"),
    "embedding_request": (("",), "embeddings are not supported"),
    "detokenize": ((True,), "the answer is always text; ask for return_token_ids beside it"),
    "spaces_between_special_tokens": ((True,), "the text is what the tokenizer makes of the ids"),
}
"""Option -> the values that mean the same as leaving it out, and why no other is taken."""
_GUIDES = {"json_schema": "json_schema", "regex": "regex", "ebnf_grammar": "grammar"}
"""TensorRT-LLM's guided_decoding_guide_type -> key of structured_output; also "json"."""
_STRUCTURES = {"json": "json_schema", "regex": "regex", "grammar": "grammar", "choice": "choice"}
"""Key of vLLM's structured_outputs -> key of structured_output; also json_object."""
_ANY_JSON = {"anyOf": [{"type": "object"}, {"type": "array"}]}
_TIMES = ("arrival_time_ns", "first_scheduled_time_ns", "first_token_time_ns", "last_token_time_ns")
_BLOCKS = (
    "kv_cache_alloc_new_blocks",
    "kv_cache_reused_blocks",
    "kv_cache_alloc_total_blocks",
)
_RETURNED = {
    "return_finish_reason": ("finish_reason", "stop_reason"),
    "return_num_input_tokens": ("num_input_tokens", "num_cached_tokens"),
    "return_num_output_tokens": ("num_output_tokens",),
    "return_token_ids": ("output_token_ids",),
    "return_logprobs": ("output_logprobs", "prompt_token_logprobs"),
    "return_log_probs": ("cum_log_probs", "output_log_probs"),
    "return_cumulative_logprob": ("cumulative_logprob",),
    "return_perf_metrics": ("timing", *_TIMES, *_BLOCKS),
}
_BY_DEFAULT = {
    "return_finish_reason",
    "return_num_input_tokens",
    "return_num_output_tokens",
    "return_logprobs",
}
"""On unless switched off, on `ensemble` and `chat`; the vLLM backend returns what is asked for."""


def translate(options: dict[str, Any], vocab_size: int) -> None:
    """Turn foreign options into ours, in place. ValueError for what is not supported."""
    for name, (harmless, reason) in _UNSUPPORTED.items():
        if name in options:
            value = options.pop(name)
            if not any(value == allowed for allowed in harmless):
                raise ValueError(f"{name}: {reason}, got {value!r:.80}")
    _check_best_of(options)
    _translate_end_id(options, vocab_size)
    _translate_structure(options)


def take_outputs(convention: str, options: dict[str, Any]) -> list[str]:
    """The names of the outputs that each response has; takes the return_* flags out of options."""
    lean = convention == "vllm"
    names = ["text_output"]
    if not lean:
        names += ["index", "timing"]
    elif options.get("n", 1) != 1:
        names.append("index")
    if convention == "ensemble":
        names += ["batch_index", "sequence_index"]
    for flag, returned in _RETURNED.items():
        default = flag in _BY_DEFAULT and not lean
        if checks.boolean(flag, options.pop(flag, default)):
            names += [name for name in returned if name not in names]
    if not lean and options.get("logprobs") is None:
        names = [name for name in names if name != "output_logprobs"]
    if {"cum_log_probs", "cumulative_logprob"} & set(names):
        options.setdefault("logprobs", 0)
    batched = convention == "ensemble"
    answer = ANSWERS["postprocessing_batched" if batched else "postprocessing"]
    return [name for name in names if name in answer]


def take_echo(
    convention: str,
    options: dict[str, Any],
    *,
    stream: bool,
    is_text: bool,
    exclude_by_default: bool,
) -> bool:
    """Whether the answer's text starts with the prompt's. A streamed one's never does; ValueError
    for an explicit wish that cannot be met (TensorRT-LLM's ensemble streams new text only, whatever
    the flag says)."""
    name = "exclude_input_in_output"
    given = options.pop(name, None)
    exclude = None if given is None else checks.boolean(name, given)
    if exclude is False and not is_text:
        raise ValueError(f"{name} is false, but the prompt was not given as text")
    if convention == "vllm":
        if exclude is False and stream:
            raise ValueError(f"{name} is false, but a streamed answer does not repeat its prompt")
        exclude_by_default = False
    return is_text and not stream and not (exclude_by_default if exclude is None else exclude)


def _check_best_of(options: dict[str, Any]) -> None:
    best_of = options.pop("best_of", None)
    if best_of is not None and best_of != options.get("n", 1):
        raise ValueError(f"best_of: every answer is returned, so it must equal n, got {best_of!r}")


def _translate_end_id(options: dict[str, Any], vocab_size: int) -> None:
    """``end_id`` ends the answer beside the model's own; nothing is padded, so pad_id is idle."""
    checks.integer(-1, optional=True)("pad_id", options.pop("pad_id", None))
    end_id = checks.integer(-1)("end_id", options.pop("end_id", -1))
    if end_id >= 0:
        check_token_ids("end_id", [end_id], vocab_size)
        options["stop_token_ids"] = [*options.get("stop_token_ids", []), end_id]


def _translate_structure(options: dict[str, Any]) -> None:
    kind = options.pop("guided_decoding_guide_type", "")
    guide = options.pop("guided_decoding_guide", "")
    outputs = options.pop("structured_outputs", None)
    if bool(kind) + bool(outputs) + bool(options.get("structured_output")) > 1:
        raise ValueError("structured_output is given twice, under two names")
    if kind:
        options["structured_output"] = _guided(kind, guide)
    elif guide:
        raise ValueError("guided_decoding_guide needs guided_decoding_guide_type")
    if outputs:
        options["structured_output"] = _structured(outputs)


def _guided(kind: str, guide: str) -> dict[str, Any]:
    if kind == "json":
        return {"json_schema": _ANY_JSON}
    if kind not in _GUIDES:
        known = ", ".join(["json", *_GUIDES])
        raise ValueError(f"guided_decoding_guide_type must be one of {known}, got {kind!r:.80}")
    if not guide:
        raise ValueError(f"guided_decoding_guide is required with a guide type of {kind}")
    return {_GUIDES[kind]: guide}


def _structured(outputs: Any) -> dict[str, Any]:
    if not isinstance(outputs, dict):
        raise ValueError(f"structured_outputs must be an object, got {outputs!r:.80}")
    given = {key: value for key, value in outputs.items() if value not in (None, False)}
    known = ", ".join([*_STRUCTURES, "json_object"])
    if len(given) != 1:
        raise ValueError(f"structured_outputs must have one key of {known}, got {outputs!r:.80}")
    ((key, value),) = given.items()
    if key == "json_object":
        return {"json_schema": _ANY_JSON}
    if key not in _STRUCTURES:
        raise ValueError(f"structured_outputs must have one key of {known}, got {key!r:.80}")
    return {_STRUCTURES[key]: value}
