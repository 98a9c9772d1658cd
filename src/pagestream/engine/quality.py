"""What a quantized model loses: its distributions against the exact model's, token by token.

Both models read the same text, teacher-forced, in windows of their own; nothing is sampled. Knows
no requests and no schedules. Used by `pagestream eval`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from pagestream.config import ModelConfig
from pagestream.models.registry import Model, load_model
from pagestream_kernels import plan_attention

_BLOCK_SIZE = 64


@dataclass(frozen=True)
class Quality:
    """Over all predicted tokens of a text; natural logarithms."""

    num_tokens: int
    perplexity: float
    """Of the exact model; the other's is ``quantized_perplexity``."""
    quantized_perplexity: float
    top1_agreement: float
    """Share of tokens before which both models think the same one most likely."""
    mean_kl: float
    """Of the quantized distribution from the exact one, in nats."""
    p99_kl: float

    @property
    def perplexity_ratio(self) -> float:
        return self.quantized_perplexity / self.perplexity


def compare(
    directory: Path,
    token_ids: Sequence[int],
    quantization: str,
    window: int,
    progress: Callable[[int, int], None],
) -> Quality:
    """Compare over ``token_ids``, cut into windows of at most ``window`` tokens.

    ``progress``: called with tokens done and in all. ValueError for fewer than two tokens.
    """
    if len(token_ids) < 2:
        raise ValueError(f"the text has {len(token_ids)} tokens, at least 2 are needed")
    config = ModelConfig.from_hf(directory)
    cpu = torch.device("cpu")
    exact, quantized = (
        load_model(config, directory, window, torch.float32, cpu, quantization=name)
        for name in ("none", quantization)
    )
    parts: list[torch.Tensor] = []
    for start in range(0, len(token_ids) - 1, window - 1):
        ids = torch.tensor(token_ids[start : start + window])
        parts.append(_compare_window(config, exact, quantized, ids))
        progress(min(start + window, len(token_ids)), len(token_ids))
    nll, quantized_nll, agrees, kl = torch.cat(parts, dim=1)
    return Quality(
        num_tokens=len(nll),
        perplexity=float(nll.mean().exp()),
        quantized_perplexity=float(quantized_nll.mean().exp()),
        top1_agreement=float(agrees.mean()),
        mean_kl=float(kl.mean()),
        p99_kl=float(kl.quantile(0.99)),
    )


@torch.inference_mode()
def _compare_window(
    config: ModelConfig, exact: Model, quantized: Model, ids: torch.Tensor
) -> torch.Tensor:
    """float64 [4 (nll, quantized nll, agreement, KL), len(ids) - 1]"""
    p, q = (
        _logits(config, model, ids[:-1]).to(torch.float64).log_softmax(dim=-1)
        for model in (exact, quantized)
    )
    chosen = ids[1:, None]
    return torch.stack(
        (
            -p.gather(1, chosen)[:, 0],
            -q.gather(1, chosen)[:, 0],
            (p.argmax(1) == q.argmax(1)).to(torch.float64),
            (p.exp() * (p - q)).sum(1),
        )
    )


def _logits(config: ModelConfig, model: Model, ids: torch.Tensor) -> torch.Tensor:
    """One prompt as one step: [len(ids), vocab_size]."""
    num_tokens = len(ids)
    num_blocks = -(-num_tokens // _BLOCK_SIZE)
    kv_cache = torch.zeros(
        *(config.num_hidden_layers, 2, num_blocks, _BLOCK_SIZE),
        *(config.num_key_value_heads, config.head_dim),
    )
    positions = torch.arange(num_tokens)
    ends = torch.tensor([0, num_tokens], dtype=torch.int32)
    table = torch.arange(num_blocks, dtype=torch.int32)[None]
    attention = plan_attention(ends, ends[1:], table, _BLOCK_SIZE)
    return model.logits(model.forward(ids, positions, positions, attention, kv_cache))
