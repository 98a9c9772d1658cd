"""Where a run took place: versions, hardware, and which model, so that it can be repeated.

Reads this machine only; of a server elsewhere it knows what the server says of itself. Called once
per run by the command line.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import os
import platform
import shutil
import subprocess
from pathlib import Path
from typing import Any

PACKAGES = ("pagestream", "torch", "transformers", "triton", "numpy", "tritonclient")
_INDEX = "model.safetensors.index.json"


def versions() -> dict[str, str]:
    """Of what is installed beside this; ``source`` is the commit, where there is a checkout."""
    found = {"python": platform.python_version()}
    if commit := _commit(Path(__file__).resolve().parents[3]):
        found["source"] = commit
    for package in PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[package] = importlib.metadata.version(package)
    return found


def hardware() -> dict[str, Any]:
    """CPU model, cores this process may use, memory, GPUs, and what else the machine was doing."""
    return {
        "cpu": _cpu_model(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "gpus": _gpus(),
        "system": f"{platform.system()} {platform.release()}",
        "load_average_before": round(os.getloadavg()[0], 2),
    }


def model_revision(directory: Path) -> dict[str, str]:
    """Hashes that tell two checkpoints apart without reading gigabytes: of the config, and of the
    weights' index (or, without one, of the files' names and sizes)."""
    index = directory / _INDEX
    if index.is_file():
        weights = index.read_bytes()
    else:
        files = sorted(directory.glob("*.safetensors"))
        weights = "".join(f"{file.name} {file.stat().st_size}\n" for file in files).encode()
    return {
        "name": directory.name,
        "config_sha256": _digest((directory / "config.json").read_bytes()),
        "weights_sha256": _digest(weights),
    }


def _commit(root: Path) -> str | None:
    """Of the checkout at ``root``, with a mark if files were changed since."""
    if not (root / ".git").exists():
        return None
    describe = ["git", "-C", str(root), "describe", "--always", "--dirty"]
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        return subprocess.run(
            describe, capture_output=True, text=True, timeout=10, check=True
        ).stdout.strip()
    return None


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:16]


def _cpu_model() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _gpus() -> list[str]:
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return []
    query = [tool, "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"]
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        done = subprocess.run(query, capture_output=True, text=True, timeout=10, check=True)
        return [line.strip() for line in done.stdout.splitlines() if line.strip()]
    return []
