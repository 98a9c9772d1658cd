"""What the launcher finds and lays out before it starts tritonserver."""

import json
import os
import re
import stat
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from pagestream.cli import libpython
from pagestream.cli.control import base_url, reachable_host
from pagestream.cli.libpython import LibpythonError, find_libpython
from pagestream.cli.tritonserver import (
    STUB,
    RunDirectory,
    ServerOptions,
    SetupError,
    check_numpy,
    check_stub,
    command_line,
    environment,
    find_installation,
    sweep,
)
from pagestream.config import EngineConfig

VERSION = f"{sys.version_info.major}.{sys.version_info.minor}"


@pytest.fixture
def installation(monkeypatch):
    """The wheel's, whatever else is on this machine."""
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    return find_installation()


@pytest.fixture
def run(installation, tmp_path):
    directory = RunDirectory(installation, tmp_path)
    yield directory
    directory.remove()


def system_tritonserver(root: Path, stub: bytes | None) -> Path:
    """Laid out as in NVIDIA's containers."""
    binary = root / "bin" / "tritonserver"
    binary.parent.mkdir()
    binary.write_text("#!/bin/sh\n")
    binary.chmod(0o755)
    if stub is not None:
        (root / "backends" / "python").mkdir(parents=True)
        (root / "backends" / "python" / STUB).write_bytes(stub)
    return binary


def test_libpython_is_the_running_interpreters_own():
    library = find_libpython()
    assert library.is_file()
    assert re.fullmatch(rf"libpython{VERSION}\.so(\.1\.0)?", library.name)
    report = "import sys; print(sys.version)"
    loaded = subprocess.run(
        [sys.executable, "-c", report], capture_output=True, text=True, check=True
    ).stdout
    # The version string with its build date is part of the library.
    assert loaded.split()[0].encode() in library.read_bytes()


@pytest.mark.parametrize("place", ["LIBDIR", "MULTIARCH", "base_prefix"])
def test_libpython_is_looked_for_where_builds_put_it(tmp_path, monkeypatch, place):
    variables = {
        "LIBDIR": str(tmp_path / "lib"),
        "MULTIARCH": "x86_64-linux-gnu",
        "INSTSONAME": f"libpython{VERSION}.so.1.0",
        "LDLIBRARY": f"libpython{VERSION}.so",
    }
    monkeypatch.setattr(sysconfig, "get_config_var", variables.get)
    directory = {
        "LIBDIR": tmp_path / "lib",
        "MULTIARCH": tmp_path / "lib" / "x86_64-linux-gnu",
        "base_prefix": tmp_path / "prefix" / "lib",
    }[place]
    directory.mkdir(parents=True)
    (directory / f"libpython{VERSION}.so.1.0").touch()
    assert find_libpython(str(tmp_path / "prefix")) == directory / f"libpython{VERSION}.so.1.0"


@pytest.mark.parametrize(
    ("base_prefix", "advice"),
    [
        ("/usr", f"apt-get install libpython{VERSION}"),
        ("/opt/python", f"apt-get install python{VERSION}-venv libpython{VERSION}"),
    ],
)
def test_a_python_without_library_names_the_package(tmp_path, monkeypatch, base_prefix, advice):
    # A static build has no shared library to name.
    variables = {"LIBDIR": str(tmp_path), "INSTSONAME": f"libpython{VERSION}.a"}
    monkeypatch.setattr(sysconfig, "get_config_var", variables.get)
    monkeypatch.setattr(libpython, "library_directories", lambda prefix: [tmp_path])
    with pytest.raises(LibpythonError, match=re.escape(advice)):
        find_libpython(base_prefix)


def test_the_make_check_is_the_same_code():
    done = subprocess.run([sys.executable, "-I", libpython.__file__], capture_output=True)
    assert (done.returncode, done.stderr) == (0, b"")


def test_the_wheels_tritonserver_is_found_without_importing_pytriton(installation):
    assert installation.binary.name == "tritonserver"
    assert os.access(installation.binary, os.X_OK)
    assert installation.stub is not None
    assert installation.stub.parent.name == VERSION
    assert "pytriton" not in sys.modules


def test_a_tritonserver_on_path_comes_first_with_its_own_backends(tmp_path, monkeypatch):
    binary = system_tritonserver(tmp_path, f"libpython{VERSION}.so.1.0".encode())
    monkeypatch.setenv("PATH", f"{binary.parent}:{os.environ['PATH']}")
    found = find_installation()
    assert (found.binary, found.backends, found.stub) == (binary, tmp_path / "backends", None)
    run = RunDirectory(found, tmp_path / "run")
    try:
        assert run.backends == tmp_path / "backends"
    finally:
        run.remove()


@pytest.mark.parametrize(
    ("stub", "message"),
    [(None, "has no python backend"), (b"libpython3.8.so.1.0", r"runs Python 3\.8, but")],
)
def test_a_tritonserver_on_path_that_cannot_serve_us_is_refused(
    tmp_path, monkeypatch, stub, message
):
    binary = system_tritonserver(tmp_path, stub)
    monkeypatch.setenv("PATH", f"{binary.parent}:{os.environ['PATH']}")
    with pytest.raises(SetupError, match=message):
        find_installation()


