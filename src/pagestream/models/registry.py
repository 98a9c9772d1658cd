"""Which class runs which architecture, and the one way to load it.

A family is one file here plus one row in ``_MODELS``. Called by the runner.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch

from pagestream.config import ModelConfig
from pagestream.models.llama import LlamaForCausalLM
from pagestream.models.qwen3 import Qwen3ForCausalLM
from pagestream.models.weights import fill_dummy_weights, load_weights

Model = LlamaForCausalLM
"""What every family offers: targets, ignored, forward, logits."""
_MODELS: dict[str, type[Model]] = {
    "LlamaForCausalLM": LlamaForCausalLM,
    "Qwen3ForCausalLM": Qwen3ForCausalLM,
}


def load_model(
    config: ModelConfig,
    directory: Path,
    max_model_len: int,
    dtype: torch.dtype,
    device: torch.device,
    progress: Callable[[int, int], None] | None = None,
    load_format: str = "auto",
    quantization: str = "none",
) -> Model:
    """Build the model and fill its weights; ``load_format``, ``quantization`` as in EngineConfig.

    ValueError for an unknown architecture, or a checkpoint that does not fit.
    """
    if config.architecture not in _MODELS:
        raise ValueError(
            f"architecture {config.architecture!r} is not supported; "
            f"supported: {', '.join(sorted(_MODELS))}"
        )
    model = _MODELS[config.architecture](config, max_model_len, dtype, device)
    if load_format == "dummy":
        fill_dummy_weights(model.targets(), progress)
    else:
        load_weights(directory, model.targets(), model.ignored, progress)
    if quantization == "int8":
        model.quantize()
    return model
