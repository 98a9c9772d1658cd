"""Failures inside a request and the end of a server: nobody is left waiting."""

import shutil
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from e2e_support import Service

from pagestream.cli.server_process import start_server

pytestmark = [pytest.mark.server, pytest.mark.smollm2]

REPOSITORY = Path(__file__).parents[2] / "model_repository"
FAULTY = "max_tokens=77"


@pytest.fixture(scope="module")
def faulty_repository(tmp_path_factory) -> Path:
    """The model repository with a decoder that fails on purpose."""
    repository = tmp_path_factory.mktemp("repository") / "model_repository"
    shutil.copytree(REPOSITORY, repository)
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


def test_sigterm_lets_running_streams_finish(service):
    """Last in this file: it ends the server."""
    streams = [
        service.client.stream(text_input=f"Story {i}", max_tokens=60, ignore_eos=True)
        for i in range(4)
    ]
    first = [next(stream) for stream in streams]
    service.server.send_signal(signal.SIGTERM)
    with ThreadPoolExecutor(max_workers=4) as pool:
        rest = list(pool.map(list, streams))
    for i in range(4):
        chunks = [first[i], *rest[i]]
        assert sum(chunk.num_output_tokens for chunk in chunks) == 60
        assert chunks[-1].finish_reason == "length"
    assert service.server.wait(30) == 0
