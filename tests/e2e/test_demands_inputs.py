"""Demands 17, 44-48: what clients send in other forms, by mistake, or at random."""

import json
import re
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from e2e_support import ENSEMBLES, MODES, RawRequest, is_final, text_of
from tritonclient.grpc import InferenceServerClient
from tritonclient.utils import InferenceServerException, triton_to_np_dtype

pytestmark = pytest.mark.server

PROMPTS = {"text_input", "prompt_token_ids", "messages"}
MALFORMED = ["{", "[1]", '"max_tokens"', "null", "{'max_tokens': 5}", '{"max_tokens": }', "\x00"]


@MODES
@pytest.mark.parametrize("ensemble", ENSEMBLES)
@pytest.mark.parametrize("malformed", MALFORMED)
def test_row_17_malformed_sampling_parameters_hurt_only_their_request(
    script, ensemble, malformed, stream
):
    """Sent between good ones, over one stream, so that they come at the same time."""
    requests = [script.raw("numbers", ensemble, stream=stream, request_id=f"{i}") for i in range(5)]
    for request in requests[1::2]:
        request.values["sampling_parameters"] = malformed
    results = script.exchange(*requests)
    errors = [r.message() for r in results if isinstance(r, InferenceServerException)]
    assert len(errors) == 2
    for error in errors:
        assert re.search("sampling_parameters (is not valid JSON|must be a JSON object)", error)
        assert "NoneType" not in error
    texts: dict[str, str] = {}
    for result in results:
        if not isinstance(result, InferenceServerException):
            request_id = result.get_response().id
            texts[request_id] = texts.get(request_id, "") + text_of(result)
    assert texts.keys() == {"0", "2", "4"}
    assert all(text.endswith(script.script.text("numbers")) for text in texts.values())


SHAPES = [
    ("ensemble", "text_input", [1], "Expected [-1,1], got [1]"),
    ("ensemble", "text_input", [1, 2], "Expected [-1,1], got [1,2]"),
    ("vllm", "text_input", [1, 1], "Expected [1], got [1,1]"),
    ("vllm", "text_input", [2], "Expected [1], got [2]"),
    ("chat", "messages", [1, 1], "Expected [1], got [1,1]"),
]


@MODES
@pytest.mark.parametrize(("ensemble", "name", "shape", "words"), SHAPES)
def test_row_44_shape_errors_name_input_expected_and_got(
    script, ensemble, name, shape, words, stream
):
    """They are tritonserver's, of the shapes in our configuration."""
    prompt = np.full(shape, b"Say #numbers", np.object_)
    (error,) = script.exchange(RawRequest(ensemble, {name: prompt, "stream": stream}))
    assert f"input '{name}'" in error.message()
    assert words in error.message()
    assert is_final(script.exchange(script.raw("numbers", ensemble, stream=stream))[-1])


@MODES
@pytest.mark.parametrize("ensemble", ENSEMBLES)
def test_row_45_options_come_as_request_parameters_or_as_json(script, ensemble, stream):
    """Lists only as JSON in sampling_parameters: tritonserver's parameters are single values."""
    for options in (
        {"sampling_parameters": json.dumps({"temperature": 0, "stop": [".", "lazy", " fox"]})},
        {"sampling_parameters": json.dumps({"temperature": 0, "stop": " fox"})},
        {"parameters": {"temperature": 0, "stop": " fox"}},
        {"temperature": 0, "stop": " fox"},
    ):
        answer = script.generate_stream(ensemble, http_body(script, ensemble, stream) | options)
        assert answer.status == 200, answer
        text = "".join(event["text_output"] for event in answer.body)
        assert text == " The quick brown"


def http_body(script, ensemble, stream):
    if ensemble == "chat":
        prompt_token_ids = script.script.prompt_token_ids("words")
        return {"prompt_token_ids": prompt_token_ids, "stream": stream}
    body = {"text_input": script.script.prompt("words"), "stream": stream}
    return body | {"exclude_input_in_output": True}


@MODES
@pytest.mark.parametrize("ensemble", ENSEMBLES)
@pytest.mark.parametrize(
    ("options", "pattern"),
    [
        ({"parameters": {"temprature": 0.5}}, "temprature.*temperature"),
        ({"max_token": 5}, "max_token.*max_tokens"),
        ({"sampling_parameters": '{"stop_word": ["a"]}'}, "stop_word.*stop_words"),
        ({"sampling_parameters": '{"nonsense": 1}'}, "nonsense.*known: .*max_tokens"),
        ({"parameters": {"stop": ["."]}}, "parameter 'stop' has invalid type"),
    ],
)
def test_row_45_what_would_be_ignored_is_refused(script, ensemble, options, pattern, stream):
    body = http_body(script, ensemble, stream) | options
    answer = script.generate_stream(ensemble, body)
    assert answer.status == 400
    (event,) = answer.body if isinstance(answer.body, list) else [answer.body]
    assert re.search(pattern, event["error"])


