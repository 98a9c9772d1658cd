"""ModelRunner: executes a SchedulerOutput on a device.

Owns the model, the KV cache tensors and the persistent request state. ``forward`` and ``sample``
are two calls so that what happens between them (a grammar's bitmask) needs only the first. Nothing
here waits for the device; StepFuture does. It does not know why a request runs: that is the
scheduler's, which it never calls.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from pagestream.config import EngineConfig, ModelConfig
from pagestream.models.registry import load_model
from pagestream.runner.block_tables import BlockTables
from pagestream.runner.decode_graphs import CudaRecorder, DecodeGraphs, Recorder, graph_sizes
from pagestream.runner.input_batch import build_input_batch
from pagestream.runner.memory import block_bytes, num_blocks_on_cpu, num_blocks_on_cuda
from pagestream.runner.prompt_logprobs import PromptLogprobs, prompt_logprobs
from pagestream.runner.request_states import RequestStates
from pagestream.runner.step_future import StepFuture
from pagestream.sampling.row_tokens import RowTokens
from pagestream.sampling.sampler import Sampler
from pagestream.sampling.sampling_states import SamplingStates
from pagestream.sampling.warm_up import warm_up
from pagestream.sampling_params import MAX_LOGPROBS
from pagestream.scheduler.scheduler_output import SchedulerOutput
from pagestream_kernels import PreparedInputs, append_tokens, plan_attention, prepare_inputs
from pagestream_kernels.transfers import to_device

logger = logging.getLogger(__name__)

_TOKEN_BUDGET = {"cpu": 256, "cuda": 2048}
"""Tokens per step where the configuration names none: enough for the device to multiply at nearly
its full rate, and no more, because running answers wait for the step's end."""


@dataclass(frozen=True, slots=True)
class Forwarded:
    """A step between its forward pass and its sampling."""

    logits: torch.Tensor  # [num_rows, vocab_size]
    states: torch.Tensor  # int64 [num_rows], state row of each logits row
    positions: torch.Tensor  # int64 [num_rows], index of the token to be drawn in its sequence
    state_rows: list[int]  # states, on the host
    num_logits: list[int]  # per scheduled request
    prompt_logprobs: dict[int, PromptLogprobs]


