"""One real server for the whole suite; tests that break or stop a server start their own."""

from collections.abc import Iterator

import pytest
from e2e_support import Service

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
