"""Reports, tables and imports of load tests, from records made up here."""

import dataclasses
import json
import re

import pytest
from typer.testing import CliRunner

from pagestream.bench.importing import import_run
from pagestream.bench.records import RequestRecord, RunWriter, Samples, read_run
from pagestream.bench.summary import Slo, summarize
from pagestream.cli.main import app


def made_up_run(directory, name, first_s, *, loads=(1, 2)):
    """Each load has three good requests and one that failed."""
    writer = RunWriter(directory, {"name": name, "points": [], "versions": {"torch": "9.9.9"}})
    summaries = []
    for point, load in enumerate(loads):
        records = [
            RequestRecord(
                point,
                index,
                planned_start_s=index,
                start_s=index + 0.1,
                end_s=index + first_s + 1.0,
                num_input_tokens=7,
                num_output_tokens=11,
                responses=[(index + first_s, 1), (index + first_s + 1.0, 10)],
                finish_reason="length",
            )
            for index in range(3)
        ]
        records.append(RequestRecord(point, 3, 3.0, 3.0, 4.0, outcome="error", error="<broken>"))
        writer.add(records)
        label = f"{load} concurrent"
        summaries.append(summarize(label, "concurrency", load, records, Slo(), Samples([2.0])))
    writer.close([dataclasses.asdict(each) for each in summaries], complete=True)
    return directory


@pytest.fixture
def first(tmp_path):
    return made_up_run(tmp_path / "one", "first", 0.5)


@pytest.fixture
def second(tmp_path):
    return made_up_run(tmp_path / "two", "second", 0.25, loads=(2, 8))


def call(*arguments):
    return CliRunner().invoke(app, ["bench", *map(str, arguments)])


def cells(page):
    return re.findall(r"<td>([^<]*)", page)


def test_the_report_of_one_run_has_its_numbers_and_loads_nothing(first, tmp_path):
    page = tmp_path / "page.html"
    done = call("report", first, "--output", page, "--pictures", tmp_path / "load")
    assert done.exit_code == 0, done.output
    text = page.read_text()
    assert "500" in cells(text)  # TTFT, ms
    assert "100.0" in cells(text)  # TPOT: one second for ten tokens
    assert "8.2" in cells(text)  # tokens/s: 33 in 4 s
    assert "9.9.9" in cells(text)
    assert "2 failed with: error: &lt;broken&gt;" in text
    assert not re.search(r"(src|href)=[\"']?(https?:)?//", text)
    assert "<script" not in text
    assert "Side by side" not in text
    assert text.count("<svg") == 4
    ids = re.findall(r' id="([^"]+)"', text)
    clips = [name for name in ids if re.fullmatch(r"p[0-9a-f]{10}", name)]
    assert len(clips) == len(set(clips)) > 0
    assert sorted(path.name for path in tmp_path.glob("load-*.svg")) == [
        "load-curves.svg",
        "load-distributions.svg",
        "load-timeline-of-first-1-concurrent.svg",
        "load-timeline-of-first-2-concurrent.svg",
    ]
    assert (tmp_path / "load-curves.svg").read_text().startswith("<svg")


def test_two_runs_are_compared_where_their_loads_are_the_same(first, second, tmp_path):
    page = tmp_path / "page.html"
    assert call("report", first, second, "-o", page).exit_code == 0
    text = page.read_text()
    beside = text.split("Side by side")[1].split("<h2>")[0]
    assert re.findall("<h3>(.*)</h3>", beside) == ["2 concurrent"]
    assert "<b>0.50x</b>" in beside  # TTFT
    assert "<b>1.00x</b>" in beside  # TPOT
    assert "first, median" in text
    assert "second, p99" in text


def test_the_table_counts_failures(first):
    done = call("table", first)
    assert re.search(r"errors +1 +1\n", done.output)
    assert re.search(r"TTFT median +500 +500\n", done.output)


@pytest.mark.parametrize("command", ["report", "table"])
def test_what_is_no_run_is_refused(command, tmp_path):
    done = call(command, tmp_path)
    assert done.exit_code == 1
    assert "holds no run" in done.output


def test_a_run_that_was_interrupted_at_once_says_so(tmp_path):
    RunWriter(tmp_path / "run", {"name": "cut", "points": []}).close([], complete=False)
    assert "not complete" in call("table", tmp_path / "run").output
    done = call("report", tmp_path / "run", "-o", tmp_path / "page.html")
    assert done.exit_code == 1
    assert "nothing to report" in done.output


def perf_analyzer_export():
    def output(tokens, reason=""):
        return {"text_output": "x", "num_output_tokens": tokens, "finish_reason": reason}

    first = {**output(1), "num_input_tokens": 9, "num_cached_tokens": 4}
    garbage = {**output(2, "stop"), "num_input_tokens": 9, "num_cached_tokens": -199}
    return {
        "experiments": [
            {
                "experiment": {"mode": "concurrency", "value": 2},
                "requests": [
                    {
                        "timestamp": 10_000_000_000,
                        "response_timestamps": [10_200_000_000, 10_700_000_000, 10_800_000_000],
                        "response_outputs": [first, output(5, "length"), {}],
                    },
                    {
                        "timestamp": 11_000_000_000,
                        "response_timestamps": [11_400_000_000],
                        "response_outputs": [garbage],
                    },
                    {"timestamp": 11_500_000_000, "response_timestamps": []},
                ],
                "window_boundaries": [],
            }
        ],
        "version": "2.49.0",
        "service_kind": "triton",
    }


