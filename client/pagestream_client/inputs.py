"""The inputs of the three ensembles: their names, dtypes and shapes on the wire.

The one table of names on the client's side. Checks only that a value can be put on the wire; what
is a sensible value is the server's business. Called by ``client`` alone.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypedDict

import numpy as np
from tritonclient.grpc import service_pb2
from tritonclient.utils import serialize_byte_tensor

BATCHED_MODELS = frozenset({"ensemble"})
"""Models with max_batch_size 1, whose tensors carry a leading dimension of 1."""

VLLM_DEFAULTS = {
    "exclude_input_in_output": True,
    "return_finish_reason": True,
    "return_num_input_tokens": True,
    "return_num_output_tokens": True,
}
"""`vllm` returns only what is asked for; these make its answers as complete as the others'."""

Message = Mapping[str, Any]


class RequestInputs(TypedDict, total=False):
    """What may be sent with a request; None is the same as leaving it out.

    Which model takes which is in the README.
    """

    text_input: str | None
    messages: str | Sequence[Message] | None
    """Chat messages with role and content (or the JSON text of such a list)."""
    prompt_token_ids: Sequence[int] | None
    max_tokens: int | None
    min_tokens: int | None
    n: int | None
    seed: int | None
    temperature: float | None
    top_k: int | None
    top_p: float | None
    min_p: float | None
    repetition_penalty: float | None
    presence_penalty: float | None
    frequency_penalty: float | None
    logit_bias: str | Mapping[int, float] | None
    """Token id -> number (or the JSON text of such an object)."""
    allowed_token_ids: Sequence[int] | None
    bad_words: Sequence[str] | None
    structured_output: str | Mapping[str, Any] | None
    """One of json_schema, regex, grammar or choice (or the JSON text of such an object)."""
    stop_words: Sequence[str] | None
    stop_token_ids: Sequence[int] | None
    ignore_eos: bool | None
    include_stop_str_in_output: bool | None
    skip_special_tokens: bool | None
    tools: str | Sequence[Mapping[str, Any]] | None
    """`chat`: for the template (or the JSON text of such a list)."""
    add_generation_prompt: bool | None
    continue_final_message: bool | None
    chat_template_kwargs: str | Mapping[str, Any] | None
    parse_special_tokens: bool | None
    exclude_input_in_output: bool | None
    return_finish_reason: bool | None
    return_num_input_tokens: bool | None
    return_num_output_tokens: bool | None
    return_token_ids: bool | None
    return_logprobs: bool | None
    return_perf_metrics: bool | None
    logprobs: int | None
    prompt_logprobs: int | None
    priority: int | None
    deadline_ms: int | None
    prefix_cache: bool | None
    cache_salt: str | None
    sampling_parameters: str | Mapping[str, Any] | None
    """A mapping of more options (or the JSON text of an object); `vllm` takes most of them here."""


@dataclass(frozen=True)
class _Input:
    datatype: str
    is_list: bool = False
    is_json: bool = False


