"""EngineConfig (what the operator chose) and ModelConfig (what the checkpoint says).

Both are frozen values that every module may import. They do not know torch, and they do not
resolve anything that depends on the machine: the runner resolves ``device``, ``dtype`` and
``num_blocks``. Read from one JSON file by all three serving models.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_type_hints

DTYPES = ("auto", "float32", "bfloat16", "float16")
LOAD_FORMATS = ("auto", "dummy")
QUANTIZATIONS = ("none", "int8")
DEVICES = ("auto", "cpu", "cuda")
BLOCK_SIZES = (16, 32, 64)
OVERLAP_SCHEDULING = ("auto", "on", "off")


@dataclass(frozen=True)
class EngineConfig:
    """All that an operator can set. Unknown keys and impossible values raise ValueError."""

    model: str
    """Directory of a Hugging Face checkpoint, a pulled model's short name, or a hub id."""
    device: str = "auto"
    dtype: str = "auto"
    """auto: float32 on CPU, the checkpoint's own dtype on CUDA."""
    load_format: str = "auto"
    """auto: the checkpoint's safetensors; dummy: random weights of the config's shapes, made on the
    device from a fixed seed, to measure speed without a checkpoint."""
    quantization: str = "none"
    """int8: matrices of 8 bits with a scale for every 32 weights, made at load time (CPU only)."""
    max_model_len: int | None = None
    """Most tokens of prompt plus output; None: the checkpoint's max_position_embeddings."""
    block_size: int = 64
    """Tokens per KV-cache block."""
    num_blocks: int | None = None
    """KV-cache blocks; None: sized from the memory of the device."""
    gpu_memory_utilization: float = 0.9
    """Share of a GPU's memory that model, KV cache and the largest step may take (an unset
    num_blocks follows from it)."""
    enforce_eager: bool = False
    """On CUDA: launch every kernel of every step, rather than replay recorded decode steps."""
    max_num_seqs: int = 64
    """Most requests in one step."""
    max_num_batched_tokens: int | None = None
    """Most tokens in one step (the token budget; longer prompts are prefilled in chunks). It bounds
    how long a prompt keeps running answers waiting. None: 256 on CPU, 2048 on CUDA, never below
    max_num_seqs."""
    max_num_waiting: int = 1024
    """Most requests queued behind the running ones; the next one is refused."""
    default_max_tokens: int = 1024
    """Output limit of a request that names none (never beyond what max_model_len leaves)."""
    num_threads: int | None = None
    """CPU compute threads; None: one per physical core."""
    enable_prefix_caching: bool = True
    """Keep computed KV blocks, and reuse them for prompts that start alike."""
    overlap_scheduling: str = "auto"
    """Schedule and launch a step before the tokens of the one before are read; auto: on CUDA."""
    static_batching: bool = False
    """Start a batch only when the one before has ended; slower, for comparison."""
    priority_aging_s: float = 10.0
    """Waiting this long outweighs one level of priority."""
    engine_process: bool = False
    """Run the engine loop in a process of its own, rather than in a thread of `engine`'s."""
    stream_interval_ms: int | None = None
    """Least time between two streamed responses of one request, after the first; None: 40, and
    more where so many stream at once that moving their text would slow the model."""
    heartbeat_interval_ms: int = 400
    """A request silent for this long gets an empty response, so that its cancel is noticed."""
    exclude_input_in_output: bool = True
    """Whether `ensemble` leaves the prompt out of an unstreamed answer that does not say."""
    step_trace: str | None = None
    """File that gets a record of every step, for `pagestream trace`; None: no trace."""
    control_secret: str = ""
    """Authorises `drain` and `stats`; minted by the launcher, empty: both are refused."""

    def __post_init__(self) -> None:
        hints = get_type_hints(type(self))
        for field in dataclasses.fields(self):
            _check_type(field.name, getattr(self, field.name), hints[field.name])
        _check_choice("device", self.device, DEVICES)
        _check_choice("dtype", self.dtype, DTYPES)
        _check_choice("load_format", self.load_format, LOAD_FORMATS)
        _check_choice("quantization", self.quantization, QUANTIZATIONS)
        _check_choice("block_size", self.block_size, BLOCK_SIZES)
        _check_choice("overlap_scheduling", self.overlap_scheduling, OVERLAP_SCHEDULING)
        if not 0 < self.gpu_memory_utilization <= 1:
            raise ValueError(
                f"gpu_memory_utilization must be above 0 and at most 1, "
                f"got {self.gpu_memory_utilization}"
            )
        if not self.model:
            raise ValueError("model must name a checkpoint directory, a pulled model or a hub id")
        for name, least in _MINIMUM.items():
            value = getattr(self, name)
            if value is not None and value < least:
                raise ValueError(f"{name} must be at least {least}, got {value}")

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> EngineConfig:
        known = {field.name for field in dataclasses.fields(cls)}
        unknown = sorted(set(values) - known)
        if unknown:
            raise ValueError(
                f"unknown config key {', '.join(map(repr, unknown))}; "
                f"known keys: {', '.join(sorted(known))}"
            )
        if "model" not in values:
            raise ValueError("config key 'model' is required")
        return cls(**values)

    @classmethod
    def from_json(cls, path: str | Path) -> EngineConfig:
        text = Path(path).read_text(encoding="utf-8")
        try:
            values = json.loads(text)
        except json.JSONDecodeError as error:
            raise ValueError(f"{Path(path).name} is not valid JSON: {error}") from None
        if not isinstance(values, dict):
            raise ValueError(f"{Path(path).name} must hold one JSON object")
        return cls.from_dict(values)

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self), indent=2) + "\n"


