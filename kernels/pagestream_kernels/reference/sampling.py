"""Filters, draws and log-probabilities in plain torch; see ``pagestream_kernels.sampling``.

The generator is two rounds of a 32-bit avalanche hash over (token, position, seed): stateless, the
same on every device, and cheap enough to evaluate for a whole vocabulary.
"""

from __future__ import annotations

import torch

_MASK = 0xFFFFFFFF
_SALT = 0x9E3779B9
_NEVER = float("-inf")


def argmax_tokens(logits: torch.Tensor) -> torch.Tensor:
    best, token_ids = logits.max(dim=-1)
    return token_ids.masked_fill_(best == _NEVER, -1)


def gumbel_argmax(
    logits: torch.Tensor,
    idx_mapping: torch.Tensor,
    positions: torch.Tensor,
    temperature: torch.Tensor,
    seeds: torch.Tensor,
    thresholds: torch.Tensor | None,
) -> torch.Tensor:
    best, token_ids = logits.max(dim=-1)
    drawn = (temperature[idx_mapping] > 0).nonzero()[:, 0]
    if len(drawn):
        states = idx_mapping[drawn]
        scaled = logits[drawn].to(torch.float32)
        if thresholds is not None:
            scaled = scaled.masked_fill_(scaled < thresholds[drawn, None], _NEVER)
        # From the maximum downwards, so that a low temperature cannot reach +inf.
        scaled -= best[drawn, None].to(torch.float32)
        scaled /= temperature[states, None]
        u = uniforms(seeds[states], positions[drawn], logits.shape[-1])
        # Large noise decides the draw. It comes from u near 0, where float32 is finest.
        scaled -= torch.log(-torch.log1p(-u))
        token_ids[drawn] = scaled.argmax(dim=-1)
    return token_ids.masked_fill_(best == _NEVER, -1)


def filter_thresholds(
    logits: torch.Tensor,
    idx_mapping: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
) -> torch.Tensor:
    t, k, p, m = (values[idx_mapping] for values in (temperature, top_k, top_p, min_p))
    thresholds = torch.full_like(t, _NEVER)
    rows = ((t > 0) & ((k < logits.shape[-1]) | (p < 1) | (m > 0))).nonzero()[:, 0]
    if not len(rows):
        return thresholds
    t, k, p, m = (values[rows, None] for values in (t, k, p, m))
    ordered = logits[rows].to(torch.float32).sort(dim=-1, descending=True).values
    least = ordered[:, :1] + t * m.log()  # [len(rows), 1]
    least = torch.maximum(least, ordered.gather(-1, k.clamp(1, logits.shape[-1]) - 1))
    probs = ((ordered - ordered[:, :1]) / t).masked_fill_(ordered < least, _NEVER).softmax(dim=-1)
    before = probs.cumsum(dim=-1) - probs  # mass of what ranks above
    outside = (before >= p) & (p < 1)
    outside[:, 0] = False
    kept = torch.where(outside, float("inf"), ordered).amin(dim=-1, keepdim=True)
    thresholds[rows] = torch.maximum(least, kept)[:, 0]
    return thresholds


def gather_logprobs(
    logits: torch.Tensor, token_ids: torch.Tensor, k: int
) -> tuple[torch.Tensor, ...]:
    logprobs = logits.to(torch.float32).log_softmax(dim=-1)
    chosen = logprobs.gather(-1, token_ids[:, None])
    ranks = (logits > logits.gather(-1, token_ids[:, None])).sum(dim=-1) + 1
    top_logprobs, top_ids = logprobs.topk(k, dim=-1)
    return token_ids, chosen[:, 0], ranks, top_ids, top_logprobs


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
