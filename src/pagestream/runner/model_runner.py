"""ModelRunner: executes a SchedulerOutput on a device.

Owns the model, the KV cache tensors and the persistent request state. ``forward`` and ``sample``
are two calls so that what happens between them (a grammar's bitmask) needs only the first. It does
not know why a request runs: that is the scheduler's, which it never calls.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from pathlib import Path

import torch

from pagestream.config import EngineConfig, ModelConfig
from pagestream.models.registry import load_model
from pagestream.runner.block_tables import BlockTables
from pagestream.runner.input_batch import InputBatch, build_input_batch
from pagestream.runner.prompt_logprobs import prompt_logprobs
from pagestream.runner.request_states import RequestStates
from pagestream.runner.step_future import StepFuture
from pagestream.sampling.row_tokens import RowTokens
from pagestream.sampling.sampler import Sampler
from pagestream.sampling.sampling_states import SamplingStates
from pagestream.scheduler.scheduler_output import SchedulerOutput

logger = logging.getLogger(__name__)

_CPU_KV_BYTES = 2 << 30
"""Most memory that an unset num_blocks gives the KV cache on CPU (a quarter of RAM if less)."""
_CUDA_KV_SHARE = 0.9
"""Share of the free device memory that an unset num_blocks gives the KV cache on CUDA."""


class ModelRunner:
    def __init__(
        self,
        config: EngineConfig,
        model_config: ModelConfig,
        directory: Path,
        max_model_len: int,
        progress: Callable[[int, int], None] | None = None,
    ) -> None:
        self.device = resolve_device(config.device)
        dtype = resolve_dtype(config.dtype, model_config, self.device)
        if self.device.type == "cpu":
            torch.set_num_threads(config.num_threads or _physical_cores())
        self._block_size = config.block_size
        self._model = load_model(
            model_config, directory, max_model_len, dtype, self.device, progress
        )
        block_bytes = _block_bytes(model_config, config.block_size, dtype)
        self.num_blocks = config.num_blocks or _num_blocks_for(
            self.device, block_bytes, config.max_num_seqs * -(-max_model_len // config.block_size)
        )
        logger.info(
            "KV cache: %d blocks of %d tokens, %.0f MiB, %s on %s",
            self.num_blocks,
            config.block_size,
            self.num_blocks * block_bytes / 2**20,
            dtype,
            self.device,
        )
        # [num_layers, 2 (k, v), num_blocks, block_size, num_kv_heads, head_dim]
        self._kv_cache = torch.zeros(
            (
                model_config.num_hidden_layers,
                2,
                self.num_blocks,
                config.block_size,
                model_config.num_key_value_heads,
                model_config.head_dim,
            ),
            dtype=dtype,
            device=self.device,
        )
        self._states = RequestStates(config.max_num_seqs, max_model_len, self.device)
        max_blocks = -(-max_model_len // config.block_size)
        self._tables = BlockTables(config.max_num_seqs, max_blocks, self.device)
        self._sampling = SamplingStates(config.max_num_seqs, model_config, self.device)
        self._sampler = Sampler()
        self._in_flight: tuple[InputBatch, torch.Tensor] | None = None  # hidden states

    @torch.inference_mode()
    def forward(self, output: SchedulerOutput) -> None:
        """Run the model over the step's tokens and keep its hidden states for ``sample``."""
        self._apply(output)
        batch = build_input_batch(output, self._states, self._tables, self._block_size)
        hidden = self._model.forward(
            batch.input_ids, batch.positions, batch.slot_mapping, batch.attention, self._kv_cache
        )
        self._states.advance(batch.idx_mapping, batch.query_lens)
        self._in_flight = batch, hidden

    @torch.inference_mode()
    def sample(self, bitmask: torch.Tensor | None = None) -> StepFuture:
        """Draw the step's tokens and append them to their state rows.

        ``bitmask``: int32 [num_rows, ceil(vocab_size / 32)], 1 = allowed; None allows all.
        """
        if self._in_flight is None:
            raise RuntimeError("sample() without a forward() before it")
        batch, hidden = self._in_flight
        self._in_flight = None
        logits = self._model.logits(hidden[batch.logits_indices])
        tokens = RowTokens(
            batch.logits_rows, self._states.num_tokens[batch.logits_states], self._states.token_ids
        )
        sampled = self._sampler.sample(logits, self._sampling, tokens, bitmask)
        prompt = prompt_logprobs(batch, hidden, self._model, self._states, self._sampling)
        self._states.append_tokens(batch.logits_states, sampled.token_ids)
        self._sampling.count_tokens(batch.logits_rows, sampled.token_ids)
        return StepFuture(sampled, batch.num_logits, prompt)

    def release(self, request_ids: list[str]) -> None:
        """Drop the state rows of requests that finished or were preempted."""
        for request_id in request_ids:
            self._sampling.remove(self._states.remove(request_id))

    def _apply(self, output: SchedulerOutput) -> None:
        self.release(output.released_request_ids)
        for request in output.new_requests:
            state_idx = self._states.add(request)
            self._tables.reset(state_idx)
            self._sampling.add(state_idx, request)
        for scheduled in output.scheduled:
            self._tables.append(
                self._states.state_idx(scheduled.request_id), scheduled.new_block_ids
            )


def resolve_device(device: str) -> torch.device:
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device == "cuda" and not torch.cuda.is_available():
        raise ValueError("device is cuda, but torch finds no CUDA device")
    return torch.device(device)


def resolve_dtype(dtype: str, model_config: ModelConfig, device: torch.device) -> torch.dtype:
    """auto: float32 on CPU (exact, and faster there), the checkpoint's own on CUDA."""
    if dtype == "auto":
        dtype = "float32" if device.type == "cpu" else model_config.dtype
    resolved = getattr(torch, dtype, None)
    if not isinstance(resolved, torch.dtype):
        raise ValueError(f"the checkpoint's dtype {dtype!r} is unknown; set dtype")
    return resolved


def _block_bytes(model_config: ModelConfig, block_size: int, dtype: torch.dtype) -> int:
    per_token = 2 * model_config.num_hidden_layers * model_config.num_key_value_heads
    return per_token * model_config.head_dim * block_size * dtype.itemsize


def _num_blocks_for(device: torch.device, block_bytes: int, most: int) -> int:
    if device.type == "cuda":
        budget = int(torch.cuda.mem_get_info(device)[0] * _CUDA_KV_SHARE)
    else:
        ram = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        budget = min(_CPU_KV_BYTES, ram // 4)
    return max(1, min(most, budget // block_bytes))


def _physical_cores() -> int:
    """Hyper-threads share the units that matmuls saturate, so one thread per core."""
    try:
        siblings = {
            Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list").read_text()
            for cpu in os.sched_getaffinity(0)
        }
        return len(siblings)
    except OSError:
        return len(os.sched_getaffinity(0))
