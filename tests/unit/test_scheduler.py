"""The scheduler alone: budget, chunks, order, preemption, ends."""

import pickle

import pytest
from scheduling import Bench, make_request

from pagestream.request import RequestStatus
from pagestream.sampling_params import SamplingParams
from pagestream.scheduler.scheduler import QueueFullError


def shares(output):
    return {s.request_id: s.num_scheduled_tokens for s in output.scheduled}


def test_long_prompt_runs_in_chunks_of_the_budget():
    bench = Bench(max_num_batched_tokens=16)
    bench.scheduler.add_request(make_request("a", 40, max_tokens=1))
    steps = [bench.step() for _ in range(3)]
    assert [shares(step)["a"] for step in steps] == [16, 16, 8]
    assert [step.scheduled[0].num_logits for step in steps] == [0, 0, 1]
    assert bench.finish_reasons("a") == ["length"]


def test_decodes_run_before_new_prompts_and_share_the_budget():
    bench = Bench(max_num_batched_tokens=16)
    bench.scheduler.add_request(make_request("a", 4, max_tokens=10))
    bench.step()
    bench.scheduler.add_request(make_request("b", 40))
    assert shares(bench.step()) == {"a": 1, "b": 15}


def test_first_come_first_started():
    bench = Bench(max_num_seqs=2)
    for name in "abcd":
        bench.scheduler.add_request(make_request(name, 10, max_tokens=2))
    first = [new.request_id for step in bench.run() for new in step.new_requests]
    assert first == list("abcd")


def test_a_prompt_that_does_not_fit_now_holds_back_those_behind_it():
    bench = Bench(num_blocks=4, block_size=16)
    bench.scheduler.add_request(make_request("a", 40, max_tokens=5))
    bench.step()
    bench.scheduler.add_request(make_request("big", 30))
    bench.scheduler.add_request(make_request("small", 2))
    assert set(shares(bench.step())) == {"a"}
    assert bench.scheduler.num_waiting == 2


def test_preemption_takes_the_last_and_the_first_progresses():
    bench = Bench(num_blocks=4, block_size=16, max_num_batched_tokens=200)
    for name in "abc":
        bench.scheduler.add_request(make_request(name, 16, max_tokens=30))
    bench.run()
    assert bench.scheduler.num_preemptions > 0
    for name in "abc":
        assert len(bench.tokens_of(name)) == 30
        assert bench.finish_reasons(name) == ["length"]
    assert bench.kv.num_free_blocks == 4
    order = [o.request_id for o in bench.outputs if o.finish_reason is not None]
    assert order[0] == "a"


def test_preempted_request_returns_with_its_tokens():
    bench = Bench(num_blocks=3, block_size=16, token=lambda request_id: ord(request_id))
    bench.scheduler.add_request(make_request("a", 15, max_tokens=20))
    bench.scheduler.add_request(make_request("b", 15, max_tokens=20))
    again = [new for step in bench.run() for new in step.new_requests][2]
    assert again.request_id == "b"
    assert again.num_computed_tokens == 0
    assert again.num_prompt_tokens == 15
    assert again.token_ids[15:] == [ord("b")] * (len(again.token_ids) - 15)
    assert len(again.token_ids) > 15


def test_released_rows_are_told_exactly_once():
    bench = Bench()
    bench.scheduler.add_request(make_request("a", 4, max_tokens=1))
    bench.scheduler.add_request(make_request("b", 4, max_tokens=3))
    released = [step.released_request_ids for step in bench.run()]
    released.append(bench.scheduler.schedule().released_request_ids)
    assert released == [[], ["a"], [], ["b"]]


def test_stop_token_ends_and_is_part_of_the_output():
    bench = Bench(token=lambda _: 9)
    params = SamplingParams(stop_token_ids=(9,))
    request = make_request("a", 4, stop_token_ids=frozenset({9}), sampling_params=params)
    bench.scheduler.add_request(request)
    bench.run()
    assert bench.tokens_of("a") == [9]
    assert bench.outputs[-1].stop_reason == 9


def test_end_of_sequence_has_no_stop_reason():
    bench = Bench(token=lambda _: 9)
    bench.scheduler.add_request(make_request("a", 4, stop_token_ids=frozenset({9})))
    bench.run()
    assert bench.finish_reasons("a") == ["stop"]
    assert bench.outputs[-1].stop_reason is None


