"""Real servers for the whole suite: of the real model, and of a script model per tokenizer family.
Tests that break or stop a server start their own."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import demand_chains
import pytest
from e2e_support import ScriptService, Service
from script_model import BYTE_LEVEL, METASPACE, ScriptModel

from pagestream.cli.server_process import start_server
from pagestream.model_store import DEFAULT_MODEL, resolve_model


@pytest.fixture(scope="session")
def model() -> str:
    return str(resolve_model(DEFAULT_MODEL))


@pytest.fixture(scope="session")
def service(model) -> Iterator[Service]:
    """16 places in the batch, and so few blocks that a leaked one shows."""
    with start_server(model, max_model_len=1024, num_blocks=64, max_num_seqs=16) as server:
        service = Service(server)
        yield service
        service.client.close()


@pytest.fixture(scope="session")
def tokenizer(model):
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(model)


@pytest.fixture(scope="session")
def scripts(tmp_path_factory) -> Iterator[dict[str, ScriptService]]:
    """By tokenizer family. They answer after every token, and no earlier on a busy machine."""
    directories = {family: tmp_path_factory.mktemp(family) for family in (BYTE_LEVEL, METASPACE)}
    models = {family: demand_chains.write(family, path) for family, path in directories.items()}

    def start(model: ScriptModel) -> ScriptService:
        intervals = {"stream_interval_ms": 0, "heartbeat_interval_ms": 5000}
        server = start_server(str(model.directory), max_num_seqs=64, num_blocks=512, **intervals)
        return ScriptService(server, model)

    # A server ends with the thread that started it: these last until the pool is shut down.
    with ThreadPoolExecutor(len(models)) as pool:
        services = dict(zip(models, pool.map(start, models.values()), strict=True))
        yield services
        for service in services.values():
            service.client.close()
        list(pool.map(lambda service: service.server.stop(), services.values()))


@pytest.fixture
def script(scripts) -> ScriptService:
    """For what does not depend on the tokenizer."""
    return scripts[BYTE_LEVEL]


@pytest.fixture(params=[BYTE_LEVEL, METASPACE])
def each_script(request, scripts) -> ScriptService:
    return scripts[request.param]
