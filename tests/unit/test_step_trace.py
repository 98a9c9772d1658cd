"""What a step trace records, and what is read out of it and drawn."""

import json
import xml.etree.ElementTree as ET

import pytest
from scheduling import make_request
from typer.testing import CliRunner

from pagestream.cli.main import app
from pagestream.cli.trace_picture import MAX_STEPS, draw, make_panel
from pagestream.cli.trace_stays import stays_of, summary
from pagestream.config import EngineConfig
from pagestream.engine.llm_engine import LLMEngine
from pagestream.engine.step_trace import TracedScheduler, read_trace
from pagestream.kvcache.kv_cache_manager import KVCacheManager
from pagestream.sampling_params import SamplingParams


class Run:
    """A traced scheduler whose runner makes up the tokens."""

    def __init__(self, path, *, num_blocks=50, caching=False, **options):
        self.path = path
        values = {
            "max_num_seqs": 2,
            "max_num_batched_tokens": 8,
            "max_num_waiting": 100,
            "max_seq_len": 100,
        }
        self.scheduler = TracedScheduler(
            str(path),
            lambda internal_id: (internal_id, 0),
            KVCacheManager(num_blocks, 4, caching),
            **{**values, **options},
        )

    def add(self, name, prompt_len, max_tokens, **fields):
        self.scheduler.add_request(make_request(name, prompt_len, max_tokens, **fields))

    def launch(self):
        return self.scheduler.schedule()

    def read(self, output, token=7):
        return self.scheduler.update(output, [[token] * s.num_logits for s in output.scheduled])

    def finish(self):
        while self.scheduler.num_running or self.scheduler.num_waiting:
            self.read(self.launch())
        return read_trace(self.path)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "trace.jsonl"


def cells(trace, request):
    """(step, phase, tokens) of one request."""
    return [
        (step.step, share.phase, share.num_scheduled_tokens)
        for step in trace.steps
        for share in step.scheduled
        if share.request == request
    ]


def test_chunked_prefill_decode_and_end(path):
    run = Run(path)
    run.add("a", 10, 3)
    trace = run.finish()
    assert cells(trace, 0) == [
        (0, "prefill", 8),
        (1, "prefill", 2),
        (2, "decode", 1),
        (3, "decode", 1),
    ]
    shares = [step.scheduled[0] for step in trace.steps]
    assert [share.num_new_tokens for share in shares] == [0, 1, 1, 1]
    assert [share.num_computed_tokens for share in shares] == [0, 8, 10, 11]
    assert [share.num_cached_tokens for share in shares] == [0, None, None, None]
    assert [share.finish_reason for share in shares] == [None, None, None, "length"]
    assert [step.num_blocks_used for step in trace.steps] == [3, 3, 3, 3]
    assert all(a.end_s <= b.start_s for a, b in zip(trace.steps, trace.steps[1:], strict=False))
    assert all(step.start_s <= step.end_s for step in trace.steps)


def test_the_engine_and_the_arrivals(path):
    run = Run(path, static_batching=True)
    run.add("a", 3, 2)
    run.read(run.launch())
    run.add("b", 5, 1)
    trace = run.finish()
    assert (trace.engine.max_num_seqs, trace.engine.max_num_batched_tokens) == (2, 8)
    assert (trace.engine.num_blocks, trace.engine.block_size) == (50, 4)
    assert trace.engine.static_batching
    found = [(a.request, a.request_id, a.num_prompt_tokens, a.step) for a in trace.arrivals]
    assert found == [(0, "a", 3, 0), (1, "b", 5, 1)]
    assert [step.num_waiting for step in trace.steps] == [0, 1, 0]


def test_a_prefix_hit(path):
    run = Run(path, caching=True, max_num_batched_tokens=20)
    run.add("a", 10, 1)
    run.read(run.launch())
    run.add("b", 10, 1)
    trace = run.finish()
    assert cells(trace, 1) == [(1, "prefill", 2)]
    assert trace.steps[1].scheduled[0].num_cached_tokens == 8
    assert "8 prompt tokens from the prefix cache" in summary(trace)


