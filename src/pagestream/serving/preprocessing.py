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
from pagestream.serving import conventions
from pagestream.serving.options import is_grpc, parse_messages, parse_options
from pagestream.text.chat import ChatOptions
from pagestream.text.tokenizer import Tokenizer

_PROMPTS = {
    "text_input": ("ensemble", "text_input"),
    "prompt_token_ids": ("ensemble", "prompt_token_ids"),
    "vllm_text_input": ("vllm", "text_input"),
    "messages": ("chat", "messages"),
    "chat_prompt_token_ids": ("chat", "prompt_token_ids"),
}
"""Input -> the convention that it belongs to, and the client's name for it."""


@dataclass(frozen=True, slots=True)
class PreparedRequest:
    """The four tensors from preprocessing to the engine; both params are JSON."""

    request_key: str
    prompt_token_ids: list[int]
    sampling_params: str
    text_params: str


class Preprocessor:
    """``exclude_input_in_output``: what `ensemble` does where the request does not say."""

    def __init__(
        self, directory: Path, max_model_len: int, exclude_input_in_output: bool = True
    ) -> None:
        model_config = ModelConfig.from_hf(directory)
        self._tokenizer = Tokenizer(directory)
        self._limits = Limits(model_config.vocab_size, max_model_len)
        self._exclude_input_in_output = exclude_input_in_output

    def prepare(self, inputs: dict[str, Any], parameters: dict[str, Any]) -> PreparedRequest:
        """``inputs`` by tensor name, ``parameters`` of the request. ValueError names the field."""
        arrival_time_ns = time.monotonic_ns()
        given = [name for name in _PROMPTS if name in inputs]
        if len(given) != 1:
            names = ", ".join(_PROMPTS[name][1] for name in given)
            raise ValueError(
                f"exactly one of text_input, messages and prompt_token_ids is required, "
                f"got {names or 'none'}"
            )
        convention, prompt_name = _PROMPTS[given[0]]
        prompt = inputs[given[0]]
        options = parse_options(convention, inputs, parameters)
        conventions.translate(options, self._limits.vocab_size)
        self._take_bias_words(options)
        stream = checks.boolean("stream", options.pop("stream", False))
        outputs = conventions.take_outputs(convention, options)
        echo = conventions.take_echo(
            convention,
            options,
            stream=stream,
            is_text=prompt_name == "text_input",
            exclude_by_default=self._exclude_input_in_output,
        )
        chat_options = _take_chat_options(options)
        params = self._with_special_stops(SamplingParams.from_dict(options))
        params = self._tokenizer.with_bad_words(params)
        params.validate(self._limits)
        prompt_token_ids = self._encode(prompt_name, prompt, chat_options)
        text_params = {
            "convention": convention,
            "outputs": outputs,
            "stream": stream,
            # tritonserver sees an HTTP client go away only after it has sent it something.
            "http_stream": stream and not any(map(is_grpc, parameters)),
            "n": params.n,
            "echo": prompt if echo else "",
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

    def _take_bias_words(self, options: dict[str, Any]) -> None:
        """TensorRT-LLM biases every token of each word."""
        words = options.pop("embedding_bias_words", [])
        weights = options.pop("embedding_bias_weights", [])
        words = [] if words == [""] else words
        if len(words) != len(weights):
            raise ValueError(
                f"embedding_bias_weights has {len(weights)} entries for {len(words)} "
                f"embedding_bias_words"
            )
        bias = dict(options.get("logit_bias") or {})
        for word, weight in zip(words, weights, strict=True):
            for token_id in self._tokenizer.encode(word, add_special_tokens=False):
                bias[token_id] = weight
        if words:
            options["logit_bias"] = bias

    def _with_special_stops(self, params: SamplingParams) -> SamplingParams:
        """A stop string that is one special token never appears in text that skips those."""
        ids = [self._tokenizer.special_token_id(text) for text in params.stop]
        special = tuple(token_id for token_id in ids if token_id is not None)
        return dataclasses.replace(params, stop_token_ids=params.stop_token_ids + special)

    def _encode(self, name: str, value: Any, chat_options: ChatOptions) -> list[int]:
        if name == "prompt_token_ids":
            validate_prompt(value, self._limits)
            return list(value)
        self._check_size(name, value)
        if name == "messages":
            ids = self._tokenizer.encode_chat(parse_messages(value), chat_options)
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


def _take_chat_options(options: dict[str, Any]) -> ChatOptions:
    given = {
        field.name: options.pop(field.name)
        for field in dataclasses.fields(ChatOptions)
        if field.name in options
    }
    return ChatOptions(**given)
