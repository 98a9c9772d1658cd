"""The option to renew what is known of registers, and a table of what was compiled."""

from __future__ import annotations

import pytest

_TABLE = pytest.StashKey[list]()


def pytest_addoption(parser):
    parser.addoption(
        "--rewrite-registers",
        action="store_true",
        help="write registers.json anew from the cases that run",
    )


def pytest_configure(config):
    config.stash[_TABLE] = []


@pytest.fixture
def compile_table(request):
    """Where a test adds (capability, configuration, kernel)."""
    return request.config.stash.setdefault(_TABLE, [])


def pytest_terminal_summary(terminalreporter, config):
    rows = config.stash.get(_TABLE, [])
    for capability in sorted({row[0] for row in rows}):
        terminalreporter.section(f"sm_{capability}")
        terminalreporter.write_line(
            f"{'configuration':<36}{'kernel':<22}"
            "registers  shared KiB  instructions  per KV byte  tiles in flight  MMA  warp-group MMA"
        )
        for _, name, kernel in (row for row in rows if row[0] == capability):
            terminalreporter.write_line(
                f"{name:<36}{kernel.name:<22}{kernel.registers:>9}{kernel.shared / 1024:>12.1f}"
                f"{kernel.instructions:>14}{kernel.loop_cost:>13.2f}{kernel.stages:>17}"
                f"{kernel.mma:>5}{kernel.warpgroup_mma:>16}"
            )
