"""The models of the GPU benchmark: shapes of real ones, weights that are random.

Writes a config.json per model, from which the engine makes its weights (load_format dummy). Also
the floors: no decode step and no prefill can be faster.
"""

from __future__ import annotations

import json
import os
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from pagestream.config import EngineConfig, ModelConfig
from pagestream.engine.llm_engine import LLMEngine

SMOLLM2, QWEN3, LLAMA = "SmolLM2-135M", "Qwen3-0.6B", "Llama-3.1-8B"
_CONFIGS: dict[str, dict[str, Any]] = {
    SMOLLM2: {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": 49152,
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "head_dim": 64,
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-5,
        "rope_theta": 100000.0,
        "tie_word_embeddings": True,
    },
    QWEN3: {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "vocab_size": 151936,
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 40960,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000.0,
        "tie_word_embeddings": True,
    },
    LLAMA: {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": 128256,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
        "tie_word_embeddings": False,
    },
}
_SMALL = {
    "vocab_size": 512,
    "hidden_size": 96,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
}
"""In place of the real numbers, in a smoke run."""
WORK = Path(tempfile.gettempdir()) / f"pagestream-gpu-bench-{os.getuid()}"
"""Where the models' directories are made."""
MAX_MODEL_LEN = 9216
_BUDGET = 8192


@dataclass(frozen=True)
class Heads:
    query: int
    kv: int
    dim: int


@dataclass(frozen=True)
class Floor:
    """Bytes and operations that a pass over the model cannot do without."""

    num_bytes: float
    operations: float

    def seconds(self, bandwidth: float, rate: float) -> float:
        return max(self.num_bytes / bandwidth, self.operations / rate)


def model_directory(root: Path, name: str, *, smoke: bool) -> Path:
    """With a config.json and nothing else."""
    directory = root / name
    directory.mkdir(parents=True, exist_ok=True)
    config = _CONFIGS[name] | (_SMALL if smoke else {})
    config |= {"hidden_act": "silu", "dtype": "bfloat16", "bos_token_id": 0, "eos_token_id": 1}
    (directory / "config.json").write_text(json.dumps(config, indent=1))
    return directory


def heads_of(name: str, *, smoke: bool) -> Heads:
    config = _CONFIGS[name] | (_SMALL if smoke else {})
    names = ("num_attention_heads", "num_key_value_heads", "head_dim")
    return Heads(*(config[name] for name in names))


def hidden_sizes(name: str, *, smoke: bool) -> tuple[int, int]:
    """hidden_size, intermediate_size"""
    config = _CONFIGS[name] | (_SMALL if smoke else {})
    return config["hidden_size"], config["intermediate_size"]


def engine_config(directory: Path, device: torch.device, **options: Any) -> EngineConfig:
    """Room for 256 requests at once on a GPU; a handful of blocks on CPU."""
    model = ModelConfig.from_hf(directory)
    values = {
        "device": device.type,
        "load_format": "dummy",
        "max_model_len": min(MAX_MODEL_LEN, model.max_position_embeddings),
        "max_num_seqs": 256,
        "max_num_batched_tokens": _BUDGET,
    }
    if device.type == "cpu":
        values |= {"max_num_seqs": 8, "max_num_batched_tokens": 64, "num_blocks": 128}
        values["num_threads"] = 1
    return EngineConfig(str(directory), **{**values, **options})


def make_engine(directory: Path, device: torch.device, **options: Any) -> LLMEngine:
    """Warm."""
    engine = LLMEngine(engine_config(directory, device, **options))
    engine.warm_up()
    return engine


def decode_floor(config: ModelConfig, batch: int, context: float, itemsize: int) -> Floor:
    """A step in which ``batch`` requests of ``context`` tokens add one each."""
    body, head = _matrix_weights(config)
    kv = 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim
    attended = 4 * config.num_hidden_layers * config.num_attention_heads * config.head_dim * context
    return Floor(
        (body + head + batch * context * kv) * itemsize, batch * (2 * (body + head) + attended)
    )


def prefill_floor(config: ModelConfig, length: int, itemsize: int) -> Floor:
    """One prompt of ``length`` tokens, logits for its last one."""
    body, head = _matrix_weights(config)
    heads = config.num_attention_heads * config.head_dim
    attended = 2 * config.num_hidden_layers * heads * length**2
    return Floor((body + head) * itemsize, 2 * body * length + attended + 2 * head)


def _matrix_weights(config: ModelConfig) -> tuple[int, int]:
    """Of the layers, and of the head."""
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    attention = (2 * heads + 2 * kv_heads) * config.head_dim * config.hidden_size
    mlp = 3 * config.hidden_size * config.intermediate_size
    return config.num_hidden_layers * (attention + mlp), config.vocab_size * config.hidden_size
