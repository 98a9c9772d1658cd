"""Preprocessor: a client's request in any convention -> token ids and parameters for the engine.

Owns the meaning of what clients send: which prompt, which defaults, what is refused. It mints the
request_key and stamps the arrival. It never sees pb_utils (PreprocessingModel does) or the engine.
"""

from __future__ import annotations

import dataclasses
import json
import secrets
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pagestream import checks
from pagestream.config import ModelConfig
from pagestream.sampling_params import TEXT_FIELDS, Limits, SamplingParams, validate_prompt
from pagestream.serving.options import is_grpc, parse_messages, parse_options
from pagestream.text.tokenizer import Tokenizer

_PROMPT_FIELDS = ("text_input", "vllm_text_input", "messages", "prompt_token_ids")


@dataclass(frozen=True, slots=True)
class PreparedRequest:
    """The four tensors from preprocessing to the engine; both params are JSON."""

    request_key: str
    prompt_token_ids: list[int]
    sampling_params: str
    text_params: str


class Preprocessor:
    def __init__(self, directory: Path, max_model_len: int) -> None:
        model_config = ModelConfig.from_hf(directory)
        self._tokenizer = Tokenizer(directory)
        self._limits = Limits(model_config.vocab_size, max_model_len)

    def prepare(self, inputs: dict[str, Any], parameters: dict[str, Any]) -> PreparedRequest:
        """``inputs`` by tensor name, ``parameters`` of the request. ValueError names the field."""
        arrival_time_ns = time.monotonic_ns()
        given = [name for name in _PROMPT_FIELDS if name in inputs]
        if len(given) != 1:
            names = ", ".join("text_input" if n == "vllm_text_input" else n for n in given)
            raise ValueError(
                f"exactly one of text_input, messages and prompt_token_ids is required, "
                f"got {names or 'none'}"
            )
        convention = {"vllm_text_input": "vllm", "messages": "chat"}.get(given[0], "ensemble")
        options = parse_options(inputs, parameters)
        stream = checks.boolean("stream", options.pop("stream", False))
        return_token_ids = checks.boolean(
            "return_token_ids", options.pop("return_token_ids", False)
        )
        params = self._with_special_stops(SamplingParams.from_dict(options))
        params = self._tokenizer.with_bad_words(params)
        params.validate(self._limits)
        prompt_token_ids = self._encode(given[0], inputs[given[0]])
        text_params = {
            "convention": convention,
            "stream": stream,
            # tritonserver sees an HTTP client go away only after it has sent it something.
            "http_stream": stream and not any(map(is_grpc, parameters)),
            "n": params.n,
            "return_token_ids": return_token_ids,
            "stop": params.stop,
            "include_stop_str_in_output": params.include_stop_str_in_output,
            "skip_special_tokens": params.skip_special_tokens,
            "min_tokens": params.min_tokens,
            "prompt_tail": self._tokenizer.prompt_tail(prompt_token_ids),
            "num_input_tokens": len(prompt_token_ids),
        }
        sampling_params = {
            name: value for name, value in params.to_dict().items() if name not in TEXT_FIELDS
        }
        engine_params = {**sampling_params, "stream": stream, "arrival_time_ns": arrival_time_ns}
        return PreparedRequest(
            request_key=secrets.token_hex(16),
            prompt_token_ids=prompt_token_ids,
            sampling_params=json.dumps(engine_params),
            text_params=json.dumps(text_params),
        )

    def _with_special_stops(self, params: SamplingParams) -> SamplingParams:
        """A stop string that is one special token never appears in text that skips those."""
        ids = [self._tokenizer.special_token_id(text) for text in params.stop]
        special = tuple(token_id for token_id in ids if token_id is not None)
        return dataclasses.replace(params, stop_token_ids=params.stop_token_ids + special)

    def _encode(self, field: str, value: Any) -> list[int]:
        if field == "prompt_token_ids":
            validate_prompt(value, self._limits)
            return list(value)
        name = "text_input" if field == "vllm_text_input" else field
        self._check_size(name, value)
        if field == "messages":
            ids = self._tokenizer.encode_chat(parse_messages(value))
        else:
            ids = self._tokenizer.encode(value)
        validate_prompt(ids, self._limits, name)
        return ids

    def _check_size(self, name: str, text: str) -> None:
        """Refuse by bytes before the cost of tokenizing what cannot fit."""
        size = len(text.encode("utf-8", errors="replace"))
        most = self._limits.max_model_len * self._tokenizer.max_bytes_per_token
        if size > most:
            raise ValueError(
                f"{name} has {size} bytes, more than {most} bytes, the longest text that could fit "
                f"max_model_len which is {self._limits.max_model_len} tokens"
            )