def preempting(path):
    """b loses its blocks to a, and starts again when a has ended."""
    run = Run(path, num_blocks=4, max_seq_len=16)
    run.add("a", 4, 8)
    run.add("b", 4, 6)
    return run.finish()


def test_a_preemption(path):
    trace = preempting(path)
    (step,) = [step for step in trace.steps if step.preempted]
    assert step.preempted == [1]
    assert step.step == 5
    assert [share.request for share in step.scheduled] == [0]
    assert [phase for _, phase, _ in cells(trace, 1)] == ["prefill"] + ["decode"] * 4 + [
        "recompute",
        "recompute",
    ]
    assert sum(share.num_new_tokens for s in trace.steps for share in s.scheduled) == 14
    assert "1 preemption" in summary(trace)


def test_aborts_and_deadlines_end_outside_of_steps(path):
    run = Run(path, max_num_seqs=1)
    run.add("a", 3, 50)
    run.add("b", 3, 50, deadline=2.0)
    run.read(run.launch())
    run.scheduler.expire(5.0)
    run.scheduler.abort_request("a")
    run.scheduler.abort_request("a")
    trace = read_trace(path)
    assert [(end.request, end.finish_reason, end.step) for end in trace.ends] == [
        (1, "abort", 1),
        (0, "abort", 1),
    ]
    assert [(stay.arrival.request_id, stay.outcome) for stay in stays_of(trace)] == [("a", "abort")]


def test_a_step_in_flight_of_an_ended_request_is_surplus(path):
    run = Run(path)
    run.add("a", 3, 50, stop_token_ids=frozenset({7}), sampling_params=SamplingParams())
    first = run.launch()
    second = run.launch()
    run.read(first)
    run.read(second)
    trace = read_trace(path)
    assert [(s.scheduled[0].surplus, s.scheduled[0].finish_reason) for s in trace.steps] == [
        (False, "stop"),
        (True, None),
    ]
    (stay,) = stays_of(trace)
    assert (stay.first, stay.last, stay.outcome) == (0, 1, "stop")


def test_a_freed_seat_is_taken_by_the_next(path):
    run = Run(path)
    for name, max_tokens in (("a", 4), ("b", 2), ("c", 2), ("d", 1)):
        run.add(name, 2, max_tokens)
    stays = {stay.arrival.request_id: stay for stay in stays_of(run.finish())}
    assert {name: (s.seat, s.first, s.last) for name, s in stays.items()} == {
        "a": (0, 0, 3),
        "b": (1, 0, 1),
        "c": (1, 2, 3),
        "d": (0, 4, 4),
    }


def answer(tiny_model, **options):
    """Two answers of an engine to one prompt."""
    engine = LLMEngine(EngineConfig(str(tiny_model), num_threads=1, num_blocks=20, **options))
    engine.warm_up()
    params = SamplingParams(n=2, seed=1, temperature=1.0, max_tokens=5, ignore_eos=True)
    engine.add_request("a", [5, 6, 7], params)
    tokens = {0: [], 1: []}
    while engine.has_unfinished_requests():
        for output in engine.step():
            tokens[output.index] += output.token_ids
    return tokens


@pytest.mark.parametrize("overlap", ["on", "off"])
def test_an_engine_traces_all_but_its_warm_up(tiny_model, path, overlap):
    tokens = answer(tiny_model, step_trace=str(path), overlap_scheduling=overlap)
    assert tokens == answer(tiny_model, overlap_scheduling=overlap)
    trace = read_trace(path)
    assert [(a.request, a.request_id, a.index) for a in trace.arrivals] == [
        (0, "a", 0),
        (1, "a", 1),
    ]
    assert [stay.name for stay in stays_of(trace)] == ["a", "a/1"]
    counts = [sum(share.num_new_tokens for share in step.scheduled) for step in trace.steps]
    assert counts == [2, 2, 2, 2, 2]


