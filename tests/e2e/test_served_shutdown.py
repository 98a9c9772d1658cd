"""Failures inside a request and the end of a server: nobody is left waiting."""

import re
import shutil
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from e2e_support import Service, wait_until

from pagestream.cli.server_process import start_server
from pagestream_client import ServerError

pytestmark = [pytest.mark.server, pytest.mark.smollm2]

REPOSITORY = Path(__file__).parents[2] / "model_repository"
CHAT = [{"role": "user", "content": "Tell me a story."}]
FAULT = "fail at the third chunk"
FAULTY_DECODER = f"""

from pagestream.serving import answers


class FaultyDecoder(answers.StreamDecoder):
    def __init__(self, *args, stop, **options):
        super().__init__(*args, stop=stop, **options)
        self._countdown = 3 if {FAULT!r} in stop else 0

    def append(self, *args, **options):
        self._countdown -= 1
        if self._countdown == 0:
            raise RuntimeError("injected in /some/where/decoder.py")
        return super().append(*args, **options)


answers.StreamDecoder = FaultyDecoder
"""


@pytest.fixture(scope="module")
def faulty_repository(tmp_path_factory) -> Path:
    """The model repository with a decoder that fails when a request asks for it."""
    repository = tmp_path_factory.mktemp("repository") / "model_repository"
    shutil.copytree(REPOSITORY, repository)
    for name in ("postprocessing", "postprocessing_batched"):
        with (repository / name / "1" / "model.py").open("a", encoding="utf-8") as shim:
            shim.write(FAULTY_DECODER)
    return repository


@pytest.fixture(scope="module")
def service(model, faulty_repository) -> Iterator[Service]:
    """A server of its own, which the last test stops."""
    with start_server(
        model,
        max_model_len=1024,
        num_blocks=32,
        model_repository=faulty_repository,
        model_control="explicit",
    ) as server:
        service = Service(server)
        yield service
        service.client.close()


def unload(service: Service, name: str) -> float:
    """Seconds until the model was gone."""

    def is_unloaded() -> bool:
        models = service.post("/v2/repository/index", {}).body
        return {"UNAVAILABLE"} == {m["state"] for m in models if m["name"] == name}

    assert service.post(f"/v2/repository/models/{name}/unload", {}).status == 200
    return wait_until(is_unloaded, 2, f"{name} unloaded")


def load(service: Service, name: str) -> None:
    assert service.post(f"/v2/repository/models/{name}/load", {}).status == 200


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("ensemble", ["ensemble", "chat"])
def test_a_decoder_that_fails_mid_stream_ends_in_an_error(service, ensemble, stream):
    prompt = {"text_input": "A story:"} if ensemble == "ensemble" else {"messages": CHAT}
    params = {**prompt, "max_tokens": 200, "ignore_eos": True, "stream": stream}
    chunks = []
    with pytest.raises(ServerError, match="text") as caught:
        chunks.extend(service.client.stream(ensemble, stop_words=[FAULT], **params))
    assert not re.search(r"/|\.py|Traceback|injected", str(caught.value))
    wait_until(service.is_idle, 1, "idle after the failure")
    assert service.client.generate(ensemble, **{**params, "max_tokens": 4}).num_output_tokens == 4
    unload(service, ensemble)
    load(service, ensemble)


def test_a_decoder_that_fails_is_an_error_event_over_http(service):
    body = {"text_input": "A story:", "max_tokens": 200, "stop_words": [FAULT], "stream": True}
    *before, last = service.generate_stream("ensemble", body).body
    assert before
    assert all(event["text_output"] for event in before)
    assert list(last) == ["error"]
    unload(service, "ensemble")
    load(service, "ensemble")


def test_an_ensemble_with_cancelled_streams_can_be_unloaded(service):
    for _ in range(4):
        with service.client.stream(text_input="A story:", max_tokens=200) as stream:
            next(stream)
    wait_until(service.is_idle, 1, "idle after the cancels")
    unload(service, "ensemble")
    load(service, "ensemble")


def test_answers_that_end_leave_nothing_that_keeps_the_ensemble(service):
    with ThreadPoolExecutor(max_workers=16) as pool:
        list(
            pool.map(
                lambda i: service.client.generate(text_input=f"Story {i}", max_tokens=8), range(48)
            )
        )
    unload(service, "ensemble")
    load(service, "ensemble")


def test_sigterm_lets_running_streams_finish(service):
    """Last in this file: it ends the server."""
    streams = [
        service.client.stream(text_input=f"Story {i}", max_tokens=40, ignore_eos=True)
        for i in range(4)
    ]
    first = [next(stream) for stream in streams]
    service.server.send_signal(signal.SIGTERM)
    with ThreadPoolExecutor(max_workers=4) as pool:
        rest = list(pool.map(list, streams))
    for i in range(4):
        chunks = [first[i], *rest[i]]
        assert sum(chunk.num_output_tokens for chunk in chunks) == 40
        assert chunks[-1].finish_reason == "length"
    assert service.server.wait(30) == 0
