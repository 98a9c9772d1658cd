"""Random schedules: whatever arrives and leaves when, the invariants hold after every step."""

import random

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from scheduling import Bench, make_request

EOS = 3


class Schedules(RuleBasedStateMachine):
    """Arrivals, aborts and steps in any order over a small pool."""

    def __init__(self):
        super().__init__()
        self.random = random.Random(0)
        self.bench = Bench(
            num_blocks=6,
            block_size=4,
            max_num_seqs=3,
            max_num_batched_tokens=7,
            token=lambda _: self.random.choice([EOS, 5, 5, 5, 5]),
        )
        self.requests = {}
        self.started = []

    @rule(prompt_len=st.integers(1, 23), max_tokens=st.integers(1, 30))
    def arrive(self, prompt_len, max_tokens):
        name = str(len(self.requests))
        room = self.bench.kv.pool_tokens - prompt_len
        request = make_request(
            name, prompt_len, min(max_tokens, room), stop_token_ids=frozenset({EOS})
        )
        self.requests[name] = request
        self.bench.scheduler.add_request(request)

    @precondition(lambda self: self.bench.scheduler.request_ids)
    @rule(choice=st.integers(0, 100))
    def abort(self, choice):
        alive = self.bench.scheduler.request_ids
        ended = self.bench.scheduler.abort_request(alive[choice % len(alive)])
        self.bench.outputs.append(ended)

    @rule()
    def step(self):
        alive = self.bench.scheduler.request_ids
        before = {name: self.requests[name].num_tokens for name in alive}
        computed = {name: self.requests[name].num_computed_tokens for name in alive}
        output = self.bench.step()
        assert output.num_scheduled_tokens <= 7
        assert len(output.scheduled) <= 3
        self.started += [
            new.request_id for new in output.new_requests if new.request_id not in self.started
        ]
        if alive:
            first = self.requests[alive[0]]
            progressed = first.num_computed_tokens > computed[alive[0]]
            assert progressed or first.num_tokens > before[alive[0]]

    @invariant()
    def no_block_leaks(self):
        kv = self.bench.kv
        held = [block for name in self.bench.scheduler.request_ids for block in kv.block_ids(name)]
        assert len(held) == len(set(held))
        assert len(held) + kv.num_free_blocks == kv.num_blocks

    @invariant()
    def every_request_ends_at_most_once_and_is_then_silent(self):
        ended = set()
        for output in self.bench.outputs:
            assert output.request_id not in ended
            if output.finish_reason is not None:
                ended.add(output.request_id)
        assert ended.isdisjoint(self.bench.scheduler.request_ids)

    @invariant()
    def started_in_order_of_arrival(self):
        assert self.started == sorted(self.started, key=int)

    def teardown(self):
        self.bench.run()
        for name, request in self.requests.items():
            assert len(self.bench.finish_reasons(name)) == 1
            assert len(self.bench.tokens_of(name)) <= request.max_tokens
        assert self.bench.kv.num_free_blocks == self.bench.kv.num_blocks


Schedules.TestCase.settings = settings(
    max_examples=150,
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
TestSchedules = Schedules.TestCase


@settings(max_examples=60, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 60), min_size=1, max_size=12),
    budget=st.integers(1, 40),
    num_blocks=st.integers(16, 40),
)
def test_tokens_do_not_depend_on_budget_or_pool(lengths, budget, num_blocks):
    bench = Bench(num_blocks=num_blocks, block_size=4, max_num_batched_tokens=budget)
    for index, length in enumerate(lengths):
        bench.scheduler.add_request(make_request(str(index), min(length, 59), max_tokens=4))
    bench.run()
    for index in range(len(lengths)):
        assert len(bench.tokens_of(str(index))) == 4