def test_restarting_forgets_everything(path):
    run = Run(path)
    run.add("warm-up", 2, 2)
    run.finish()
    run.scheduler.restart_trace()
    run.add("a", 2, 1)
    trace = run.finish()
    assert [arrival.request_id for arrival in trace.arrivals] == ["a"]
    assert [step.step for step in trace.steps] == [0]


def test_a_path_that_cannot_be_written_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"step_trace .*/no/file' cannot be written: No such file"):
        Run(tmp_path / "no" / "file")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is empty"),
        ("{", "line 1: not a step trace"),
        ('{"event": "engine"}', "line 1: not a step trace"),
        ('{"event": "end"}', "line 1: not a step trace: no engine record before it"),
        ("[]", "line 1: not a step trace"),
    ],
)
def test_a_file_that_is_no_trace_is_refused(path, text, message):
    path.write_text(text)
    with pytest.raises(ValueError, match=message):
        read_trace(path)


def by_class(svg):
    found = {}
    for element in ET.fromstring(svg).iter():
        found.setdefault(element.get("class"), []).append(element)
    return found


def test_the_picture_has_a_cell_for_each_share(path):
    trace = preempting(path)
    legend = 1
    found = by_class(draw([make_panel("tight", trace, 0, None)]))
    for phase in ("prefill", "decode", "recompute"):
        shares = [s for step in trace.steps for s in step.scheduled if s.phase == phase]
        steps = [s for s in trace.steps if any(x.phase == phase for x in s.scheduled)]
        assert len(found[phase]) == len(shares) + len(steps) + legend  # and the chart's bars
    assert len(found["preempted"]) == 2 * (1 + legend)
    assert len(found["end"]) == 2 + legend
    words = "".join(ET.fromstring(draw([make_panel("tight", trace, 0, None)])).itertext())
    assert "computed again" in words
    assert "prefix cache" not in words.replace("0 from the prefix cache", "")


def test_several_traces_share_one_scale(path):
    long = preempting(path)
    run = Run(path)
    run.add("<a&b>", 2, 2)
    svg = draw([make_panel("long", long, 0, None), make_panel("short", run.finish(), 0, None)])
    widths = {round(float(cell.get("width")), 1) for cell in by_class(svg)["decode"]}
    assert len(widths) == 2  # cells, and the legend's
    assert "&lt;a&amp;b&gt;" in svg


def test_a_long_trace_needs_a_choice_of_steps(path):
    run = Run(path, num_blocks=500, max_seq_len=2000)
    run.add("a", 2, MAX_STEPS + 1)
    trace = run.finish()
    with pytest.raises(ValueError, match=r"1001 steps, a picture holds 1000: .*--first"):
        make_panel("long", trace, 0, None)
    assert len(make_panel("long", trace, 100, 299).steps) == 200
    draw([make_panel("long", trace, 1, None)])
    with pytest.raises(ValueError, match="no step between 2000 and None: the trace has 1001"):
        make_panel("long", trace, 2000, None)


def test_the_command_draws_and_sums_up(path, tmp_path):
    preempting(path)
    picture = tmp_path / "picture.svg"
    done = CliRunner().invoke(app, ["trace", str(path), "--output", str(picture), "--first", "2"])
    assert done.exit_code == 0
    assert "trace: 2 requests, " in done.output
    ET.fromstring(picture.read_text())


def test_the_command_refuses_what_is_no_trace(path, tmp_path):
    path.write_text(json.dumps({"event": "step"}))
    done = CliRunner().invoke(app, ["trace", str(path), "-o", str(tmp_path / "x.svg")])
    assert done.exit_code == 1
    assert not (tmp_path / "x.svg").exists()
