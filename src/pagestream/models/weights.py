"""Filling a model's memory from a checkpoint's safetensors files, or with random numbers.

Knows file layout (one file, or shards with or without an index) and nothing of any architecture:
a model says which tensor fills which view. Only safetensors are read: other formats run code.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from safetensors import safe_open


def load_weights(
    directory: Path,
    targets: dict[str, torch.Tensor],
    ignored: Callable[[str], bool],
    progress: Callable[[int, int], None] | None = None,
) -> None:
    """Copy every checkpoint tensor into its target view.

    Raises FileNotFoundError without safetensors files, ValueError when a tensor is missing, is of
    another shape, or has no place in the model: a silently skipped weight is a wrong answer.
    """
    files = sorted(directory.glob("*.safetensors"))
    if not files:
        raise FileNotFoundError(f"no .safetensors file in {directory}")
    missing = set(targets)
    unexpected = []
    for file in files:
        with safe_open(file, framework="pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118 (not a mapping)
                if name in targets:
                    _fill(targets[name], tensors.get_tensor(name), name)
                    missing.discard(name)
                    if progress is not None:
                        progress(len(targets) - len(missing), len(targets))
                elif not ignored(name):
                    unexpected.append(name)
    if missing or unexpected:
        raise ValueError(
            f"checkpoint {directory.name} does not fit the model: "
            f"missing {_sample(missing)}, unexpected {_sample(unexpected)}"
        )


def fill_dummy_weights(
    targets: dict[str, torch.Tensor], progress: Callable[[int, int], None] | None = None
) -> None:
    """Random weights on the targets' own device, the same for the same shapes and device: norms of
    one, everything else small enough that activations stay finite through many layers."""
    device = next(iter(targets.values())).device
    generator = torch.Generator(device).manual_seed(0)
    for done, (name, target) in enumerate(targets.items(), start=1):
        if name.endswith("norm.weight"):
            target.fill_(1.0)
        else:
            target.normal_(std=0.02, generator=generator)
        if progress is not None:
            progress(done, len(targets))


def _fill(target: torch.Tensor, tensor: torch.Tensor, name: str) -> None:
    if target.shape != tensor.shape:
        raise ValueError(
            f"checkpoint tensor {name} is {list(tensor.shape)}, expected {list(target.shape)}"
        )
    target.copy_(tensor)


def _sample(names: set[str] | list[str]) -> str:
    first = sorted(names)[:3]
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return (", ".join(first) or "nothing") + more
