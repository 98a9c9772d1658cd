"""Every shipped configuration, compiled for GPUs that are not there, keeps what was asked of it.

`make kernels-aot` runs all of it. Worker processes compile, so that nothing here meets the fake
driver, and tests read what they found. Registers are compared with those in ``registers.json``;
``--rewrite-registers`` renews them for the Triton that is installed.
"""

import multiprocessing
import os
from concurrent.futures import ProcessPoolExecutor

import pytest
import shipped
from compile_kernels import SHARED_LIMIT, Compiled, compile_for
from registers import MAX_GROWTH, Registers


def _parameter(configuration, capability):
    quick = configuration.quick and capability == 90
    return pytest.param(
        configuration.name,
        capability,
        marks=[] if quick else pytest.mark.long,
        id=f"sm_{capability} {configuration.name}",
    )


PARAMETERS = [
    _parameter(configuration, capability)
    for configuration in shipped.BY_NAME.values()
    for capability in configuration.capabilities
]


def compile_configuration(name: str, capability: int) -> list[Compiled]:
    return compile_for(capability, shipped.BY_NAME[name].launch)


def _start_worker(cache):
    os.environ["TRITON_CACHE_DIR"] = cache


@pytest.fixture(scope="module")
def compiled(request, tmp_path_factory):
    """Futures by name and capability, of what is going to be asked for."""
    workers = ProcessPoolExecutor(
        os.cpu_count(),
        multiprocessing.get_context("spawn"),
        _start_worker,
        (str(tmp_path_factory.mktemp("triton-cache")),),
    )
    with workers:
        keys = [
            (item.callspec.params["name"], item.callspec.params["capability"])
            for item in request.session.items
            if item.path == request.path
        ]
        yield {key: workers.submit(compile_configuration, *key) for key in keys}
        workers.shutdown(cancel_futures=True)


@pytest.fixture(scope="module")
def registers(request):
    golden = Registers(rewrite=request.config.getoption("--rewrite-registers", default=False))
    yield golden
    golden.save()


@pytest.mark.parametrize(("name", "capability"), PARAMETERS)
def test_configuration(name, capability, compiled, registers, compile_table):
    checks = shipped.BY_NAME[name].kernels
    kernels = compiled[name, capability].result()
    compile_table.extend((capability, name, kernel) for kernel in kernels)
    assert {kernel.name for kernel in kernels} == set(checks)
    for kernel in kernels:
        assert kernel.stack == 0, f"{kernel.name}: {kernel.stack} bytes of stack: registers spill"
        assert kernel.local == 0, f"{kernel.name}: {kernel.local} accesses to local memory"
        limit = SHARED_LIMIT[capability] * 1024
        assert kernel.shared <= limit, f"{kernel.name}: {kernel.shared} bytes, there are {limit}"
        checks[kernel.name](kernel, capability)
        allowed = registers.known(capability, name, kernel) * MAX_GROWTH
        assert kernel.registers <= allowed, f"{kernel.name}: {kernel.registers}, had {allowed:.0f}"