def test_perf_analyzers_export_becomes_a_run(tmp_path):
    source = tmp_path / "export.json"
    source.write_text(json.dumps(perf_analyzer_export()))
    done = call("import", source, "-o", tmp_path / "run", "--slo-ttft-ms", "300")
    assert done.exit_code == 0, done.output
    run = read_run(tmp_path / "run")
    first, second, third = run.records
    assert first.ttft_s == pytest.approx(0.2)
    assert first.tpot_s == pytest.approx(0.5 / 5)
    assert first.e2e_s == pytest.approx(0.8)
    assert (first.num_output_tokens, first.finish_reason) == (6, "length")
    assert (first.num_input_tokens, first.num_cached_tokens) == (9, 4)
    assert (second.start_s, second.num_output_tokens) == (1.0, 2)
    assert (second.num_input_tokens, second.num_cached_tokens) == (9, None)
    assert (third.outcome, third.error) == ("error", "no response")
    (point,) = run.summary
    assert point["label"] == "2 concurrent"
    assert point["goodput_requests_per_s"] == pytest.approx(1 / 1.5)
    assert run.info["notes"] == []
    assert call("report", tmp_path / "run", "-o", tmp_path / "page.html").exit_code == 0


def test_responses_without_counts_are_noted(tmp_path):
    export = perf_analyzer_export()
    for request in export["experiments"][0]["requests"]:
        for each in request.get("response_outputs", ()):
            each.pop("num_output_tokens", None)
    export["experiments"][0]["requests"][1]["response_outputs"] = ["only text"]
    source = tmp_path / "export.json"
    source.write_text(json.dumps(export))
    done = call("import", source, "-o", tmp_path / "run")
    assert "each is taken for one token" in done.output
    counts = [record.num_output_tokens for record in read_run(tmp_path / "run").records]
    assert counts == [2, 1, 0]


def aiperf_line(start_ns, **changes):
    def value(number, unit="ms"):
        return {"value": number, "unit": unit}

    line = {
        "metadata": {
            "request_start_ns": start_ns,
            "request_end_ns": start_ns + 1_000_000_000,
            "benchmark_phase": "profiling",
            "was_cancelled": False,
        },
        "metrics": {
            "input_sequence_length": value(50, "tokens"),
            "output_sequence_length": value(4, "tokens"),
            "time_to_first_token": value(250.0),
            "request_latency": value(1000.0),
            "inter_chunk_latency": value([250.0, 500.0]),
        },
        "error": None,
    }
    return json.dumps({**line, **changes})


def test_aiperfs_lines_become_a_run(tmp_path):
    source = tmp_path / "profile_export.jsonl"
    error = {"code": 499, "type": "RequestTimeoutError", "message": "too late"}
    start = 1_759_813_207_532_900_363
    lines = [aiperf_line(start), aiperf_line(start + 500_000_000, error=error)]
    source.write_text("\n".join(lines) + "\n")
    run = read_run(import_run(source, tmp_path / "run", "theirs", Slo()))
    first, second = run.records
    assert run.name == "theirs"
    assert first.ttft_s == pytest.approx(0.25)
    assert first.responses == [
        (pytest.approx(0.25), 1),
        (pytest.approx(0.5), 1),
        (pytest.approx(1.0), 2),
    ]
    assert first.tpot_s == pytest.approx(0.75 / 3)
    assert (first.num_input_tokens, first.num_output_tokens) == (50, 4)
    assert (second.outcome, second.error, second.start_s) == ("timeout", "too late", 0.5)
    assert len(run.info["notes"]) == 2
    assert run.summary[0]["num_timeouts"] == 1


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"experiments": []}', "no json"])
def test_a_file_of_another_kind_is_refused(tmp_path, text):
    source = tmp_path / "export.json"
    source.write_text(text)
    with pytest.raises(ValueError, match=r"neither an export of perf_analyzer|has no requests"):
        import_run(source, tmp_path / "run", None, Slo())
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--concurrency", "1,x"], "no list of numbers"),
        (["--concurrency", "1.5"], "users are whole"),
        (["--request-rate", "0"], "a load is above 0"),
        (["--concurrency", "1", "--request-rate", "1"], "choose one"),
        (["--input-tokens", "many"], "no number of tokens"),
        (["--offline", "--no-stream"], "--no-stream is about responses"),
        (["--metrics-url", "http://localhost:2"], "--metrics-url belongs to a running server"),
        (["--url", "localhost:1", "--max-num-seqs", "3"], "engine flags do not go with it"),
    ],
)
def test_a_load_that_makes_no_sense_is_refused_at_once(tmp_path, arguments, message):
    (tmp_path / "config.json").write_text('{"vocab_size": 100}')
    done = call("run", "--model", tmp_path, "-o", tmp_path / "run", *arguments)
    assert done.exit_code == 1
    assert message in done.output
    assert not (tmp_path / "run").exists()
