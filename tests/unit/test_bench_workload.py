"""What the load generator sends: lengths, arrivals and prompts, the same for the same seed."""

import dataclasses
import json
import random
import statistics

import pytest

from pagestream.bench.workload import Lengths, Workload, plain_token_ids


def workload(**changes):
    values = {
        "input_tokens": Lengths.parse("20-40"),
        "output_tokens": Lengths.parse("10±2"),
        "seed": 3,
        "shared_prefix": 0,
        "token_ids": range(100, 1100),
    }
    return Workload(**{**values, **changes})


@pytest.mark.parametrize(
    ("text", "low", "high", "mean"),
    [("128", 128, 128, 128), ("10-30", 10, 30, 20), ("50±5", 35, 65, 50), ("50+-5", 35, 65, 50)],
)
def test_lengths_are_drawn_as_written(text, low, high, mean):
    rng = random.Random(0)
    drawn = [Lengths.parse(text).draw(rng) for _ in range(4000)]
    assert low <= min(drawn)
    assert max(drawn) <= high
    assert statistics.fmean(drawn) == pytest.approx(mean, rel=0.02)
    if "-" in text and "+" not in text:
        assert {10, 30} <= set(drawn)
    if "5" in text[3:]:
        assert statistics.stdev(drawn) == pytest.approx(5, rel=0.1)


def test_a_normal_length_is_at_least_one():
    assert Lengths.parse("3±5").low == 1


@pytest.mark.parametrize("text", ["", "0", "a", "5-4", "1.5", "10-", "-3"])
def test_lengths_that_say_nothing_are_refused(text):
    with pytest.raises(ValueError, match=r"tokens|ends before it starts"):
        Lengths.parse(text)


def test_the_same_seed_gives_the_same_requests():
    first, again = (workload().rate_point(1, 2.0, 50) for _ in range(2))
    assert first == again
    assert workload(seed=4).rate_point(1, 2.0, 50) != first


def test_prompts_are_unique_and_of_the_given_ids():
    points = [workload().concurrency_point(place, 2, 50) for place in range(2)]
    prompts = [request.prompt_token_ids for point in points for request in point.requests]
    prompts += [request.prompt_token_ids for request in workload().warm_up(5)]
    assert len({prompt[:8] for prompt in prompts}) == 105
    assert {token_id for prompt in prompts for token_id in prompt} <= set(range(100, 1100))
    assert {len(prompt) for prompt in prompts} <= set(range(20, 41))
    assert len({len(prompt) for prompt in prompts}) > 10


def test_a_shared_prefix_is_that_of_all_points():
    work = workload(shared_prefix=16)
    requests = [*work.concurrency_point(0, 1, 5).requests, *work.rate_point(1, 1.0, 5).requests]
    requests += work.warm_up(2)
    assert len({request.prompt_token_ids[:16] for request in requests}) == 1
    assert len({request.prompt_token_ids[16:20] for request in requests}) == 12
    assert {len(request.prompt_token_ids) for request in requests} <= set(range(20, 41))


def test_a_prompt_that_is_only_prefix_is_refused():
    with pytest.raises(ValueError, match="shortest prompt has 20 tokens, and 20 are shared"):
        workload(shared_prefix=20)


def test_arrivals_are_a_poisson_process_of_the_rate():
    times = [request.arrival_s for request in workload().rate_point(0, 4.0, 4000).requests]
    gaps = [after - before for before, after in zip([0.0, *times], times, strict=False)]
    assert min(gaps) >= 0
    assert statistics.fmean(gaps) == pytest.approx(0.25, rel=0.05)
    assert statistics.stdev(gaps) == pytest.approx(0.25, rel=0.05)


def test_a_trace_is_sent_as_it_stands(tmp_path):
    path = tmp_path / "trace.jsonl"
    lines = [
        {"arrival_s": 0.5, "prompt_token_ids": [1, 2, 3], "max_tokens": 4},
        {"arrival_s": 0.25, "num_input_tokens": 30, "max_tokens": 5},
    ]
    path.write_text("\n".join(map(json.dumps, lines)) + "\n\n")
    point = workload(shared_prefix=8).trace_point(path, None)
    first, second = point.requests
    assert (first.arrival_s, first.prompt_token_ids, first.max_tokens) == (0.5, (1, 2, 3), 4)
    assert (second.arrival_s, len(second.prompt_token_ids), second.max_tokens) == (0.25, 30, 5)
    assert (point.label, point.value) == ("trace of 2", 2)
    assert len(workload().trace_point(path, 1).requests) == 1


@pytest.mark.parametrize(
    "line",
    [
        "{",
        "[]",
        '{"arrival_s": 1, "max_tokens": 3}',
        '{"arrival_s": -1, "max_tokens": 3, "num_input_tokens": 3}',
        '{"arrival_s": 1, "max_tokens": 0, "num_input_tokens": 3}',
    ],
)
def test_a_line_that_is_no_request_is_named(tmp_path, line):
    path = tmp_path / "trace.jsonl"
    path.write_text('{"arrival_s": 0, "max_tokens": 3, "num_input_tokens": 3}\n' + line)
    with pytest.raises(ValueError, match="line 2: not a request"):
        workload().trace_point(path, None)


def test_special_tokens_are_no_prompt(tmp_path):
    (tmp_path / "config.json").write_text('{"vocab_size": 12}')
    assert plain_token_ids(tmp_path) == list(range(12))
    tokenizer = {
        "added_tokens": [{"id": 0}, {"id": 7}],
        "model": {"vocab": {str(i): i for i in range(9)}},
    }
    (tmp_path / "tokenizer.json").write_text(json.dumps(tokenizer))
    assert plain_token_ids(tmp_path) == [1, 2, 3, 4, 5, 6, 8]


def test_points_do_not_share_requests():
    requests = [workload().concurrency_point(place, 1, 3).requests for place in range(2)]
    assert dataclasses.astuple(requests[0][0]) != dataclasses.astuple(requests[1][0])