def test_nothing_left_to_draw_is_an_error_of_that_request():
    bench = Bench(token=lambda name: -1 if name == "bad" else 5)
    for name in ("bad", "good"):
        bench.scheduler.add_request(make_request(name, 4, max_tokens=2))
    bench.run()
    assert bench.finish_reasons("bad") == ["error"]
    assert bench.tokens_of("bad") == []
    assert "no token is allowed" in bench.outputs[0].error
    assert bench.tokens_of("good") == [5, 5]
    assert bench.kv.num_free_blocks == bench.kv.num_blocks


def test_sequence_limit_ends_with_length():
    bench = Bench(max_seq_len=12)
    bench.scheduler.add_request(make_request("a", 10, max_tokens=50))
    bench.run()
    assert len(bench.tokens_of("a")) == 2
    assert bench.finish_reasons("a") == ["length"]


@pytest.mark.parametrize("steps_before", [0, 1, 2])
def test_abort_frees_at_once_in_any_state(steps_before):
    bench = Bench(max_num_seqs=1, max_num_batched_tokens=8)
    for name in "ab":
        bench.scheduler.add_request(make_request(name, 12, max_tokens=50))
    for _ in range(steps_before):
        bench.step()
    for name in "ab":
        assert str(bench.scheduler.abort_request(name).finish_reason) == "abort"
        assert bench.scheduler.abort_request(name) is None
    assert bench.kv.num_free_blocks == bench.kv.num_blocks
    assert bench.step().scheduled == []


def test_abort_between_schedule_and_update_drops_the_token():
    bench = Bench()
    bench.scheduler.add_request(make_request("a", 4))
    output = bench.scheduler.schedule()
    bench.scheduler.abort_request("a")
    assert bench.scheduler.update(output, [[7]]) == []
    assert bench.kv.num_free_blocks == bench.kv.num_blocks


def test_full_queue_is_refused_with_both_numbers():
    bench = Bench(max_num_waiting=2)
    for name in "ab":
        bench.scheduler.add_request(make_request(name, 4))
    with pytest.raises(QueueFullError, match=r"2 requests are waiting and max_num_waiting is 2"):
        bench.scheduler.add_request(make_request("c", 4))
    with pytest.raises(ValueError, match="already in use"):
        bench.scheduler.add_request(make_request("a", 4))


def test_scheduler_output_is_plain_picklable_data():
    bench = Bench()
    bench.scheduler.add_request(make_request("a", 20))
    output = bench.scheduler.schedule()
    assert pickle.loads(pickle.dumps(output)) == output
    assert output.num_scheduled_tokens == 20


def test_counts_advance_at_schedule_so_that_the_next_step_can_be_planned():
    bench = Bench()
    request = make_request("a", 20)
    bench.scheduler.add_request(request)
    first = bench.scheduler.schedule()
    assert request.status is RequestStatus.RUNNING
    assert (request.num_computed_tokens, request.num_output_placeholders) == (20, 1)
    second = bench.scheduler.schedule()
    assert shares(second) == {"a": 1}
    assert bench.scheduler.update(first, [[5]])[0].token_ids == [5]
    assert bench.scheduler.update(second, [[6]])[0].token_ids == [6]
    assert request.token_ids[20:] == [5, 6]


PREFIX = list(range(100, 140))


def test_prefix_hit_shortens_the_prompt_and_is_reported():
    bench = Bench(enable_prefix_caching=True)
    bench.scheduler.add_request(make_request("a", 0, token_ids=[*PREFIX, 1]))
    bench.run()
    bench.scheduler.add_request(make_request("b", 0, token_ids=[*PREFIX, 2]))
    assert shares(bench.step()) == {"b": 41 - 32}
    (first,) = [o for o in bench.outputs if o.request_id == "b"]
    assert first.num_cached_tokens == 32
    assert (bench.scheduler.num_prefix_queries, bench.scheduler.num_prefix_hits) == (82, 32)


def test_per_request_off_neither_reads_nor_leaves_anything():
    bench = Bench(enable_prefix_caching=True)
    off = {"token_ids": PREFIX, "sampling_params": SamplingParams(prefix_cache=False)}
    bench.scheduler.add_request(make_request("a", 0, **off))
    bench.run()
    assert bench.kv.num_cached_blocks == 0
    bench.scheduler.add_request(make_request("b", 0, token_ids=PREFIX))
    bench.run()
    bench.scheduler.add_request(make_request("c", 0, **off))
    assert shares(bench.step()) == {"c": 40}


def prioritized(name, priority, arrival_time=0.0, **fields):
    params = SamplingParams(priority=priority)
    return make_request(name, 16, sampling_params=params, arrival_time=arrival_time, **fields)


