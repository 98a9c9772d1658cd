"""Runs the interpreter's tests where kernels are interpreted: in a process of their own."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from pagestream_kernels.dispatch import HAS_TRITON, INTERPRETED

pytestmark = pytest.mark.skipif(not HAS_TRITON or INTERPRETED, reason="no triton, or it interprets")


@pytest.mark.parametrize("marker", ["not long", pytest.param("long", marks=pytest.mark.long)])
@pytest.mark.timeout(900)
def test_kernels_in_the_interpreter(marker):
    process = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-m", marker, "tests/kernels/interpreter"],
        cwd=Path(__file__).parents[2],
        env=os.environ | {"TRITON_INTERPRET": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert process.returncode == 0, process.stdout[-20_000:]