class ModelRunner:
    """``recorder`` records decode steps; None: CUDA graphs on CUDA, unless enforce_eager."""

    def __init__(
        self,
        config: EngineConfig,
        model_config: ModelConfig,
        directory: Path,
        max_model_len: int,
        progress: Callable[[int, int], None] | None = None,
        recorder: Recorder | None = None,
    ) -> None:
        self.device = resolve_device(config.device)
        dtype = resolve_dtype(config.dtype, model_config, self.device)
        if config.quantization == "int8" and (self.device.type, dtype) != ("cpu", torch.float32):
            raise ValueError(
                f"quantization int8 is for CPU and float32, got device {self.device.type} and "
                f"{str(dtype).removeprefix('torch.')}"
            )
        if self.device.type == "cpu":
            torch.set_num_threads(config.num_threads or _physical_cores())
        elif recorder is None and not config.enforce_eager:
            recorder = CudaRecorder()
        self.max_num_batched_tokens = config.max_num_batched_tokens or max(
            config.max_num_seqs, _TOKEN_BUDGET[self.device.type]
        )
        self._config, self._model_config, self._dtype = config, model_config, dtype
        self._block_size = config.block_size
        self._model = load_model(
            *(model_config, directory, max_model_len, dtype, self.device, progress),
            load_format=config.load_format,
            quantization=config.quantization,
        )
        self._states = RequestStates(config.max_num_seqs, max_model_len, self.device)
        max_blocks = -(-max_model_len // config.block_size)
        self._tables = BlockTables(config.max_num_seqs + 1, max_blocks, self.device)
        self._sampling = SamplingStates(config.max_num_seqs, model_config, self.device)
        self._sampler = Sampler()
        self._in_flight: Forwarded | None = None
        self.num_blocks = config.num_blocks or self._num_blocks_for(
            config.max_num_seqs * max_blocks
        )
        self._kv_cache = self._allocate(self.num_blocks)
        most = config.max_num_seqs
        self._decode_inputs = PreparedInputs.empty(most, most, self.device)
        self._graphs: DecodeGraphs | None = None
        if recorder is not None:
            self._graphs = self._record_graphs(recorder)

    @torch.inference_mode()
    def forward(self, output: SchedulerOutput) -> None:
        """Run the model over the step's tokens and keep the logits for ``sample``."""
        self._apply(output)
        graphs = self._graphs
        if graphs is not None and self._is_decode(output, graphs.max_size):
            state_rows = [self._states.state_idx(s.request_id) for s in output.scheduled]
            logits, positions, states = graphs.replay(state_rows)
            ones = [1] * len(state_rows)
            self._in_flight = Forwarded(logits, states, positions, state_rows, ones, {})
            return
        batch = build_input_batch(output, self._states, self._tables, self._block_size)
        hidden = self._model.forward(
            batch.input_ids, batch.positions, batch.slot_mapping, batch.attention, self._kv_cache
        )
        rows = batch.logits_rows(hidden)
        pairs = zip(batch.state_rows, batch.num_logits, strict=True)
        self._in_flight = Forwarded(
            self._model.logits(rows.hidden),
            rows.states,
            rows.positions,
            [state_idx for state_idx, count in pairs for _ in range(count)],
            batch.num_logits,
            prompt_logprobs(batch, hidden, self._model, self._states, self._sampling),
        )

    @torch.inference_mode()
    def sample(self, bitmask: npt.NDArray[np.int32] | None = None) -> StepFuture:
        """Draw the step's tokens and append them to their state rows.

        ``bitmask``: int32 [num_rows, ceil(vocab_size / 32)], 1 = allowed; None allows all.
        """
        step = self._in_flight
        if step is None:
            raise RuntimeError("sample() without a forward() before it")
        self._in_flight = None
        states = self._states
        tokens = RowTokens(step.state_rows, step.positions, states.token_ids)
        allowed = None if bitmask is None else to_device(bitmask, torch.int32, self.device)
        sampled = self._sampler.sample(step.logits, self._sampling, tokens, allowed)
        append_tokens(step.states, step.positions, sampled.token_ids, states.token_ids)
        self._sampling.count_tokens(step.state_rows, sampled.token_ids)
        return StepFuture(sampled, step.num_logits, step.prompt_logprobs)

    @torch.inference_mode()
    def warm_up_sampling(self) -> None:
        """Run everything that ``sample`` may run. While there are no requests."""
        shape = (1, self._model_config.hidden_size)
        hidden = torch.zeros(shape, dtype=self._dtype, device=self.device)
        warm_up(self._sampling, self._states.token_ids, self._model.logits(hidden))

    def release(self, request_ids: list[str]) -> None:
        """Drop the state rows of requests that finished or were preempted."""
        for request_id in request_ids:
            self._sampling.remove(self._states.remove(request_id))

    def _apply(self, output: SchedulerOutput) -> None:
        self.release(output.released_request_ids)
        rows = self._states.add(output.new_requests)
        for state_idx in rows:
            self._tables.reset(state_idx)
        self._sampling.add(list(zip(rows, output.new_requests, strict=True)))
        state_of = self._states.state_idx
        self._tables.append([(state_of(s.request_id), s.new_block_ids) for s in output.scheduled])

    def _is_decode(self, output: SchedulerOutput, most: int) -> bool:
        """Whether each request adds one token after its last, and there are at most ``most``."""
        return len(output.scheduled) <= most and all(
            share.num_scheduled_tokens == share.num_logits == 1 for share in output.scheduled
        )

    def _decode(self, idx_mapping: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """A decode step as device work alone: state rows -> logits, positions of drawn tokens."""
        states, tables, num_reqs = self._states, self._tables.block_tables, len(idx_mapping)
        # A padded row has no token: it reads no cache, writes none, and its state stays as it is.
        query_lens = (idx_mapping != states.padding_state).to(torch.int64)
        prepared = prepare_inputs(
            idx_mapping,
            query_lens,
            None,
            states.token_ids,
            states.num_computed_tokens,
            tables,
            self._block_size,
            advance=True,
            out=self._decode_inputs.narrow(num_reqs, num_reqs),
        )
        attention = plan_attention(
            prepared.query_start_loc,
            prepared.seq_lens,
            tables,
            self._block_size,
            idx_mapping=idx_mapping,
            max_query_len=1,
        )
        hidden = self._model.forward(
            prepared.input_ids,
            prepared.positions,
            prepared.slot_mapping,
            attention,
            self._kv_cache,
        )
        return self._model.logits(hidden), prepared.positions + 1

    @torch.inference_mode()
    def _record_graphs(self, recorder: Recorder) -> DecodeGraphs:
        sizes = graph_sizes(self._config.max_num_seqs)
        padding_state = self._states.padding_state
        graphs = DecodeGraphs(sizes, self._decode, padding_state, self.device, recorder)
        graphs.record(log_progress("decode graphs recorded"))
        return graphs

    def _allocate(self, num_blocks: int) -> torch.Tensor:
        """[num_layers, 2 (k, v), num_blocks, block_size, num_kv_heads, head_dim]"""
        model_config = self._model_config
        logger.info(
            "KV cache: %d blocks of %d tokens, %.0f MiB, %s on %s",
            num_blocks,
            self._block_size,
            num_blocks * block_bytes(model_config, self._block_size, self._dtype) / 2**20,
            self._dtype,
            self.device,
        )
        shape = (
            model_config.num_hidden_layers,
            2,
            num_blocks,
            self._block_size,
            model_config.num_key_value_heads,
            model_config.head_dim,
        )
        return torch.zeros(shape, dtype=self._dtype, device=self.device)

    def _num_blocks_for(self, most: int) -> int:
        bytes_per_block = block_bytes(self._model_config, self._block_size, self._dtype)
        if self.device.type == "cpu":
            return num_blocks_on_cpu(bytes_per_block, most)
        utilization = self._config.gpu_memory_utilization
        return num_blocks_on_cuda(
            self.device, bytes_per_block, most, utilization, self._run_largest_step
        )

    @torch.inference_mode()
    def _run_largest_step(self) -> None:
        """As much as a step can take beside the KV cache: a full token budget in one prompt, and a
        row of logits for every request."""
        num_tokens = min(self.max_num_batched_tokens, self._states.token_ids.shape[1])
        num_blocks = -(-num_tokens // self._block_size)
        self._kv_cache = self._allocate(num_blocks)
        device = self.device
        table = torch.arange(num_blocks, dtype=torch.int32, device=device)[None]
        positions = torch.arange(num_tokens, device=device)
        ends = to_device([0, num_tokens], torch.int32, device)
        attention = plan_attention(ends, ends[1:], table, self._block_size)
        hidden = self._model.forward(
            torch.zeros_like(positions), positions, positions, attention, self._kv_cache
        )
        rows = torch.zeros(self._config.max_num_seqs, dtype=torch.int64, device=device)
        logits = self._model.logits(hidden[rows])
        logits.to(torch.float32, copy=True).topk(MAX_LOGPROBS)


def log_progress(what: str) -> Callable[[int, int], None]:
    """A progress callback for work that nobody may be watching: the log, at every quarter."""

    def progress(done: int, total: int) -> None:
        if done == total or done * 4 // total > (done - 1) * 4 // total:
            logger.info("%s: %d of %d", what, done, total)

    return progress


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