@MODES
@pytest.mark.parametrize("ensemble", ENSEMBLES)
@pytest.mark.parametrize("place", ["sampling_parameters", "parameters"])
def test_row_46_numbers_may_be_strings(script, ensemble, place, stream):
    """As the vLLM backend's own client and genai-perf send them."""
    plain = {"max_tokens": 7, "min_tokens": 7, "top_k": 1, "seed": 3, "ignore_eos": True}
    texts = []
    for options in (plain, {name: str(value) for name, value in plain.items()}):
        values = script.raw("words", ensemble, stream=stream).values
        values.pop("sampling_parameters", None)
        if place == "sampling_parameters":
            values["sampling_parameters"] = json.dumps(options)
        parameters = options if place == "parameters" else None
        results = script.exchange(RawRequest(ensemble, values, parameters=parameters))
        texts.append("".join(map(text_of, results)))
    assert texts[0].endswith(" The quick brown foxes jump\n")
    assert texts[1] == texts[0]


@MODES
@pytest.mark.parametrize("ensemble", ENSEMBLES)
@pytest.mark.parametrize(("name", "value"), [("max_tokens", "many"), ("ignore_eos", "maybe")])
def test_row_46_strings_that_are_no_numbers_are_refused(script, ensemble, name, value, stream):
    body = http_body(script, ensemble, stream)
    body["sampling_parameters"] = json.dumps({name: value})
    answer = script.generate_stream(ensemble, body)
    assert answer.status == 400
    assert name in answer.body[0]["error"]


@MODES
@pytest.mark.parametrize("name", ["min_length", "min_tokens"])
def test_row_47_genai_perf_gets_answers_of_the_length_it_asks_for(script, name, stream):
    """Its bodies for TensorRT-LLM, in the older and the newer name, deterministic; the chain's
    best successor is an end of sequence at every place."""
    values = {
        "text_input": script.script.prompt("eager"),
        "max_tokens": 6,
        name: 6,
        "exclude_input_in_output": True,
        "stream": stream,
        "temperature": 0.0,
    }
    results = script.exchange(RawRequest("ensemble", values, id="0"))
    assert "".join(map(text_of, results)) == "abcdef"
    assert sum(r.as_numpy("num_output_tokens").item() for r in results) == 6


@MODES
def test_row_47_and_for_vllm(script, stream):
    options = {"max_tokens": "6", "min_tokens": "6", "temperature": "0"}
    values = {
        "text_input": script.script.prompt("eager"),
        "exclude_input_in_output": True,
        "stream": stream,
        "sampling_parameters": json.dumps(options),
        "return_num_output_tokens": True,
    }
    results = script.exchange(RawRequest("vllm", values, id="0"))
    assert "".join(map(text_of, results)) == "abcdef"
    assert sum(r.as_numpy("num_output_tokens").item() for r in results) == 6


def test_row_47_both_names_at_once_are_refused(script):
    body = http_body(script, "ensemble", False) | {"min_length": 2, "min_tokens": 2}
    assert re.search("min_length|min_tokens", script.generate("ensemble", body).body["error"])


@pytest.mark.parametrize("ensemble", ENSEMBLES)
def test_row_48_random_values_of_all_inputs_get_an_answer_or_an_error(script, ensemble):
    """As perf_analyzer fills them without --input-data: also strings of no length, flags either
    way (so both modes), numbers out of all ranges. `make perf-analyzer` lets it send its own."""
    with InferenceServerClient(script.grpc_url) as client:
        specs = client.get_model_metadata(ensemble, as_json=True)["inputs"]

    def send(seed: int) -> str:
        results = script.exchange(random_request(ensemble, specs, np.random.default_rng(seed)))
        return type(results[-1]).__name__

    with ThreadPoolExecutor(8) as pool:
        outcomes = list(pool.map(send, range(80)))
    assert set(outcomes) == {"InferResult", "InferenceServerException"}
    for stream in (True, False):
        answer = script.ask("words", ensemble, stream=stream)
        assert answer.text_output == script.script.text("words")


def random_request(ensemble, specs, rng) -> RawRequest:
    """One prompt and from none to all of the other inputs."""
    prompts = [spec for spec in specs if spec["name"] in PROMPTS]
    share = rng.choice([0.0, 0.05, 0.3, 1.0])
    others = [spec for spec in specs if spec["name"] not in PROMPTS and rng.random() < share]
    values = {}
    for spec in [rng.choice(prompts), *others]:
        shape = [int(dim) if int(dim) > 0 else int(rng.integers(4)) for dim in spec["shape"]]
        values[spec["name"]] = random_tensor(spec["datatype"], shape, rng)
    return RawRequest(ensemble, values)


def random_tensor(datatype, shape, rng) -> np.ndarray:
    dtype = triton_to_np_dtype(datatype)
    size = int(np.prod(shape))
    if datatype == "BYTES":
        texts = [
            b"",
            b"Say #words",
            b"[]",
            b"{}",
            rng.bytes(20),
            b'[{"role":"user","content":"a"}]',
        ]
        return np.array(rng.choice(np.array(texts, np.object_), size), np.object_).reshape(shape)
    if datatype == "BOOL":
        return rng.integers(2, size=shape).astype(bool)
    if np.issubdtype(dtype, np.floating):
        return rng.choice([0.0, 0.7, 1.0, -1.0, 6e4, np.nan, np.inf], shape).astype(dtype)
    limits = np.iinfo(dtype)
    small = rng.integers(0, 5, size)
    anything = rng.integers(limits.min, limits.max, size, dtype=dtype)
    return np.where(rng.random(size) < 0.7, small, anything).astype(dtype).reshape(shape)