def test_without_any_tritonserver_the_wheel_to_install_is_named(monkeypatch):
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    monkeypatch.setattr(sys, "path", [])
    with pytest.raises(SetupError, match=r"pip install --no-deps nvidia-pytriton"):
        find_installation()


def test_the_run_directory_is_private_and_holds_a_copy_of_the_stub(run, installation):
    assert stat.S_IMODE(run.path.stat().st_mode) == 0o700
    stub = run.backends / "python" / STUB
    assert not stub.is_symlink()
    assert os.access(stub, os.X_OK)
    assert stub.read_bytes() == installation.stub.read_bytes()
    for name in ("libtriton_python.so", "triton_python_backend_utils.py"):
        assert (run.backends / "python" / name).is_symlink()
    assert find_libpython().name in {path.name for path in run.libraries.iterdir()}


def test_taking_the_stubs_permissions_leaves_the_wheels_alone(run, installation):
    before = installation.stub.stat().st_mode
    (run.backends / "python" / STUB).chmod(0o100)
    assert installation.stub.stat().st_mode == before


def test_the_copied_stub_runs(run):
    check_stub(run)


def test_a_stub_whose_libraries_are_missing_is_told_at_once(run):
    for library in run.libraries.glob("libcudart*"):
        library.unlink()
    with pytest.raises(SetupError, match="libcudart"):
        check_stub(run)


def test_the_config_is_written_for_the_owner_only(run):
    config = EngineConfig(model="/somewhere", control_secret="s3cret")
    run.write_config(config)
    assert stat.S_IMODE(run.config.stat().st_mode) == 0o600
    assert EngineConfig.from_json(run.config) == config


def test_remove_leaves_nothing(installation, tmp_path):
    run = RunDirectory(installation, tmp_path)
    run.remove()
    assert list(tmp_path.iterdir()) == []


def test_sweep_removes_what_a_killed_launcher_left_and_nothing_in_use(run, installation, tmp_path):
    code = (
        "import os, signal, sys\n"
        "from pathlib import Path\n"
        "from pagestream.cli.tritonserver import RunDirectory, find_installation\n"
        "RunDirectory(find_installation(), Path(sys.argv[1]))\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    killed = subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=False)
    assert killed.returncode == -9
    assert len(list(tmp_path.iterdir())) == 2
    sweep(tmp_path)
    assert list(tmp_path.iterdir()) == [run.path]


def test_the_environment_leads_the_stub_to_this_python(run, monkeypatch):
    monkeypatch.setenv("PATH", "/usr/bin")
    monkeypatch.setenv("LD_LIBRARY_PATH", "/other")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    values = environment(run)
    assert values["PATH"] == f"{sys.prefix}/bin:/usr/bin"
    assert values["LD_LIBRARY_PATH"] == f"{run.libraries}:/other"
    assert values["PAGESTREAM_CONFIG"] == str(run.config)
    assert values["OMP_WAIT_POLICY"] == "PASSIVE"
    assert 0 < int(values["GOMP_SPINCOUNT"]) <= 300_000
    assert values["HF_HUB_OFFLINE"] == "1"
    seen = subprocess.run(
        ["python3", "-c", "import json, sys; print(json.dumps([sys.prefix, sys.version]))"],
        env=values,
        capture_output=True,
        check=True,
    ).stdout
    assert json.loads(seen) == [sys.prefix, sys.version]


@pytest.mark.parametrize("model_control", ["none", "explicit"])
def test_tritonserver_knows_every_flag_it_is_given(run, installation, model_control):
    options = ServerOptions(
        http_port=1,
        grpc_port=2,
        metrics_port=3,
        host="127.0.0.1",
        model_repository=Path("/models"),
        model_control=model_control,
        exit_timeout_secs=4,
        log_verbose=0,
    )
    binary, *arguments = command_line(installation, run, options)
    help_text = subprocess.run(
        [binary, "--help"], env=environment(run), capture_output=True, text=True
    )
    known = set(re.findall(r"^\s+(--[\w-]+)", help_text.stdout + help_text.stderr, re.MULTILINE))
    given = {argument.split("=")[0] for argument in arguments}
    assert given <= known
    assert "--model-load-thread-count=1" in arguments
    assert ("--load-model=*" in arguments) == (model_control == "explicit")


def test_numpy_is_one_that_the_python_backend_survives():
    check_numpy()


def test_a_numpy_that_it_would_not_survive_is_refused(monkeypatch):
    monkeypatch.setattr("importlib.metadata.version", {"numpy": "2.0.2"}.get)
    with pytest.raises(SetupError, match=r"numpy 2\.0\.2 .* pip install 'numpy<2'"):
        check_numpy()


@pytest.mark.parametrize(
    ("host", "url"),
    [
        ("0.0.0.0", "http://127.0.0.1:8000"),
        ("::", "http://[::1]:8000"),
        ("192.0.2.1", "http://192.0.2.1:8000"),
    ],
)
def test_a_server_on_all_addresses_is_reached_at_a_local_one(host, url):
    assert base_url(reachable_host(host), 8000) == url
