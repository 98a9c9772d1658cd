"""Random schedules: whatever arrives and leaves when, the invariants hold after every step."""

import random

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from scheduling import Bench, make_request

from pagestream.request import RequestStatus
from pagestream.sampling_params import SamplingParams

EOS = 3
BUDGET, SEATS = 7, 3


class Schedules(RuleBasedStateMachine):
    """Arrivals, aborts, deadlines, priorities and steps, overlapping or not, over a small pool
    with prefix sharing."""

    def __init__(self):
        super().__init__()
        self.random = random.Random(0)
        self.bench = Bench(
            num_blocks=8,
            block_size=4,
            max_num_seqs=SEATS,
            max_num_batched_tokens=BUDGET,
            enable_prefix_caching=True,
        )
        self.scheduler = self.bench.scheduler
        self.requests = {}
        self.in_flight = []
        self.now = 0.0

    @rule(
        prompt_len=st.integers(1, 23),
        max_tokens=st.integers(1, 30),
        priority=st.integers(-2, 2),
        deadline=st.none() | st.integers(1, 30),
        salt=st.sampled_from([b"", b"x"]),
        prefix_cache=st.booleans(),
    )
    def arrive(self, prompt_len, max_tokens, priority, deadline, salt, prefix_cache):
        name = str(len(self.requests))
        request = make_request(
            name,
            0,
            min(max_tokens, self.bench.kv.pool_tokens - prompt_len),
            token_ids=list(range(10, 10 + prompt_len)),
            stop_token_ids=frozenset({EOS}),
            sampling_params=SamplingParams(priority=priority, prefix_cache=prefix_cache),
            arrival_time=self.now,
            deadline=None if deadline is None else self.now + deadline,
            cache_root=salt,
        )
        self.requests[name] = request
        self.scheduler.add_request(request)

    @precondition(lambda self: self.scheduler.request_ids)
    @rule(choice=st.integers(0, 100))
    def abort(self, choice):
        alive = self.scheduler.request_ids
        self.bench.outputs.append(self.scheduler.abort_request(alive[choice % len(alive)]))

    @rule(seconds=st.integers(1, 10))
    def time_passes(self, seconds):
        self.now += seconds
        self.bench.outputs += self.scheduler.expire(self.now)

    @precondition(lambda self: len(self.in_flight) < 2)
    @rule()
    def launch(self):
        first = self.scheduler.first_in_order()
        before = None if first is None else first.num_computed_tokens
        output = self.scheduler.schedule()
        assert output.num_scheduled_tokens <= BUDGET
        assert len(output.scheduled) <= SEATS
        if not self.in_flight and first is not None:
            assert [s.request_id for s in output.scheduled][:1] == [first.request_id]
            assert first.num_computed_tokens > before
        if output.scheduled:
            self.in_flight.append(output)

    @precondition(lambda self: self.in_flight)
    @rule()
    def read(self):
        output = self.in_flight.pop(0)
        tokens = [
            [self.random.choice([EOS, 5, 5, 5, 5])] * share.num_logits for share in output.scheduled
        ]
        self.bench.outputs += self.scheduler.update(output, tokens)

    @invariant()
    def every_block_is_free_or_owned(self):
        kv = self.bench.kv
        held = {block for name in self.requests for block in kv.block_ids(name)}
        assert len(held) + kv.num_free_blocks == kv.num_blocks
        assert 0 <= kv.num_cached_blocks <= kv.num_free_blocks

    @invariant()
    def ended_requests_hold_blocks_only_while_a_step_is_in_flight(self):
        flying = {share.request_id for output in self.in_flight for share in output.scheduled}
        for name, request in self.requests.items():
            if request.status is RequestStatus.FINISHED and name not in flying:
                assert self.bench.kv.block_ids(name) == []

    @invariant()
    def every_request_ends_at_most_once_and_is_then_silent(self):
        ended = set()
        for output in self.bench.outputs:
            assert output.request_id not in ended
            if output.finish_reason is not None:
                ended.add(output.request_id)
        assert ended.isdisjoint(self.scheduler.request_ids)

    @invariant()
    def no_more_tokens_than_asked_for(self):
        for request in self.requests.values():
            assert request.num_output_tokens <= request.max_tokens

    def teardown(self):
        while self.in_flight:
            self.read()
        self.bench.run()
        for name in self.requests:
            assert len(self.bench.finish_reasons(name)) == 1
        assert self.bench.kv.num_free_blocks == self.bench.kv.num_blocks


Schedules.TestCase.settings = settings(
    max_examples=150,
    stateful_step_count=50,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
TestSchedules = Schedules.TestCase


@settings(max_examples=60, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 59), min_size=1, max_size=12),
    budget=st.integers(1, 40),
    num_blocks=st.integers(16, 40),
    caching=st.booleans(),
)
def test_tokens_do_not_depend_on_budget_pool_or_cache(lengths, budget, num_blocks, caching):
    bench = Bench(
        num_blocks=num_blocks,
        block_size=4,
        max_num_batched_tokens=budget,
        enable_prefix_caching=caching,
    )
    for index, length in enumerate(lengths):
        bench.scheduler.add_request(make_request(str(index), length, max_tokens=4))
    first = [new.request_id for step in bench.run() for new in step.new_requests]
    started = list(dict.fromkeys(first))
    assert started == [str(index) for index in range(len(lengths))]
    for index in range(len(lengths)):
        assert len(bench.tokens_of(str(index))) == 4