_MINIMUM = {
    "max_model_len": 2,
    "num_blocks": 1,
    "max_num_seqs": 1,
    "max_num_batched_tokens": 1,
    "max_num_waiting": 1,
    "default_max_tokens": 1,
    "num_threads": 1,
    "priority_aging_s": 0,
    "stream_interval_ms": 0,
    "heartbeat_interval_ms": 50,
}


@dataclass(frozen=True)
class RopeScaling:
    """Llama 3.1's stretching of the slow rotary frequencies ("llama3")."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int


@dataclass(frozen=True)
class ModelConfig:
    """The numbers of a checkpoint that the engine needs. Lengths in tokens, sizes in elements."""

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    hidden_act: str
    rms_norm_eps: float
    rope_theta: float
    rope_scaling: RopeScaling | None
    max_position_embeddings: int
    tie_word_embeddings: bool
    attention_bias: bool
    mlp_bias: bool
    dtype: str
    eos_token_ids: frozenset[int]
    """Union over config.json, generation_config.json and the tokenizer's eos_token."""
    temperature: float | None
    """temperature, top_k, top_p: generation_config's defaults, None where it names none."""
    top_k: int | None
    top_p: float | None

    @classmethod
    def from_hf(cls, directory: str | Path) -> ModelConfig:
        """Read ``config.json`` and its neighbours.

        Raises FileNotFoundError without a config.json, ValueError for what the engine would get
        wrong (a rope kind or an activation it does not implement) rather than running it wrongly.
        """
        directory = Path(directory)
        config = _read_json(directory / "config.json", required=True)
        generation = _read_json(directory / "generation_config.json")
        samples = generation.get("do_sample", False)
        _refuse_sliding_window(config)
        rope_theta, rope_scaling = _rope(config)
        heads = _require(config, "num_attention_heads")
        return cls(
            architecture=_architecture(config),
            vocab_size=_require(config, "vocab_size"),
            hidden_size=_require(config, "hidden_size"),
            intermediate_size=_require(config, "intermediate_size"),
            num_hidden_layers=_require(config, "num_hidden_layers"),
            num_attention_heads=heads,
            num_key_value_heads=config.get("num_key_value_heads") or heads,
            head_dim=config.get("head_dim") or _require(config, "hidden_size") // heads,
            hidden_act=_activation(config),
            rms_norm_eps=float(_require(config, "rms_norm_eps")),
            rope_theta=rope_theta,
            rope_scaling=rope_scaling,
            max_position_embeddings=_require(config, "max_position_embeddings"),
            tie_word_embeddings=bool(config.get("tie_word_embeddings", False)),
            attention_bias=bool(config.get("attention_bias", False)),
            mlp_bias=bool(config.get("mlp_bias", False)),
            dtype=str(config.get("dtype") or config.get("torch_dtype") or "float32"),
            eos_token_ids=_eos_token_ids(directory, config, generation),
            temperature=generation.get("temperature") if samples else None,
            top_k=generation.get("top_k") if samples else None,
            top_p=generation.get("top_p") if samples else None,
        )


