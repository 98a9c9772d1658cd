"""tritonserver's shared memory regions: which belong to one server, and removing those alone.

A killed tritonserver leaves its python backend's regions in /dev/shm. Their names say nothing of
their owner, so ownership is read from the memory maps of the server's own processes while they
run. Called by the supervisor and by the sweep of stale run directories.
"""

from __future__ import annotations

import contextlib
from pathlib import Path

PREFIX = "triton_python_backend_shm_region_"
SHM = Path("/dev/shm")
PROC = Path("/proc")


def session_processes(session: int, proc: Path = PROC) -> list[int]:
    """The live processes of one session (the server was started as the leader of its own)."""
    found = []
    for stat in proc.glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            # The command name is in parentheses and may hold anything; fields come after it.
            state, _, _, sid = stat.read_text().rpartition(")")[2].split()[:4]
            if int(sid) == session and state != "Z":
                found.append(int(stat.parent.name))
    return found


def regions_of(processes: list[int], proc: Path = PROC) -> set[str]:
    """The names of the regions that these processes have mapped."""
    names = set()
    for pid in processes:
        with contextlib.suppress(OSError):
            for line in (proc / str(pid) / "maps").read_text().splitlines():
                name = line.rpartition("/")[2].removesuffix(" (deleted)")
                if name.startswith(PREFIX):
                    names.add(name)
    return names


def remove(names: set[str], shm: Path = SHM) -> set[str]:
    """Remove these regions, and return those that were still there."""
    removed = set()
    for name in names:
        # Names may come from a file: nothing but a region is ever removed.
        if name.startswith(PREFIX) and "/" not in name and (shm / name).exists():
            (shm / name).unlink(missing_ok=True)
            removed.add(name)
    return removed
