"""Only a server's own shared memory is ever removed."""

import os
import subprocess
import sys

import pytest

from pagestream.cli import shared_memory
from pagestream.cli.shared_memory import PREFIX

MAPS_ITS_FILE = (
    "import mmap, sys\n"
    "with open(sys.argv[1], 'r+b') as file:\n"
    "    mapped = mmap.mmap(file.fileno(), 0)\n"
    "print('mapped', flush=True)\n"
    "sys.stdin.read()\n"
)


@pytest.fixture
def shm(tmp_path):
    for name in ("a", "b", "c"):
        (tmp_path / f"{PREFIX}{name}").write_bytes(b"x" * 4096)
    (tmp_path / "psm_of_someone_else").write_bytes(b"x")
    return tmp_path


@pytest.fixture
def session(shm):
    """A process in a session of its own that has region `a` mapped."""
    with subprocess.Popen(
        [sys.executable, "-c", MAPS_ITS_FILE, str(shm / f"{PREFIX}a")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        start_new_session=True,
    ) as process:
        assert process.stdout.readline() == b"mapped\n"
        yield process
        process.kill()


def test_the_regions_of_a_session_are_what_its_processes_map(session):
    processes = shared_memory.session_processes(session.pid)
    assert processes == [session.pid]
    assert shared_memory.regions_of(processes) == {f"{PREFIX}a"}


def test_a_region_that_was_unlinked_meanwhile_keeps_its_name(session, shm):
    (shm / f"{PREFIX}a").unlink()
    assert shared_memory.regions_of([session.pid]) == {f"{PREFIX}a"}


def test_ended_processes_have_neither_session_nor_regions(session):
    session.stdin.close()
    # Not waited for: it is a zombie, as a killed server's processes are at first.
    os.waitid(os.P_PID, session.pid, os.WEXITED | os.WNOWAIT)
    assert shared_memory.session_processes(session.pid) == []
    assert shared_memory.regions_of([session.pid]) == set()


def test_removing_touches_the_named_regions_only(shm):
    removed = shared_memory.remove({f"{PREFIX}a", f"{PREFIX}gone"}, shm)
    assert removed == {f"{PREFIX}a"}
    assert {path.name for path in shm.iterdir()} == {
        f"{PREFIX}b",
        f"{PREFIX}c",
        "psm_of_someone_else",
    }


@pytest.mark.parametrize("name", ["psm_of_someone_else", f"../{PREFIX}a", f"{PREFIX}/../x", ""])
def test_a_name_that_is_no_region_removes_nothing(shm, name):
    before = {path.name for path in shm.iterdir()}
    assert shared_memory.remove({name}, shm) == set()
    assert {path.name for path in shm.iterdir()} == before
