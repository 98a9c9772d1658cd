"""Numbers out of records: latencies, rates, goodput and failures of one point.

Percentiles interpolate linearly between the two nearest values (rank (n - 1) q, as numpy does by
default); with few requests the 99th is close to the worst. Only requests that succeeded have
latencies; those that failed are counted beside them. Knows nothing of how records came about.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from pagestream.bench.records import RequestRecord, Samples


@dataclass(frozen=True)
class Spread:
    """A distribution in milliseconds; all None when there was nothing to measure."""

    count: int
    mean: float | None
    median: float | None
    p90: float | None
    p99: float | None


@dataclass(frozen=True)
class Slo:
    """What a request must keep to count for goodput; None: no limit."""

    ttft_ms: float | None = None
    tpot_ms: float | None = None

    def kept_by(self, record: RequestRecord) -> bool:
        """A request without a time per token (one response, or one token) keeps that limit."""
        ttft, tpot = record.ttft_s, record.tpot_s
        in_time = self.ttft_ms is None or (ttft is not None and ttft * 1e3 <= self.ttft_ms)
        return in_time and (self.tpot_ms is None or tpot is None or tpot * 1e3 <= self.tpot_ms)


@dataclass(frozen=True)
class PointSummary:
    label: str
    kind: str
    value: float
    num_requests: int
    num_ok: int
    num_errors: int
    num_timeouts: int
    duration_s: float
    """From the first planned start to the last end, ramp and tail included."""
    requests_per_s: float
    """Of those that succeeded; so are the tokens."""
    output_tokens_per_s: float
    goodput_requests_per_s: float | None
    """Those that kept the limits; None without limits."""
    input_tokens_mean: float | None
    output_tokens_mean: float | None
    num_short_answers: int
    """Fewer output tokens than asked for."""
    cached_token_share: float | None
    """Of all prompt tokens, found in the prefix cache."""
    tokens_per_response: float | None
    """Above 1, ``itl_ms`` is the time between responses of several tokens."""
    ttft_ms: Spread
    tpot_ms: Spread
    itl_ms: Spread
    e2e_ms: Spread
    start_lag_ms: Spread
    """How late requests were sent: a load generator that cannot keep up shows here."""
    queue_depth_mean: float | None
    queue_depth_max: float | None
    """Requests waiting in the server; None where it was not to be seen."""
    peak_memory_bytes: int | None
    """Of the engine's process since its start; None where it was not to be seen."""


def percentile(values: Sequence[float], q: float) -> float:
    """``q`` between 0 and 1; at least one value."""
    ordered = sorted(values)
    rank = (len(ordered) - 1) * q
    low = math.floor(rank)
    high = math.ceil(rank)
    return ordered[low] + (ordered[high] - ordered[low]) * (rank - low)


def spread_ms(seconds: Iterable[float | None]) -> Spread:
    values = [value * 1e3 for value in seconds if value is not None]
    if not values:
        return Spread(0, None, None, None, None)
    return Spread(
        len(values),
        sum(values) / len(values),
        percentile(values, 0.5),
        percentile(values, 0.9),
        percentile(values, 0.99),
    )


def summarize(
    label: str,
    kind: str,
    value: float,
    records: Sequence[RequestRecord],
    slo: Slo,
    samples: Samples,
) -> PointSummary:
    """All records of one point, at least one."""
    ok = [record for record in records if record.outcome == "ok"]
    started = min(record.planned_start_s for record in records)
    duration = max(max(record.end_s for record in records) - started, 1e-9)
    num_tokens = sum(record.num_output_tokens for record in ok)
    num_responses = sum(1 for record in ok for _, count in record.responses if count)
    has_slo = slo != Slo()
    return PointSummary(
        label=label,
        kind=kind,
        value=value,
        num_requests=len(records),
        num_ok=len(ok),
        num_errors=sum(record.outcome == "error" for record in records),
        num_timeouts=sum(record.outcome == "timeout" for record in records),
        duration_s=duration,
        requests_per_s=len(ok) / duration,
        output_tokens_per_s=num_tokens / duration,
        goodput_requests_per_s=sum(map(slo.kept_by, ok)) / duration if has_slo else None,
        input_tokens_mean=_mean([r.num_input_tokens for r in ok]),
        output_tokens_mean=_mean([r.num_output_tokens for r in ok]),
        num_short_answers=sum(r.num_output_tokens < r.requested_output_tokens for r in ok),
        cached_token_share=_cached_share(ok),
        tokens_per_response=num_tokens / num_responses if num_responses else None,
        ttft_ms=spread_ms(record.ttft_s for record in ok),
        tpot_ms=spread_ms(record.tpot_s for record in ok),
        itl_ms=spread_ms(gap for record in ok for gap in record.gaps_s),
        e2e_ms=spread_ms(record.e2e_s for record in ok),
        start_lag_ms=spread_ms(r.start_s - r.planned_start_s for r in records),
        queue_depth_mean=_mean(samples.waiting),
        queue_depth_max=max(samples.waiting, default=None),
        peak_memory_bytes=samples.peak_memory_bytes,
    )


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


def _cached_share(records: Sequence[RequestRecord]) -> float | None:
    known = [
        (record.num_cached_tokens, record.num_input_tokens)
        for record in records
        if record.num_cached_tokens is not None and record.num_input_tokens
    ]
    if not known:
        return None
    return sum(cached for cached, _ in known) / sum(total for _, total in known)
