"""One command-line flag for each field of EngineConfig, and the config made of them.

The flags are generated, so that a new field cannot be forgotten: without a text here the command
line does not start. Called by `pagestream serve`.
"""

from __future__ import annotations

import dataclasses
import inspect
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any, get_args, get_type_hints

import typer

from pagestream.config import EngineConfig
from pagestream.model_store import DEFAULT_MODEL

HELP = {
    "model": "Checkpoint directory, pulled model or hub id.",
    "device": "auto, cpu or cuda.",
    "dtype": "auto (float32 on CPU, the checkpoint's on CUDA), float32, bfloat16 or float16.",
    "quantization": "none, or int8: 8-bit matrices made at load time (CPU).",
    "load_format": "auto (the checkpoint's weights), or dummy: random ones, to measure speed.",
    "max_model_len": "Most tokens of prompt plus output. (default: what the checkpoint allows)",
    "block_size": "Tokens per KV-cache block: 16, 32 or 64.",
    "num_blocks": "KV-cache blocks. (default: from the memory there is)",
    "gpu_memory_utilization": "Share of a GPU's memory that the engine may take.",
    "enforce_eager": "On CUDA: no recorded decode steps; slower, for comparison.",
    "max_num_seqs": "Most requests in one step.",
    "max_num_batched_tokens": "Most tokens in one step. (default: 256 on CPU, 2048 on CUDA)",
    "max_num_waiting": "Most requests waiting for a place in the batch; the next is refused.",
    "default_max_tokens": "Output limit of a request that names none.",
    "num_threads": "CPU compute threads. (default: one per physical core)",
    "enable_prefix_caching": "Reuse computed KV blocks for prompts that start alike.",
    "overlap_scheduling": "Launch a step before the last one's tokens are read: auto, on, off.",
    "static_batching": "Start a batch only when the last one has ended; for comparison.",
    "priority_aging_s": "Waiting this long outweighs one level of priority.",
    "engine_process": "Run the engine loop in a process of its own.",
    "stream_interval_ms": "Least time between a request's responses. (default: 40; more if many)",
    "heartbeat_interval_ms": "A silent request's cancel is noticed after about this long.",
    "exclude_input_in_output": "Leave the prompt out of `ensemble`'s answers unless asked for.",
    "step_trace": "File for a record of every step; `pagestream trace` draws it. (default: none)",
}
NOT_FLAGS = frozenset({"control_secret"})
"""Set by the launcher itself."""
FIELDS = [field for field in dataclasses.fields(EngineConfig) if field.name not in NOT_FLAGS]


def with_engine_flags(command: Callable[..., None]) -> Callable[..., None]:
    """`command` with a flag per field; they reach it as its first argument, None unless given."""
    _, *own = inspect.signature(command, eval_str=True).parameters.values()

    def run(**values: Any) -> None:
        engine_flags = {field.name: values.pop(field.name) for field in FIELDS}
        command(engine_flags, **values)

    parameters = [*own, *map(_flag, FIELDS)]
    run.__doc__ = command.__doc__
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return run


def _flag(field: dataclasses.Field[Any]) -> inspect.Parameter:
    default = DEFAULT_MODEL if field.name == "model" else field.default
    shown = "" if default is None else f" (default: {default})"
    option = typer.Option(
        help=HELP[field.name] + shown, show_default=False, rich_help_panel="Engine"
    )
    return inspect.Parameter(
        field.name,
        inspect.Parameter.KEYWORD_ONLY,
        default=None,
        annotation=Annotated[_value_type(field.name) | None, option],
    )


def _value_type(name: str) -> Any:
    hint = get_type_hints(EngineConfig)[name]
    return next((kind for kind in get_args(hint) if kind is not type(None)), hint)


def engine_config(
    flags: Mapping[str, Any], config_file: Path | None, control_secret: str
) -> EngineConfig:
    """The flags that were given, over the file's values, over the defaults; raises ValueError."""
    values: dict[str, Any] = {"model": DEFAULT_MODEL}
    if config_file:
        values |= _read(config_file)
    values |= {
        field.name: flags[field.name] for field in FIELDS if flags.get(field.name) is not None
    }
    return EngineConfig.from_dict({**values, "control_secret": control_secret})


def _read(config_file: Path) -> dict[str, Any]:
    try:
        values = json.loads(config_file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"--config {config_file} cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise ValueError(f"--config {config_file} is not valid JSON: {error}") from None
    if not isinstance(values, dict):
        raise ValueError(f"--config {config_file} must hold one JSON object")
    return values