_INPUTS = {
    "text_input": _Input("BYTES"),
    "messages": _Input("BYTES", is_json=True),
    "prompt_token_ids": _Input("INT32", is_list=True),
    "stream": _Input("BOOL"),
    "max_tokens": _Input("INT32"),
    "min_tokens": _Input("INT32"),
    "n": _Input("INT32"),
    "seed": _Input("UINT64"),
    "temperature": _Input("FP32"),
    "top_k": _Input("INT32"),
    "top_p": _Input("FP32"),
    "min_p": _Input("FP32"),
    "repetition_penalty": _Input("FP32"),
    "presence_penalty": _Input("FP32"),
    "frequency_penalty": _Input("FP32"),
    "logit_bias": _Input("BYTES", is_json=True),
    "allowed_token_ids": _Input("INT32", is_list=True),
    "bad_words": _Input("BYTES", is_list=True),
    "structured_output": _Input("BYTES", is_json=True),
    "stop_words": _Input("BYTES", is_list=True),
    "stop_token_ids": _Input("INT32", is_list=True),
    "ignore_eos": _Input("BOOL"),
    "include_stop_str_in_output": _Input("BOOL"),
    "skip_special_tokens": _Input("BOOL"),
    "tools": _Input("BYTES", is_json=True),
    "add_generation_prompt": _Input("BOOL"),
    "continue_final_message": _Input("BOOL"),
    "chat_template_kwargs": _Input("BYTES", is_json=True),
    "parse_special_tokens": _Input("BOOL"),
    "exclude_input_in_output": _Input("BOOL"),
    "return_finish_reason": _Input("BOOL"),
    "return_num_input_tokens": _Input("BOOL"),
    "return_num_output_tokens": _Input("BOOL"),
    "return_token_ids": _Input("BOOL"),
    "return_logprobs": _Input("BOOL"),
    "return_perf_metrics": _Input("BOOL"),
    "logprobs": _Input("INT32"),
    "prompt_logprobs": _Input("INT32"),
    "priority": _Input("INT32"),
    "deadline_ms": _Input("INT32"),
    "prefix_cache": _Input("BOOL"),
    "cache_salt": _Input("BYTES"),
    "sampling_parameters": _Input("BYTES", is_json=True),
}
_DTYPES = {"INT32": np.int32, "UINT64": np.uint64, "FP32": np.float32, "BOOL": np.bool_}
_LIMITS: dict[str, tuple[int, int]] = {
    "INT32": (-(2**31), 2**31 - 1),
    "UINT64": (0, 2**64 - 1),
}
_KINDS: dict[str, tuple[type, ...]] = {
    "BYTES": (str,),
    "BOOL": (bool,),
    "FP32": (int, float),
    "INT32": (int,),
    "UINT64": (int,),
}


def build_request(
    model: str, request_id: str, inputs: Mapping[str, Any]
) -> service_pb2.ModelInferRequest:
    """One inference request. Inputs that are None are left out.

    Raises TypeError for an unknown name or a wrong type, ValueError for a number that the wire's
    integer cannot hold.
    """
    request = service_pb2.ModelInferRequest(model_name=model, id=request_id)
    if model == "vllm":
        inputs = {**inputs, **{k: v for k, v in VLLM_DEFAULTS.items() if k not in inputs}}
    for name, value in inputs.items():
        if name not in _INPUTS:
            raise TypeError(f"unknown input {name!r}; known inputs: {', '.join(_INPUTS)}")
        if value is None:
            continue
        spec = _INPUTS[name]
        values = _values(name, spec, value)
        shape = [1, len(values)] if model in BATCHED_MODELS else [len(values)]
        request.inputs.add(name=name, datatype=spec.datatype, shape=shape)
        request.raw_input_contents.append(_encode(name, spec, values))
    return request


def _values(name: str, spec: _Input, value: Any) -> list[Any]:
    if spec.is_json and not isinstance(value, str):
        return [json.dumps(value, ensure_ascii=False)]
    if not spec.is_list:
        return [value]
    if isinstance(value, (str, bytes)):
        raise TypeError(f"{name} must be a list, got {value!r}")
    return list(value)


def _encode(name: str, spec: _Input, values: list[Any]) -> bytes:
    for value in values:
        # A bool is an int to isinstance, and never what a number field means.
        wrong_bool = isinstance(value, bool) and spec.datatype != "BOOL"
        if wrong_bool or not isinstance(value, _KINDS[spec.datatype]):
            raise TypeError(f"{name} must hold {spec.datatype} values, got {value!r}")
    if spec.datatype == "BYTES":
        texts = np.array([value.encode() for value in values], dtype=np.object_)
        serialized = serialize_byte_tensor(texts)
        return bytes(serialized.item()) if serialized.size else b""
    if spec.datatype in _LIMITS:
        least, most = _LIMITS[spec.datatype]
        for value in values:
            if not least <= value <= most:
                raise ValueError(f"{name} does not fit {spec.datatype}: {value}")
    return np.array(values, dtype=_DTYPES[spec.datatype]).tobytes()
