"""The load generator drives the engine of its own process."""

import threading

from pagestream.bench.driver import run_point
from pagestream.bench.offline import OfflineTarget
from pagestream.bench.workload import Lengths, PlannedRequest, Point, Workload
from pagestream.config import EngineConfig


def test_offline_requests_are_answered_refused_and_timed_out(tiny_model):
    config = EngineConfig(str(tiny_model), num_threads=1, num_blocks=20, block_size=16)
    target = OfflineTarget(config, ignore_eos=True, seed=0)
    try:
        work = Workload(Lengths.parse("20-40"), Lengths.parse("4-8"), 0, 16, range(3, 256))
        point = work.concurrency_point(0, 3, 6)
        records = run_point(target, point, 0, 60.0, lambda record: None)
        planned = {request.index: request for request in point.requests}
        for record in records:
            request = planned[record.index]
            assert (record.outcome, record.finish_reason) == ("ok", "length")
            assert record.num_output_tokens == len(record.responses) == request.max_tokens
            assert record.num_input_tokens == len(request.prompt_token_ids)
            assert 0 < record.first_token_s < record.end_s
        assert max(record.num_cached_tokens for record in records) == 16
        assert target.queue_depth() == 0
        assert target.peak_memory_bytes() > 2**20

        refused = PlannedRequest(0, (5, 999), 4)
        late = PlannedRequest(1, tuple(range(3, 40)), 200)
        lines = Point("concurrency", 2, (refused, late))
        first, second = sorted(
            run_point(target, lines, 0, 0.05, lambda record: None), key=lambda each: each.index
        )
        assert first.outcome == "error"
        assert "999" in first.error
        assert second.outcome == "timeout"
        assert second.num_output_tokens < 200
    finally:
        target.close()
    assert "engine-loop" not in {thread.name for thread in threading.enumerate()}