def resolve_max_model_len(config: EngineConfig, model_config: ModelConfig) -> int:
    """The configured limit, never beyond what the checkpoint's positions allow."""
    most = model_config.max_position_embeddings
    if config.max_model_len is None:
        return most
    if config.max_model_len > most:
        raise ValueError(
            f"max_model_len is {config.max_model_len}, above the checkpoint's "
            f"max_position_embeddings of {most}"
        )
    return config.max_model_len


def _check_type(name: str, value: Any, hint: Any) -> None:
    # bool is an int to isinstance, and never what an integer field means; an int is a fine float.
    accepted = int | float if hint is float else hint
    if not isinstance(value, accepted) or (isinstance(value, bool) and hint is not bool):
        kind = str(hint) if not isinstance(hint, type) else hint.__name__
        raise ValueError(f"{name} must be {kind}, got {value!r}")


def _check_choice(name: str, value: object, choices: tuple[object, ...]) -> None:
    if value not in choices:
        raise ValueError(f"{name} must be one of {', '.join(map(str, choices))}, got {value!r}")


def _read_json(path: Path, *, required: bool = False) -> dict[str, Any]:
    if not path.is_file():
        if required:
            raise FileNotFoundError(f"no {path.name} in {path.parent}: not a checkpoint directory")
        return {}
    values = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(values, dict):
        raise ValueError(f"{path.name} must hold one JSON object")
    return values


def _require(config: Mapping[str, Any], key: str) -> Any:
    if config.get(key) is None:
        raise ValueError(f"config.json has no {key}")
    return config[key]


def _architecture(config: Mapping[str, Any]) -> str:
    architectures = config.get("architectures") or []
    if len(architectures) != 1:
        raise ValueError(f"config.json must name one architecture, got {architectures}")
    return str(architectures[0])


def _activation(config: Mapping[str, Any]) -> str:
    activation = str(config.get("hidden_act", "silu"))
    if activation != "silu":
        raise ValueError(f"hidden_act {activation!r} is not supported (silu is)")
    return activation


def _refuse_sliding_window(config: Mapping[str, Any]) -> None:
    kinds = set(config.get("layer_types") or ()) - {"full_attention"}
    if config.get("use_sliding_window") or kinds:
        named = ", ".join(sorted(kinds)) or "sliding_window"
        raise ValueError(f"{named} layers are not supported (full_attention is)")


def _rope(config: Mapping[str, Any]) -> tuple[float, RopeScaling | None]:
    """transformers 5 writes ``rope_parameters``; earlier files have rope_theta and rope_scaling."""
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if kind not in ("default", "llama3"):
        raise ValueError(f"rope type {kind!r} is not supported (default and llama3 are)")
    if float(config.get("partial_rotary_factor") or 1.0) != 1.0:
        raise ValueError("partial_rotary_factor other than 1 is not supported")
    theta = float(rope.get("rope_theta") or config.get("rope_theta") or 10000.0)
    if kind == "default":
        return theta, None
    names = [field.name for field in dataclasses.fields(RopeScaling)]
    return theta, RopeScaling(**{name: _require(rope, name) for name in names})


def _eos_token_ids(
    directory: Path, config: Mapping[str, Any], generation: Mapping[str, Any]
) -> frozenset[int]:
    """One list overriding another loses an end-of-turn token, so all sources count."""
    ids: set[int] = set()
    for source in (config, generation):
        value = source.get("eos_token_id")
        if isinstance(value, int):
            ids.add(value)
        elif value:
            ids.update(value)
    eos_token = _read_json(directory / "tokenizer_config.json").get("eos_token")
    content = eos_token.get("content") if isinstance(eos_token, dict) else eos_token
    for added in _read_json(directory / "tokenizer.json").get("added_tokens", []):
        if content is not None and added["content"] == content:
            ids.add(added["id"])
    return frozenset(ids)
