"""Finds tritonserver and lays out what one start of it needs: backend, libraries, environment.

Owns the run directory (private, removed at the end) and the command line. It does not start or
watch anything (supervisor.py), and never imports pytriton, whose wheel only carries the binary.
"""

from __future__ import annotations

import fcntl
import importlib.metadata
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

from pagestream.cli import shared_memory
from pagestream.cli.libpython import find_libpython
from pagestream.config import EngineConfig
from pagestream.model_store import cache_directory

STUB = "triton_python_backend_stub"
BACKEND_FILES = ("libtriton_python.so", "triton_python_backend_utils.py")
REGIONS_FILE = "shm_regions"


class SetupError(Exception):
    """tritonserver cannot be started here; the message says what to install or change."""


@dataclass(frozen=True)
class Installation:
    """A tritonserver binary and where its python backend comes from."""

    binary: Path
    backends: Path
    stub: Path | None
    """The stub to copy into the run directory; None: `backends` is complete and used as it is."""
    libraries: Path | None
    """Where the wheel keeps the libraries that the stub needs."""


def find_installation() -> Installation:
    """A tritonserver on PATH (or where its containers have it), else the one of the wheel."""
    found = shutil.which("tritonserver") or shutil.which(
        "tritonserver", path="/opt/tritonserver/bin"
    )
    if found:
        return _system_installation(Path(found).resolve())
    spec = importlib.util.find_spec("pytriton")
    for location in (spec.submodule_search_locations or []) if spec else []:
        root = Path(location) / "tritonserver"
        if (root / "bin" / "tritonserver").is_file():
            return _wheel_installation(root)
    raise SetupError(
        "no tritonserver on PATH, and the nvidia-pytriton wheel, which carries one, is not "
        f"installed. What to do: {sys.executable} -m pip install --no-deps nvidia-pytriton==0.7.0"
    )


def _system_installation(binary: Path) -> Installation:
    backends = binary.parent.parent / "backends"
    stub = backends / "python" / STUB
    if not stub.is_file():
        raise SetupError(
            f"{binary} has no python backend in {backends / 'python'}: use a tritonserver that "
            "has one, or take this one off PATH so that the nvidia-pytriton wheel's is used"
        )
    built_for = set(re.findall(rb"libpython(3\.\d+)\.so", stub.read_bytes()))
    if built_for and python_version().encode() not in built_for:
        versions = ", ".join(sorted(version.decode() for version in built_for))
        raise SetupError(
            f"the python backend of {binary} runs Python {versions}, but pagestream is installed "
            f"in Python {python_version()}: install pagestream with Python {versions}"
        )
    return Installation(binary=binary, backends=backends, stub=None, libraries=None)


def _wheel_installation(root: Path) -> Installation:
    stub = root / "python_backend_stubs" / python_version() / STUB
    if not stub.is_file():
        versions = sorted(path.parent.name for path in root.glob(f"python_backend_stubs/*/{STUB}"))
        raise SetupError(
            f"the nvidia-pytriton wheel has no python backend for Python {python_version()} "
            f"(it has {', '.join(versions)}): set up with Python 3.11 or 3.12"
        )
    return Installation(
        binary=root / "bin" / "tritonserver",
        backends=root / "backends",
        stub=stub,
        libraries=root.parents[1] / "nvidia_pytriton.libs",
    )


def python_version() -> str:
    return f"{sys.version_info.major}.{sys.version_info.minor}"


def check_numpy() -> None:
    version = importlib.metadata.version("numpy")
    if int(version.split(".")[0]) >= 2:
        raise SetupError(
            f"numpy {version} is installed, and tritonserver's python backend crashes on numpy 2 "
            f"and later. What to do: {sys.executable} -m pip install 'numpy<2'"
        )


class RunDirectory:
    """The files of one launcher: config, backend, library, and what to clean up after it.

    Its lock is held as long as the launcher lives, so the next launcher can tell the directories
    that killed ones left behind, and remove them together with their shared memory.
    """

    def __init__(self, installation: Installation, parent: Path | None = None) -> None:
        parent = parent or cache_directory() / "run"
        parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        sweep(parent)
        # The cache, not XDG_RUNTIME_DIR: the stub is run from here, and that may be noexec.
        self.path = Path(tempfile.mkdtemp(prefix="serve-", dir=parent))
        self._lock = _try_lock(self.path)
        self.config = self.path / "engine.json"
        self.backends = _lay_out_backends(installation, self.path)
        self.libraries = _lay_out_libraries(installation, self.path)

    def write_config(self, config: EngineConfig) -> None:
        self.config.touch(mode=0o600)
        self.config.write_text(config.to_json(), encoding="utf-8")

    def note_regions(self, regions: set[str]) -> None:
        (self.path / REGIONS_FILE).write_text("\n".join(sorted(regions)), encoding="utf-8")

    def remove(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)
        if self._lock is not None:
            self._lock.close()


