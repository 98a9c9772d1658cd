"""EngineStats: the engine's counters and gauges as plain numbers, after one step.

Picklable, so that whoever exports them may live in another thread or process. Gauges describe the
moment; names ending in ``_total`` only grow.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class EngineStats:
    requests_running: int = 0
    requests_waiting: int = 0
    kv_blocks_free: int = 0
    kv_blocks_total: int = 0
    kv_blocks_cached: int = 0
    """Free blocks that can still be found by their content (part of kv_blocks_free)."""
    step_batch_size: int = 0
    """Requests in the last step."""
    generated_tokens_total: int = 0
    preemptions_total: int = 0
    cancelled_total: int = 0
    expired_total: int = 0
    prefix_queries_total: int = 0
    """Prompt tokens looked up in the prefix cache, and found there (next)."""
    prefix_hits_total: int = 0