def test_priority_goes_first_and_waiting_outweighs_it():
    bench = Bench(max_num_seqs=1, priority_aging_s=10.0)
    for name, priority, arrival in [("a", 5, 0), ("b", 0, 1), ("c", 0, 51), ("d", -1, 2)]:
        bench.scheduler.add_request(prioritized(name, priority, arrival))
    started = [new.request_id for step in bench.run() for new in step.new_requests]
    assert started == ["d", "b", "a", "c"]


@pytest.mark.parametrize("limits", [{"max_num_seqs": 2}, {"num_blocks": 4}])
def test_an_urgent_arrival_preempts_the_last_in_order(limits):
    bench = Bench(block_size=16, **{"num_blocks": 100, **limits})
    for name in "ab":
        bench.scheduler.add_request(prioritized(name, 0, max_tokens=20))
    bench.step()
    bench.step()
    bench.scheduler.add_request(prioritized("urgent", -5, max_tokens=20))
    step = bench.step()
    assert next(s.request_id for s in step.scheduled) == "urgent"
    assert step.released_request_ids == ["b"]
    bench.run()
    for name in ("a", "b", "urgent"):
        assert len(bench.tokens_of(name)) == 20


def test_nobody_is_preempted_for_a_request_that_would_not_fit_anyway():
    bench = Bench(num_blocks=6, block_size=16, max_num_batched_tokens=200)
    bench.scheduler.add_request(make_request("first", 60, max_tokens=3, arrival_time=-1e6))
    bench.scheduler.add_request(prioritized("small", 0, max_tokens=9))
    bench.step()
    big = make_request("big", 64, sampling_params=SamplingParams(priority=-5))
    bench.scheduler.add_request(big)
    assert set(shares(bench.step())) == {"first", "small"}
    assert bench.scheduler.num_preemptions == 0


def test_deadline_ends_waiting_and_running_requests():
    bench = Bench(max_num_seqs=1)
    bench.scheduler.add_request(make_request("runs", 4, max_tokens=99, deadline=10.0))
    bench.scheduler.add_request(make_request("waits", 4, max_tokens=99, deadline=9.0))
    bench.step()
    assert bench.scheduler.expire(8.9) == []
    (waits,) = bench.scheduler.expire(9.5)
    (runs,) = bench.scheduler.expire(10.0)
    assert (waits.request_id, runs.request_id) == ("waits", "runs")
    assert (str(runs.finish_reason), runs.stop_reason) == ("abort", "deadline")
    assert bench.kv.num_free_blocks == bench.kv.num_blocks
    assert bench.scheduler.expire(99.0) == []


def test_static_batching_waits_for_the_whole_batch():
    bench = Bench(max_num_seqs=2, static_batching=True)
    for name, count in [("a", 2), ("b", 6), ("c", 2)]:
        bench.scheduler.add_request(make_request(name, 4, max_tokens=count))
    steps = bench.run()
    assert [sorted(shares(step)) for step in steps[:6]] == [["a", "b"]] * 2 + [["b"]] * 4
    assert sorted(shares(steps[6])) == ["c"]


def test_a_step_in_flight_keeps_the_blocks_of_an_ended_request():
    bench = Bench(token=lambda _: 9)
    bench.scheduler.add_request(make_request("a", 16, stop_token_ids=frozenset({9})))
    first, second = bench.scheduler.schedule(), bench.scheduler.schedule()
    assert shares(second) == {"a": 1}
    (ended,) = bench.scheduler.update(first, [[9]])
    assert str(ended.finish_reason) == "stop"
    assert bench.kv.num_free_blocks < bench.kv.num_blocks
    with pytest.raises(ValueError, match="already in use"):
        bench.scheduler.add_request(make_request("a", 4))
    assert bench.scheduler.update(second, [[9]]) == []
    assert bench.kv.num_free_blocks == bench.kv.num_blocks


def test_a_request_is_not_scheduled_past_its_last_token():
    bench = Bench()
    bench.scheduler.add_request(make_request("a", 4, max_tokens=1))
    first = bench.scheduler.schedule()
    assert bench.scheduler.schedule().scheduled == []
    assert str(bench.scheduler.update(first, [[5]])[0].finish_reason) == "length"


def test_nobody_with_a_step_in_flight_is_preempted():
    bench = Bench(num_blocks=2, block_size=16, max_num_batched_tokens=64)
    for name in "ab":
        bench.scheduler.add_request(make_request(name, 16, max_tokens=8))
    first = bench.scheduler.schedule()
    blocked = bench.scheduler.schedule()
    assert blocked.scheduled == []
    assert bench.scheduler.num_preemptions == 0
    bench.scheduler.update(first, [[5], [5]])
    assert shares(bench.scheduler.schedule()) == {"a": 1}
    assert bench.scheduler.num_preemptions == 1
