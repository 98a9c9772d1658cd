"""Per-step input preparation from the state rows of the scheduled requests, and their updates.

Everything a step's forward pass reads (ids, positions, slots, lengths) is derived on the device
from persistent state, so the host sends only which rows run and how many tokens each, and what
changed: new requests and new blocks, as staged writes.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch

from pagestream_kernels import reference
from pagestream_kernels.dispatch import kernels, runs_kernels


@dataclass(frozen=True, slots=True)
class PreparedInputs:
    """The flat batch of one step."""

    input_ids: torch.Tensor  # int64 [num_tokens]
    positions: torch.Tensor  # int64 [num_tokens]
    slot_mapping: torch.Tensor  # int64 [num_tokens], -1 for padding
    query_start_loc: torch.Tensor  # int32 [num_reqs + 1]
    seq_lens: torch.Tensor  # int32 [num_reqs]

    @classmethod
    def empty(cls, num_tokens: int, num_reqs: int, device: torch.device) -> PreparedInputs:
        """Buffers that ``prepare_inputs`` fills."""
        tokens = [torch.empty(num_tokens, dtype=torch.int64, device=device) for _ in range(3)]
        lengths = [
            torch.empty(count, dtype=torch.int32, device=device)
            for count in (num_reqs + 1, num_reqs)
        ]
        return cls(*tokens, *lengths)

    def narrow(self, num_tokens: int, num_reqs: int) -> PreparedInputs:
        """The first part of each buffer."""
        return PreparedInputs(
            self.input_ids[:num_tokens],
            self.positions[:num_tokens],
            self.slot_mapping[:num_tokens],
            self.query_start_loc[: num_reqs + 1],
            self.seq_lens[:num_reqs],
        )


@dataclass(frozen=True, slots=True)
class LogitsRows:
    """What gives logits in one step, and what the drawn tokens continue."""

    hidden: torch.Tensor  # [num_rows, hidden_size], zeros for padding
    states: torch.Tensor  # int64 [num_rows], state row, -1 for padding
    positions: torch.Tensor  # int64 [num_rows], index of the token to be drawn in its sequence


def prepare_inputs(
    idx_mapping: torch.Tensor,
    query_lens: torch.Tensor,
    num_tokens: int | None,
    token_ids: torch.Tensor,
    num_computed_tokens: torch.Tensor,
    block_tables: torch.Tensor,
    block_size: int,
    *,
    advance: bool = False,
    out: PreparedInputs | None = None,
) -> PreparedInputs:
    """Gather the flat batch.

    Args:
        idx_mapping: int64 [num_reqs], batch row -> state row.
        query_lens: int64 [num_reqs], tokens of each request in this step.
        num_tokens: their sum; None where the host cannot know it, as in a recorded step, and
            ``out`` says how long the batch is.
        token_ids: int32 [num_states, max_model_len], every known token of each state row.
        num_computed_tokens: int64 [num_states], tokens whose KV is cached.
        block_tables: int32 [num_states, max_blocks].
        advance: count this step's tokens as computed, in ``num_computed_tokens``.
        out: buffers to fill. What they have more than the batch needs becomes padding: token 0 at
            position 0 in slot -1, and requests of no tokens and length 0.
    """
    if runs_kernels(token_ids):
        if out is None:
            if num_tokens is None:
                raise ValueError("num_tokens or out must say how long the batch is")
            out = PreparedInputs.empty(num_tokens, len(idx_mapping), token_ids.device)
        kernels.input_prep.prepare_inputs(
            idx_mapping,
            query_lens,
            token_ids,
            num_computed_tokens,
            block_tables,
            block_size,
            advance,
            _fields(out),
        )
        return out
    prepared = reference.prepare_inputs(
        idx_mapping,
        query_lens,
        num_tokens,
        token_ids,
        num_computed_tokens,
        block_tables,
        block_size,
        advance,
    )
    if out is None:
        return PreparedInputs(*prepared)
    _fill(_fields(out), prepared, (0, 0, -1, len(prepared[0]), 0))
    return out


def gather_logits_rows(
    hidden: torch.Tensor,
    query_start_loc: torch.Tensor,
    idx_mapping: torch.Tensor,
    num_logits: torch.Tensor,
    positions: torch.Tensor,
    num_rows: int,
    *,
    out: LogitsRows | None = None,
) -> LogitsRows:
    """Gather the last ``num_logits`` tokens of each request.

    Args:
        hidden: [num_tokens, hidden_size].
        query_start_loc: int32 [num_reqs + 1].
        idx_mapping: int64 [num_reqs], batch row -> state row.
        num_logits: int64 [num_reqs], 0 inside a prompt.
        positions: int64 [num_tokens], of the flat batch.
        num_rows: sum of num_logits, known to the host.
        out: buffers to fill, longer than num_rows where rows are padded.
    """
    if not runs_kernels(hidden):
        rows = reference.gather_logits_rows(
            hidden, query_start_loc, idx_mapping, num_logits, positions, num_rows
        )
        if out is None:
            return LogitsRows(*rows)
        _fill(_fields(out), rows, (0, -1, 0))
        return out
    if out is None:
        indices = [torch.empty(num_rows, dtype=torch.int64, device=hidden.device) for _ in range(2)]
        out = LogitsRows(hidden.new_empty(num_rows, hidden.shape[1]), *indices)
    kernels.input_prep.gather_logits_rows(
        hidden, query_start_loc, idx_mapping, num_logits, positions, _fields(out)
    )
    return out


def append_tokens(
    states: torch.Tensor,
    positions: torch.Tensor,
    sampled: torch.Tensor,
    token_ids: torch.Tensor,
) -> None:
    """Write drawn tokens where the next step's gather finds them.

    Args:
        states, positions: int64 [num_rows], of ``LogitsRows``; rows of state -1 are skipped.
        sampled: int64 [num_rows]; negative (nothing allowed) is written as 0.
        token_ids: int32 [num_states, max_model_len], updated in place.
    """
    run = kernels.input_prep.append_tokens if runs_kernels(token_ids) else reference.append_tokens
    run(states, positions, sampled, token_ids)


def staged_write(
    target: torch.Tensor,
    rows: torch.Tensor,
    starts: torch.Tensor,
    value_start_loc: torch.Tensor,
    values: torch.Tensor,
) -> None:
    """Apply many small writes at once: ``target[rows[i], starts[i]:][:n_i] = values of i``.

    Args:
        target: [num_states, width] or [num_states], any dtype, updated in place.
        rows, starts: int64 [num_writes]; no two writes may overlap.
        value_start_loc: int32 or int64 [num_writes + 1], prefix sum of the lengths n_i.
        values: target's dtype [total], one write's after another's.
    """
    run = kernels.input_prep.staged_write if runs_kernels(target) else reference.staged_write
    run(target, rows, starts, value_start_loc, values)


def _fields(values: PreparedInputs | LogitsRows) -> tuple[torch.Tensor, ...]:
    return tuple(getattr(values, field.name) for field in fields(values))


def _fill(
    buffers: tuple[torch.Tensor, ...], values: tuple[torch.Tensor, ...], padding: tuple[int, ...]
) -> None:
    for buffer, value, pad in zip(buffers, values, padding, strict=True):
        buffer[: len(value)] = value
        buffer[len(value) :] = pad
