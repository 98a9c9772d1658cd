"""The launcher's flags: every engine setting has one, and refusals come before anything starts."""

import dataclasses
import json
import os
import subprocess
import sys

import pytest

from pagestream.cli.engine_flags import NOT_FLAGS, engine_config
from pagestream.config import EngineConfig
from pagestream.model_store import DEFAULT_MODEL


def serve(*arguments):
    return subprocess.run(
        [sys.executable, "-m", "pagestream.cli.main", "serve", *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, "COLUMNS": "120", "_TYPER_FORCE_DISABLE_TERMINAL": "1"},
    )


def test_every_engine_setting_is_a_flag():
    known = serve("--help")
    assert known.returncode == 0
    fields = {field.name for field in dataclasses.fields(EngineConfig)}
    assert fields >= NOT_FLAGS
    for name in fields - NOT_FLAGS:
        assert f"--{name.replace('_', '-')} " in known.stdout
    for name in NOT_FLAGS:
        assert f"--{name.replace('_', '-')}" not in known.stdout


def test_flags_win_over_the_file_which_wins_over_the_defaults(tmp_path):
    file = tmp_path / "engine.json"
    file.write_text(json.dumps({"model": "from-file", "block_size": 16, "max_num_seqs": 3}))
    flags = {"model": None, "max_num_seqs": 5, "num_blocks": None}
    config = engine_config(flags, file, "secret")
    assert config == EngineConfig(
        model="from-file", block_size=16, max_num_seqs=5, control_secret="secret"
    )


def test_the_default_model_is_the_pulled_one():
    assert engine_config({}, None, "").model == DEFAULT_MODEL


def test_a_secret_in_the_file_is_replaced(tmp_path):
    file = tmp_path / "engine.json"
    file.write_text(json.dumps({"control_secret": "known to many"}))
    assert engine_config({}, file, "fresh").control_secret == "fresh"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "cannot be read: No such file"),
        ("{", "is not valid JSON"),
        ("[]", "must hold one JSON object"),
        ('{"block_sise": 16}', "unknown config key 'block_sise'"),
        ('{"max_num_seqs": 0}', "max_num_seqs must be at least 1, got 0"),
    ],
)
def test_a_bad_config_file_is_refused(tmp_path, content, message):
    file = tmp_path / "engine.json"
    if content is not None:
        file.write_text(content)
    with pytest.raises(ValueError, match=message):
        engine_config({}, file, "")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--block-size", "7"), "block_size must be one of 16, 32, 64, got 7"),
        (("--model", "/no/such/model"), "model '/no/such/model' is not a directory"),
        (("--model-repository", "/no/such/repository"), "pass --model-repository"),
    ],
)
def test_the_command_refuses_with_one_line_on_stderr(arguments, message):
    done = serve(*arguments)
    assert done.returncode == 1
    assert done.stdout == ""
    assert message in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_a_directory_that_is_no_checkpoint_is_refused(tmp_path):
    done = serve("--model", str(tmp_path))
    assert done.returncode == 1
    assert f"no config.json in {tmp_path}" in done.stderr
