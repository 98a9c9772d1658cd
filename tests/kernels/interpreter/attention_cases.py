"""Batches over a paged cache in which all that nobody owns is NaN; their attention in float64."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import torch

from pagestream_kernels import paged_attention, plan_attention, reference

WILD = (2**30, -(2**30), -1, 10**6)
"""What block tables hold past a request's blocks."""


@dataclass
class Batch:
    """``query_lens`` and ``context_lens`` by request; the other fields are what the op takes."""

    query_lens: list[int]
    context_lens: list[int]
    group: int = 2
    kv_heads: int = 1
    head_dim: int = 64
    page: int = 16
    dtype: torch.dtype = torch.float32
    window: int | None = None
    soft_cap: float | None = None
    mapped: bool = False
    """Whether the requests' rows of the block tables are in another order, with rows between."""
    spare_tokens: int = 0
    """Rows of q after the last request's."""
    spare_blocks: int = 2
    """Columns of the block tables that no request needs."""
    strength: float = 1.0
    """Standard deviation of q."""
    starts: torch.Tensor = field(init=False)
    seq_lens: torch.Tensor = field(init=False)
    tables: torch.Tensor = field(init=False)
    rows: torch.Tensor = field(init=False)
    q: torch.Tensor = field(init=False)
    caches: torch.Tensor = field(init=False)

    def __post_init__(self) -> None:
        lengths = [
            context + query if query and context >= 0 else 0
            for query, context in zip(self.query_lens, self.context_lens, strict=True)
        ]
        self.seq_lens = torch.tensor(lengths, dtype=torch.int32)
        self.starts = torch.tensor([0, *self.query_lens]).cumsum(0).to(torch.int32)
        needed = [-(-length // self.page) for length in lengths]
        num_rows = 2 * len(lengths) + 1 if self.mapped else len(lengths)
        self.rows = (
            torch.randperm(num_rows)[: len(lengths)] if self.mapped else torch.arange(num_rows)
        )
        columns = max(needed, default=0) + self.spare_blocks
        wild = torch.tensor(WILD, dtype=torch.int32)
        self.tables = wild[torch.randint(len(WILD), (num_rows, columns))]
        blocks = torch.randperm(sum(needed) + 2).to(torch.int32).split([*needed, 2])
        shape = (2, sum(needed) + 2, self.page, self.kv_heads, self.head_dim)
        self.caches = torch.full(shape, float("nan"), dtype=self.dtype)
        for row, owned, length in zip(self.rows, blocks, lengths, strict=False):
            self.tables[row, : len(owned)] = owned
            slots = self._slots(owned, length)
            written = torch.randn(2, length, self.kv_heads, self.head_dim).to(self.dtype)
            self.caches.flatten(1, 2)[:, slots] = written
        num_tokens = sum(self.query_lens)
        heads = self.group * self.kv_heads
        qkv = torch.full(
            (num_tokens + self.spare_tokens, heads + 2 * self.kv_heads, self.head_dim), float("nan")
        ).to(self.dtype)
        self.q = qkv[:, :heads]
        self.q[:num_tokens] = torch.randn(num_tokens, heads, self.head_dim) * self.strength

    @property
    def scale(self) -> float:
        return self.head_dim**-0.5

    def _slots(self, blocks: torch.Tensor, length: int) -> torch.Tensor:
        positions = torch.arange(length)
        return blocks[positions // self.page].long() * self.page + positions % self.page

    def run(self, *, max_query_len: int | None = None) -> torch.Tensor:
        metadata = plan_attention(
            self.starts,
            self.seq_lens,
            self.tables,
            self.page,
            idx_mapping=self.rows if self.mapped else None,
            max_query_len=max_query_len or max(self.query_lens),
        )
        return paged_attention(
            self.q,
            *self.caches,
            metadata,
            self.scale,
            window=self.window,
            soft_cap=self.soft_cap,
        )

    def twin(self) -> torch.Tensor:
        return reference.paged_attention(
            self.q,
            *self.caches,
            self.starts,
            self.seq_lens,
            self.tables[self.rows],
            self.scale,
            self.window,
            self.soft_cap,
        )

    def exact(self) -> torch.Tensor:
        """float64, a query at a time, over keys in a row: knows nothing of blocks."""
        out = torch.zeros(self.q.shape, dtype=torch.float64)
        for request, (query_len, seq_len) in enumerate(
            zip(self.query_lens, self.seq_lens.tolist(), strict=True)
        ):
            slots = self._slots(self.tables[self.rows[request]], seq_len)
            keys, values = (
                cache[slots].double().repeat_interleave(self.group, dim=1)
                for cache in self.caches.flatten(1, 2)
            )  # [seq_len, num_heads, head_dim]
            for index in range(query_len if seq_len else 0):
                token, end = int(self.starts[request]) + index, seq_len - query_len + index + 1
                first = 0 if self.window is None else max(0, end - self.window)
                scores = torch.einsum("hd,khd->hk", self.q[token].double(), keys[first:end])
                scores *= self.scale
                if self.soft_cap is not None:
                    scores = self.soft_cap * torch.tanh(scores / self.soft_cap)
                weights = scores.softmax(dim=-1)
                out[token] = torch.einsum("hk,khd->hd", weights, values[first:end])
        return out

    @property
    def real(self) -> torch.Tensor:
        """Rows of q that are a query: bool [num_tokens]."""
        real = torch.zeros(len(self.q), dtype=torch.bool)
        for request, seq_len in enumerate(self.seq_lens.tolist()):
            real[self.starts[request] : self.starts[request + 1]] = seq_len > 0
        return real


def random_batch(seed: int, dtype: torch.dtype) -> Batch:
    """Small enough for the interpreter: some 150 tiles of keys for all programs together."""
    draw = random.Random(seed)
    page = draw.choice([16, 32, 64])
    edges = [0, 1, page - 1, page, page + 1, 2 * page - 1, 2 * page, 3 * page + 5]
    queries = draw.choice([[1], [1, 2, 3, 4, 5], [1, 1, 1, page - 1, page + 1, 40], [0, 1, 7]])
    count = draw.randint(1, 4)
    return Batch(
        query_lens=[draw.choice(queries) for _ in range(count)],
        context_lens=[draw.choice(edges) for _ in range(count)],
        group=draw.randint(1, 8),
        kv_heads=draw.choice([1, 2, 3]),
        head_dim=draw.choice([64, 80, 96, 128, 256]),
        page=page,
        dtype=dtype,
        window=draw.choice([None, None, 1, 7, page, 3 * page]),
        soft_cap=draw.choice([None, None, 5.0, 50.0]),
        mapped=draw.random() < 0.5,
        spare_tokens=draw.choice([0, 3]),
        spare_blocks=draw.choice([0, 1, 6]),
    )
