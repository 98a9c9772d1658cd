"""Bad input: one error that names the field, at once, over every transport; then all is well."""

import json
import math
import re
import time
from typing import Any

import pytest
from e2e_support import RawRequest, Service
from tritonclient.utils import InferenceServerException

from pagestream_client import ServerError

pytestmark = [pytest.mark.server, pytest.mark.smollm2]

MAX_MODEL_LEN = 1024
VOCAB_SIZE = 49152
USER = {"role": "user", "content": "Hi"}

# name: (model, inputs, what the message must match)
CASES: dict[str, tuple[str, dict[str, Any], str]] = {
    "ensemble without a prompt": ("ensemble", {}, "text_input"),
    "ensemble with parameters only": ("ensemble", {"max_tokens": 5}, "text_input"),
    "chat without messages": ("chat", {}, "messages"),
    "vllm without text_input": ("vllm", {}, "text_input"),
    "empty text": ("ensemble", {"text_input": ""}, "text_input"),
    "empty text on vllm": ("vllm", {"text_input": ""}, "text_input"),
    "empty ids": ("ensemble", {"prompt_token_ids": []}, "prompt_token_ids"),
    "no message": ("chat", {"messages": "[]"}, "messages"),
    "text over max_model_len": ("ensemble", {"text_input": "word " * 1100}, "max_model_len"),
    "ids over max_model_len": ("ensemble", {"prompt_token_ids": [5] * 1025}, "max_model_len"),
    "messages over max_model_len": (
        "chat",
        {"messages": json.dumps([{"role": "user", "content": "word " * 1100}])},
        "max_model_len",
    ),
    "id out of range": ("ensemble", {"prompt_token_ids": [1, VOCAB_SIZE]}, "prompt_token_ids"),
    "negative id": ("ensemble", {"prompt_token_ids": [-1]}, "prompt_token_ids"),
    "text and ids": ("ensemble", {"text_input": "a", "prompt_token_ids": [5]}, "prompt_token_ids"),
    "max_tokens 0": ("ensemble", {"text_input": "a", "max_tokens": 0}, "max_tokens"),
    "max_tokens -1": ("ensemble", {"text_input": "a", "max_tokens": -1}, "max_tokens"),
    "max_tokens 4097": ("ensemble", {"text_input": "a", "max_tokens": 4097}, "max_tokens"),
    "temperature -1": ("ensemble", {"text_input": "a", "temperature": -1.0}, "temperature"),
    "temperature NaN": ("ensemble", {"text_input": "a", "temperature": math.nan}, "temperature"),
    "top_p 1.5": ("ensemble", {"text_input": "a", "top_p": 1.5}, "top_p"),
    "top_k -2": ("ensemble", {"text_input": "a", "top_k": -2}, "top_k"),
    "min_tokens -1": ("ensemble", {"text_input": "a", "min_tokens": -1}, "min_tokens"),
    "min_tokens above max_tokens": (
        "ensemble",
        {"text_input": "a", "min_tokens": 5, "max_tokens": 4},
        "min_tokens",
    ),
    "messages not JSON": ("chat", {"messages": "[{"}, "messages"),
    "messages not a list": ("chat", {"messages": json.dumps(USER)}, "messages"),
    "message not an object": ("chat", {"messages": "[1]"}, "messages"),
    "message without role": ("chat", {"messages": '[{"content": "Hi"}]'}, "role"),
    "message without content": ("chat", {"messages": '[{"role": "user"}]'}, "content"),
    "content not text": ("chat", {"messages": '[{"role": "user", "content": 1}]'}, "content"),
    "max_tokens 0 on chat": ("chat", {"messages": json.dumps([USER]), "max_tokens": 0}, "max_tok"),
    "sampling_parameters not JSON": (
        "vllm",
        {"text_input": "a", "sampling_parameters": "{"},
        "sampling_parameters",
    ),
    "sampling_parameters not an object": (
        "vllm",
        {"text_input": "a", "sampling_parameters": "[1]"},
        "sampling_parameters",
    ),
    "unknown sampling parameter": (
        "vllm",
        {"text_input": "a", "sampling_parameters": '{"temprature": 1}'},
        "temprature",
    ),
    "max_tokens 0 on vllm": (
        "vllm",
        {"text_input": "a", "sampling_parameters": '{"max_tokens": 0}'},
        "max_tokens",
    ),
}

