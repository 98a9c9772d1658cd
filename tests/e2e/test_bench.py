"""`pagestream bench run` against a running server, as a user runs it."""

import json
import os
import subprocess
import sys

import pytest

from pagestream.bench.records import read_run

pytestmark = [pytest.mark.server, pytest.mark.smollm2]


def test_a_load_test_of_a_running_server(service, model, tmp_path):
    trace = tmp_path / "trace.jsonl"
    lines = [
        {"arrival_s": 0.1 * place, "num_input_tokens": tokens, "max_tokens": 6}
        for place, tokens in enumerate((20, 40, 5000, 30))
    ]
    trace.write_text("\n".join(map(json.dumps, lines)))
    arguments = ["--url", service.grpc_url, "--metrics-url", service.metrics_url]
    arguments += ["--model", model, "--trace", trace, "--warm-up", "1", "--input-tokens", "8"]
    arguments += ["--slo-ttft-ms", "60000", "--output", tmp_path / "run"]
    done = subprocess.run(
        [sys.executable, "-m", "pagestream.cli.main", "bench", "run", *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env={**os.environ, "COLUMNS": "200"},
    )
    assert done.returncode == 0, done.stderr
    assert "trace of 4" in done.stdout
    run = read_run(tmp_path / "run")
    *good, refused = sorted(run.records, key=lambda record: record.outcome != "ok")
    for record in good:
        assert (record.finish_reason, record.num_output_tokens) == ("length", 6)
        assert record.num_input_tokens == lines[record.index]["num_input_tokens"]
        assert record.planned_start_s == lines[record.index]["arrival_s"]
        assert sum(count for _, count in record.responses) == 6
    assert (refused.index, refused.outcome) == (2, "error")
    assert "5000" in refused.error
    (point,) = run.summary
    assert (point["num_ok"], point["num_errors"], point["ttft_ms"]["count"]) == (3, 1, 3)
    assert point["goodput_requests_per_s"] == point["requests_per_s"]
    assert run.info["complete"]
    assert "bench run --url" in run.info["command"]
    assert run.info["server"]["tritonserver"]
    assert {"torch", "tritonclient", "python"} <= set(run.info["versions"])
    assert len(run.info["model"]["config_sha256"]) == 16
