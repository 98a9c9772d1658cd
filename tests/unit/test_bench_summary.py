"""The statistics of a load test, against numbers worked out by hand."""

import dataclasses

import numpy as np
import pytest

from pagestream.bench.records import RequestRecord, RunWriter, Samples, read_run, read_runs
from pagestream.bench.summary import Slo, percentile, spread_ms, summarize


def record(index, planned, responses, *, start=None, requested=None, **fields):
    tokens = sum(count for _, count in responses)
    return RequestRecord(
        point=0,
        index=index,
        planned_start_s=planned,
        start_s=planned if start is None else start,
        end_s=fields.pop("end", responses[-1][0] if responses else planned),
        requested_output_tokens=tokens if requested is None else requested,
        num_output_tokens=tokens,
        responses=responses,
        **fields,
    )


QUICK = record(0, 1.0, [(1.1, 1), (1.2, 2), (1.4, 3)], num_input_tokens=10, num_cached_tokens=4)
"""TTFT 100 ms, TPOT 300 / 5 = 60 ms, gaps 100 and 200 ms, e2e 400 ms."""
SLOW = record(
    1,
    1.0,
    [(1.5, 1), (1.5, 0), (3.0, 1)],
    start=1.2,
    requested=8,
    num_input_tokens=30,
    num_cached_tokens=0,
)
"""TTFT 500 ms from when it was due, TPOT 1500 ms, e2e 2000 ms; six tokens too few."""
FAILED = record(2, 2.0, [(2.5, 5)], outcome="error", error="broken", end=5.0)
LATE = record(3, 2.0, [], outcome="timeout", error="too late", end=4.0)


def test_a_point_by_hand():
    slo = Slo(ttft_ms=200, tpot_ms=100)
    samples = Samples([0.0, 3.0], 2**20)
    point = summarize("2 concurrent", "concurrency", 2, [QUICK, SLOW, FAILED, LATE], slo, samples)
    assert (point.num_requests, point.num_ok, point.num_errors, point.num_timeouts) == (4, 2, 1, 1)
    assert point.duration_s == pytest.approx(4.0)
    assert point.requests_per_s == pytest.approx(2 / 4)
    assert point.output_tokens_per_s == pytest.approx((6 + 2) / 4)
    assert point.goodput_requests_per_s == pytest.approx(1 / 4)
    assert point.input_tokens_mean == 20
    assert point.output_tokens_mean == 4
    assert point.num_short_answers == 1
    assert point.cached_token_share == pytest.approx(4 / 40)
    assert point.tokens_per_response == pytest.approx(8 / 5)
    assert point.ttft_ms.count == 2
    assert point.ttft_ms.mean == pytest.approx(300)
    assert point.ttft_ms.median == pytest.approx(300)
    assert point.ttft_ms.p90 == pytest.approx(100 + 0.9 * 400)
    assert point.tpot_ms.median == pytest.approx((60 + 1500) / 2)
    assert point.itl_ms.count == 3
    assert point.itl_ms.median == pytest.approx(200)
    assert point.e2e_ms.p99 == pytest.approx(400 + 0.99 * 1600)
    assert point.start_lag_ms.p99 == pytest.approx(200 * (2 + 0.97 - 2))
    assert (point.queue_depth_mean, point.queue_depth_max) == (1.5, 3.0)
    assert point.peak_memory_bytes == 2**20


def test_without_limits_there_is_no_goodput_and_nothing_is_made_up():
    point = summarize("x", "rate", 1, [LATE], Slo(), Samples())
    assert point.goodput_requests_per_s is None
    assert point.num_ok == 0
    assert point.requests_per_s == 0
    assert dataclasses.astuple(point.ttft_ms) == (0, None, None, None, None)
    assert point.tokens_per_response is None
    assert point.cached_token_share is None
    assert point.queue_depth_max is None


def test_one_response_has_no_time_per_token():
    whole = record(0, 0.0, [(2.0, 9)])
    assert whole.tpot_s is None
    assert whole.ttft_s == whole.e2e_s == 2.0
    assert Slo(tpot_ms=1.0).kept_by(whole)
    assert not Slo(ttft_ms=1.0).kept_by(whole)
    assert record(0, 0.0, [(2.0, 1), (2.5, 0)]).tpot_s is None


@pytest.mark.parametrize("q", [0.0, 0.5, 0.9, 0.99, 1.0])
def test_percentiles_are_numpys(q):
    values = [5.0, 1.0, 9.0, 2.0, 2.0, 7.5]
    assert percentile(values, q) == pytest.approx(np.percentile(values, q * 100))
    assert percentile([4.0], q) == 4.0


def test_unmeasured_values_are_left_out_of_a_spread():
    assert spread_ms([None, 0.002]).count == 1
    assert spread_ms([None, 0.002]).median == 2


def test_a_run_directory_comes_back_as_it_was(tmp_path):
    writer = RunWriter(tmp_path / "a", {"name": "first", "points": []})
    writer.add([QUICK, FAILED])
    with pytest.raises(ValueError, match="already holds a run"):
        RunWriter(tmp_path / "a", {})
    summary = summarize("x", "rate", 1, [QUICK, FAILED], Slo(), Samples())
    writer.close([dataclasses.asdict(summary)], complete=True)
    run = read_run(tmp_path / "a")
    assert run.records == [QUICK, FAILED]
    assert run.info["complete"]
    assert run.summary[0]["num_errors"] == 1
    assert [each.name for each in read_runs([tmp_path / "a", tmp_path / "a"])] == [
        "first",
        "first (2)",
    ]


def test_what_is_no_run_is_refused(tmp_path):
    with pytest.raises(ValueError, match="holds no run of `pagestream bench`"):
        read_run(tmp_path)