def _lay_out_backends(installation: Installation, run: Path) -> Path:
    if installation.stub is None:
        return installation.backends
    python = run / "backends" / "python"
    python.mkdir(parents=True)
    for name in BACKEND_FILES:
        (python / name).symlink_to(installation.backends / "python" / name)
    # A copy: tritonserver may take away its permissions, and follows links when it does.
    shutil.copyfile(installation.stub, python / STUB)
    (python / STUB).chmod(0o700)
    return run / "backends"


def _lay_out_libraries(installation: Installation, run: Path) -> Path:
    """Only what the stub needs: nothing else may come before tritonserver's own libraries."""
    libraries = run / "lib"
    libraries.mkdir()
    libpython = find_libpython()
    (libraries / libpython.name).symlink_to(libpython.resolve())
    if installation.stub and installation.libraries:
        # The stub finds these relative to where it lies, so its copy would not.
        needed = installation.stub.read_bytes()
        for library in installation.libraries.glob("*.so*"):
            if library.name.encode() in needed:
                (libraries / library.name).symlink_to(library)
    return libraries


def _try_lock(directory: Path) -> TextIO | None:
    lock = (directory / "lock").open("w")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        lock.close()
        return None
    return lock


def sweep(parent: Path) -> None:
    """Remove what launchers that were killed left: run directories and shared memory."""
    for directory in parent.glob("serve-*"):
        # One without a lock file was made a moment ago and is about to be locked.
        if not (directory / "lock").is_file() or (lock := _try_lock(directory)) is None:
            continue
        with lock:
            regions = directory / REGIONS_FILE
            if regions.is_file():
                shared_memory.remove(set(regions.read_text(encoding="utf-8").split()))
            shutil.rmtree(directory, ignore_errors=True)


@dataclass(frozen=True)
class ServerOptions:
    """What the operator may choose about tritonserver itself; ports are resolved (never 0)."""

    http_port: int
    grpc_port: int
    metrics_port: int
    host: str
    model_repository: Path
    model_control: str
    exit_timeout_secs: int
    log_verbose: int


def command_line(
    installation: Installation, run: RunDirectory, options: ServerOptions
) -> list[str]:
    command = [
        str(installation.binary),
        f"--model-repository={options.model_repository}",
        f"--backend-directory={run.backends}",
        f"--model-control-mode={options.model_control}",
        # Loading python models in parallel on few cores makes tritonserver abort.
        "--model-load-thread-count=1",
        # Every model states its config in full; completing it would start each model twice.
        "--disable-auto-complete-config",
        f"--exit-timeout-secs={options.exit_timeout_secs}",
        f"--http-address={options.host}",
        f"--grpc-address={options.host}",
        f"--metrics-address={options.host}",
        f"--http-port={options.http_port}",
        # Tells preprocessing which requests came over gRPC; see its http_stream.
        "--grpc-header-forward-pattern=user-agent",
        f"--grpc-port={options.grpc_port}",
        f"--metrics-port={options.metrics_port}",
        f"--log-verbose={options.log_verbose}",
        # Of the threads that pass responses on; the default of 32 wakes more than it needs.
        "--backend-config=python,thread-pool-size=4",
    ]
    if options.model_control == "explicit":
        command.append("--load-model=*")
    return command


def environment(run: RunDirectory) -> dict[str, str]:
    """The stub ignores VIRTUAL_ENV and PYTHONPATH and takes the first python3 on PATH."""
    values = dict(os.environ)
    values["PATH"] = _prepend(str(Path(sys.prefix) / "bin"), values.get("PATH"))
    values["LD_LIBRARY_PATH"] = _prepend(str(run.libraries), values.get("LD_LIBRARY_PATH"))
    # Compute threads that spin for ever would starve the token path; but within a step, where one
    # waits for another that the token path has interrupted, sleeping and waking costs more.
    values["OMP_WAIT_POLICY"] = "PASSIVE"
    values.setdefault("GOMP_SPINCOUNT", "300000")
    values["PAGESTREAM_CONFIG"] = str(run.config)
    return values


def check_stub(run: RunDirectory) -> None:
    """Without this, a stub that cannot even start would be noticed half a minute per model late."""
    stub = run.backends / "python" / STUB
    done = subprocess.run(
        [stub], env=environment(run), stdin=subprocess.DEVNULL, capture_output=True, check=False
    )
    # Without arguments it exits with 1; 127 is the dynamic linker's.
    if done.returncode == 127:
        reason = done.stderr.decode("utf-8", errors="replace").strip()
        raise SetupError(f"tritonserver's python backend cannot be run here: {reason}")


def _prepend(first: str, rest: str | None) -> str:
    return f"{first}{os.pathsep}{rest}" if rest else first