ONE_TOKEN = '{"max_tokens": 1}'
# Sent straight to `engine`, which every client can reach.
ENGINE_CASES: dict[str, tuple[dict[str, Any], str]] = {
    "nothing at all": ({}, "request_key|prompt_token_ids|control"),
    "key too long": (
        {"request_key": "k" * 300, "prompt_token_ids": [5], "sampling_params": ONE_TOKEN},
        "request_key",
    ),
    "only a key": ({"request_key": "k"}, "prompt_token_ids"),
    "empty ids": ({"request_key": "k", "prompt_token_ids": []}, "prompt_token_ids"),
    "id out of range": (
        {"request_key": "k", "prompt_token_ids": [VOCAB_SIZE]},
        f"prompt_token_ids.*{VOCAB_SIZE}",
    ),
    "negative id": ({"request_key": "k", "prompt_token_ids": [5, -7]}, "prompt_token_ids.*-7"),
    "largest id": ({"request_key": "k", "prompt_token_ids": [2**31 - 1]}, "prompt_token_ids"),
    "too long": ({"request_key": "k", "prompt_token_ids": [5] * 1025}, "max_model_len"),
    "sampling_params not JSON": (
        {"request_key": "k", "prompt_token_ids": [5], "sampling_params": "{"},
        "sampling_params",
    ),
    "sampling_params a list": (
        {"request_key": "k", "prompt_token_ids": [5], "sampling_params": "[]"},
        "sampling_params",
    ),
    "unknown sampling parameter": (
        {"request_key": "k", "prompt_token_ids": [5], "sampling_params": '{"max_token": 1}'},
        "max_token",
    ),
    "max_tokens of a wrong type": (
        {"request_key": "k", "prompt_token_ids": [5], "sampling_params": '{"max_tokens": "1"}'},
        "max_tokens",
    ),
    "temperature NaN": (
        {"request_key": "k", "prompt_token_ids": [5], "sampling_params": '{"temperature": NaN}'},
        "temperature",
    ),
    "stop_token_ids out of range": (
        {
            "request_key": "k",
            "prompt_token_ids": [5],
            "sampling_params": json.dumps({"stop_token_ids": [VOCAB_SIZE]}),
        },
        "stop_token_ids",
    ),
    "control not JSON": ({"control": "stop"}, "control"),
    "control a list": ({"control": "[]"}, "control"),
    "unknown command": ({"control": '{"command": "reboot"}'}, "reboot|command"),
    "drain without the secret": ({"control": '{"command": "drain"}'}, "secret"),
    "stats with a wrong secret": ({"control": '{"command": "stats", "secret": "x"}'}, "secret"),
    "stop without a key": ({"control": '{"command": "stop"}'}, "request_key"),
}


def over_grpc(service: Service, model: str, inputs: dict[str, Any]) -> str:
    """The message of the only thing the server says: an error."""
    answers = []
    with pytest.raises(ServerError) as caught:
        answers.extend(service.client.stream(model, **inputs))
    assert answers == []
    return str(caught.value)


def over_http(service: Service, model: str, inputs: dict[str, Any], endpoint: str) -> str:
    answer = service.post(f"/v2/models/{model}/{endpoint}", inputs)
    assert answer.status == 400
    events = answer.body if endpoint == "generate_stream" else [answer.body]
    assert [list(event) for event in events] == [["error"]]
    return str(events[0]["error"])


def check_message(message: str, expected: str, elapsed_s: float) -> None:
    assert re.search(expected, message), message
    assert elapsed_s < 1
    assert "Traceback" not in message
    assert not re.search(r"\.py\b|(/[\w.-]+){2,}", message), "a path in the message"


def check_next_request(service: Service) -> None:
    completion = service.client.generate(text_input="Hi", max_tokens=1, ignore_eos=True)
    assert completion.num_output_tokens == 1


@pytest.mark.parametrize("transport", ["grpc", "generate", "generate_stream"])
@pytest.mark.parametrize("case", CASES)
def test_bad_input_is_refused_by_name(service, case, transport):
    model, inputs, expected = CASES[case]
    started = time.monotonic()
    if transport == "grpc":
        message = over_grpc(service, model, inputs)
    else:
        message = over_http(service, model, inputs, transport)
    check_message(message, expected, time.monotonic() - started)
    check_next_request(service)


@pytest.mark.parametrize("transport", ["grpc", "http"])
@pytest.mark.parametrize("case", ENGINE_CASES)
def test_garbage_sent_to_the_engine_is_refused_by_name(service, case, transport):
    inputs, expected = ENGINE_CASES[case]
    started = time.monotonic()
    if transport == "grpc":
        message = engine_error_over_grpc(service, inputs)
    else:
        message = service.generate("engine", inputs).body["error"]
    check_message(message, expected, time.monotonic() - started)
    check_next_request(service)


def engine_error_over_grpc(service: Service, inputs: dict[str, Any]) -> str:
    """The engine's own errors are data, for the sake of the ensembles (finish_reason: error)."""
    (answer,) = service.exchange(RawRequest("engine", inputs))
    if isinstance(answer, InferenceServerException):
        return answer.message()
    return str(answer.as_numpy("error")[0].decode())


def test_an_unknown_field_is_refused_over_http(service):
    """Over gRPC tritonserver itself refuses it."""
    body = {"text_input": "a", "max_token": 5}
    assert "max_token" in over_http(service, "ensemble", body, "generate")


@pytest.mark.parametrize(
    "body",
    [
        b"not json",
        b"[]",
        b'{"text_input": {"a": 1}}',
        b'{"text_input": null}',
        b'{"text_input": ["a", "b"]}',
        b'{"text_input": "a", "max_tokens": "5"}',
        b'{"text_input": "a", "max_tokens": 1.5}',
        b'{"text_input": "a", "temperature": "hot"}',
        b'{"text_input": "a", "stream": 2}',
        b'{"text_input": "a", "seed": -1}',
        b'{"text_input": "a", "prompt_token_ids": "a"}',
        b'{"messages": [{"role": "user", "content": "a"}]}',
    ],
)
@pytest.mark.parametrize("endpoint", ["generate", "generate_stream"])
def test_wrong_json_types_are_an_error_of_some_kind(service, body, endpoint):
    """tritonserver answers these before any model sees them, so the wording is its own."""
    answer = service.post(f"/v2/models/ensemble/{endpoint}", body)
    assert answer.status >= 400
    assert answer.body["error"]
    check_next_request(service)


def test_many_refusals_at_once_leave_nothing_behind(service):
    for _ in range(100):
        with pytest.raises(ServerError, match="max_tokens"):
            service.client.generate(text_input="a", max_tokens=0)
    check_next_request(service)
    assert service.is_idle()
