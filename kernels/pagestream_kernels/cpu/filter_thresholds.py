"""Top-k, top-p and min-p on CPU: from the best few thousand logits of a row, where they suffice.

Sorting a vocabulary takes longer than all else in a draw, and the threshold is nearly always among
a row's best. The twin, which sorts, takes the rows of which that is not so.
"""

from __future__ import annotations

import torch

from pagestream_kernels import reference

_HEAD = 4096


def filter_thresholds(
    logits: torch.Tensor,
    idx_mapping: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
) -> torch.Tensor:
    vocab_size = logits.shape[-1]
    t, k, p, m = (values[idx_mapping] for values in (temperature, top_k, top_p, min_p))
    thresholds = torch.full_like(t, float("-inf"))
    rows = ((t > 0) & ((k < vocab_size) | (p < 1) | (m > 0))).nonzero()[:, 0]
    if not len(rows):
        return thresholds
    t, k, p, m = (values[rows, None] for values in (t, k, p, m))
    x = logits[rows].to(torch.float32)
    least = x.amax(dim=-1, keepdim=True) + t * m.log()  # [len(rows), 1]
    found = torch.ones_like(rows, dtype=torch.bool)
    if bool(((k < vocab_size) | (p < 1)).any()):
        least, found = _from_the_best(x, least, t, k, p)
    thresholds[rows] = least[:, 0]
    rest = rows[~found]
    if len(rest):
        parameters = (idx_mapping[rest], temperature, top_k, top_p, min_p)
        thresholds[rest] = reference.filter_thresholds(logits[rest], *parameters)
    return thresholds


def _from_the_best(
    x: torch.Tensor, least: torch.Tensor, t: torch.Tensor, k: torch.Tensor, p: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """(thresholds [num_rows, 1], bool [num_rows] whether they are right)."""
    ordered = x.topk(min(_HEAD, x.shape[-1]), dim=-1).values
    best, last = ordered[:, :1], ordered[:, -1:]
    # One more than k are needed to see what is as likely as the last of them.
    counted = k < ordered.shape[-1]
    kth = ordered.gather(-1, k.clamp(1, ordered.shape[-1]) - 1)
    least = torch.where(counted, torch.maximum(least, kth), least)
    weights = ((ordered - best) / t).exp().masked_fill_(ordered < least, 0.0)
    total = weights.sum(dim=-1, keepdim=True)
    beyond = ((p < 1) & (last >= least)).nonzero()[:, 0]  # rows with survivors outside ordered
    if len(beyond):
        every = ((x[beyond] - best[beyond]) / t[beyond]).exp_()
        total[beyond] = every.masked_fill_(x[beyond] < least[beyond], 0.0).sum(-1, keepdim=True)
    before = weights.cumsum(dim=-1) - weights  # mass of what ranks above
    outside = (before >= p * total) & (p < 1)
    outside[:, 0] = False
    kept = torch.where(outside, float("inf"), ordered).amin(dim=-1, keepdim=True)
    threshold = torch.where(p < 1, torch.maximum(least, kept), least)
    enough = (threshold > last) & (counted | (k >= x.shape[-1]))
    unfiltered = (k >= x.shape[-1]) & (p >= 1)
    return threshold, (enough | unfiltered)[:, 0]
