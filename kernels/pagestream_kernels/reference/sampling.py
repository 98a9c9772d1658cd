"""Filters and draws in plain torch; see ``pagestream_kernels.sampling`` for shapes.

The generator is two rounds of a 32-bit avalanche hash over (token, position, seed): stateless, the
same on every device, and cheap enough to evaluate for a whole vocabulary.
"""

from __future__ import annotations

import torch

_MASK = 0xFFFFFFFF
_SALT = 0x9E3779B9


def apply_penalties(
    logits: torch.Tensor,
    in_prompt: torch.Tensor,
    output_counts: torch.Tensor,
    repetition: torch.Tensor,
    presence: torch.Tensor,
    frequency: torch.Tensor,
) -> torch.Tensor:
    in_output = output_counts > 0
    factor = torch.where(in_prompt | in_output, repetition[:, None], 1.0)
    logits = torch.where(logits > 0, logits / factor, logits * factor)
    return logits - presence[:, None] * in_output - frequency[:, None] * output_counts


def filter_min_p(logits: torch.Tensor, min_p: torch.Tensor) -> torch.Tensor:
    threshold = logits.amax(dim=-1, keepdim=True) + min_p.log()[:, None]
    return logits.masked_fill(logits < threshold, float("-inf"))


def gather_logprobs(
    logits: torch.Tensor, token_ids: torch.Tensor, k: int
) -> tuple[torch.Tensor, ...]:
    logprobs = logits.log_softmax(dim=-1)
    chosen = logprobs.gather(-1, token_ids[:, None])
    ranks = (logprobs > chosen).sum(dim=-1) + 1
    top_logprobs, top_ids = logprobs.topk(k, dim=-1)
    return token_ids, chosen[:, 0], ranks, top_ids, top_logprobs


def filter_top_k_top_p(
    logits: torch.Tensor, top_k: torch.Tensor | None, top_p: torch.Tensor | None
) -> torch.Tensor:
    if top_k is None and top_p is None:
        return logits
    ordered, order = logits.sort(dim=-1, descending=True, stable=True)
    if top_k is not None:
        kept = top_k.clamp(1, logits.shape[-1])
        threshold = ordered.gather(-1, (kept - 1)[:, None])
        ordered = ordered.masked_fill(ordered < threshold, float("-inf"))
    if top_p is not None:
        probs = ordered.softmax(dim=-1)
        before = probs.cumsum(dim=-1) - probs  # mass of what ranks above
        outside = before >= top_p[:, None]
        outside[:, 0] = False
        ordered = ordered.masked_fill(outside & (top_p[:, None] < 1.0), float("-inf"))
    return torch.empty_like(logits).scatter_(-1, order, ordered)


def gumbel_argmax(
    logits: torch.Tensor, seeds: torch.Tensor, positions: torch.Tensor
) -> torch.Tensor:
    u = uniforms(seeds, positions, logits.shape[-1])
    # Large noise decides the draw. It comes from u near 0, where float32 is finest.
    gumbel = -torch.log(-torch.log1p(-u))
    return (logits + gumbel).argmax(dim=-1)


def uniforms(seeds: torch.Tensor, positions: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """float32 [num_rows, vocab_size] in (0, 1), a pure function of (seed, position, token)."""
    low, high = seeds & _MASK, (seeds >> 32) & _MASK
    key = _mix(_mix(low + _SALT) ^ high)
    key = _mix(key ^ _mix(positions + _SALT))[:, None]  # [num_rows, 1]
    tokens = torch.arange(vocab_size, dtype=torch.int64, device=seeds.device)
    bits = _mix(_mix(tokens ^ key) + key)
    return ((bits.to(torch.float64) + 0.5) * 2.0**-32).to(torch.float32).clamp_(max=1.0 - 2.0**-24)


def _mix(x: torch.Tensor) -> torch.Tensor:
    """The 32-bit finalizer "lowbias32" (Wellons, 2018), in int64 to stay free of overflow."""
    x = x & _MASK
    x = ((x ^ (x >> 16)) * 0x7FEB352D) & _MASK
    x = ((x ^ (x >> 15)) * 0x846CA68B) & _MASK
    return x ^ (x >> 16)
