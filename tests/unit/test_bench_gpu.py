"""The GPU benchmark without a GPU: its bookkeeping, its floors, and a smoke run of all sections."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
sys.path.append(str(BENCHMARKS))

from gpu_idle import idle_of  # noqa: E402
from gpu_models import (  # noqa: E402
    LLAMA,
    QWEN3,
    SMOLLM2,
    decode_floor,
    model_directory,
    prefill_floor,
)
from gpu_report import COPY, Bench, Row, merged, rate_row, read, table  # noqa: E402

from pagestream.config import ModelConfig  # noqa: E402


@pytest.fixture
def bench(tmp_path):
    return Bench(torch.device("cpu"), True, tmp_path / "results.jsonl", time.monotonic() + 60)


def test_a_failing_case_keeps_what_came_before_it(bench):
    def measure():
        yield Row("one", "fine", 1.0, "s")
        raise ValueError("broken\nin detail")

    bench.run("one", "case", measure)
    bench.deadline = 0.0
    bench.run("one", "late", measure)
    fine, broken, late = read(bench.path)
    assert fine.value == 1.0
    assert broken.error == "ValueError: broken"
    assert late.error == "skipped: out of time"
    assert "broken" in table(read(bench.path))


def test_shares_are_of_the_ceiling_that_was_measured_before(bench):
    bench.add(Row("ceilings", COPY, 4000.0, "GB/s"))
    row = rate_row(bench, "x", "kernel", 2e9, (0.001, 0.00125), COPY, least=0.85)
    assert (row.value, row.share, row.met) == (2000.0, 0.5, False)
    assert row.noise == pytest.approx(0.25)
    assert "MISSED" in table([row])


def test_parts_of_several_processes_become_their_worst():
    rows = [
        Row("a", "error", 1e-7, met=True),
        Row("b", "other", 5.0),
        Row("a", "error", 1e-3, met=False),
        Row("a", "error", 1e-8, met=True),
    ]
    assert [(row.section, row.value) for row in merged(rows)] == [("a", 1e-3), ("b", 5.0)]


@pytest.mark.parametrize(
    ("spans", "idle"),
    [
        ([(0, 4), (6, 10)], 0.2),
        ([(6, 10), (0, 4), (1, 3)], 0.2),
        ([(0, 6), (4, 10)], 0.0),
        ([(5, 6)], 0.0),
    ],
)
def test_idle_is_what_nothing_covers(spans, idle):
    assert idle_of(spans) == pytest.approx(idle)


@pytest.mark.parametrize(
    ("name", "weights", "kv_per_token"),
    [(SMOLLM2, 0.269e9, 22.5), (QWEN3, 1.192e9, 112), (LLAMA, 15.01e9, 128)],
)
def test_floors_count_what_the_models_are_known_to_hold(tmp_path, name, weights, kv_per_token):
    """Bytes in bfloat16, KiB per token."""
    config = ModelConfig.from_hf(model_directory(tmp_path, name, smoke=False))
    empty, full = (decode_floor(config, 8, context, 2) for context in (0, 1000))
    assert empty.num_bytes == pytest.approx(weights, rel=0.002)
    assert full.num_bytes - empty.num_bytes == 8 * 1000 * kv_per_token * 1024
    # One prompt of n tokens attends n times to n / 2 tokens on average.
    prompt = prefill_floor(config, 1000, 2).operations
    head = 2 * config.vocab_size * config.hidden_size
    alone = decode_floor(config, 1, 500, 2).operations
    assert prompt == pytest.approx(1000 * (alone - head) + head)


@pytest.mark.long
def test_every_section_runs_on_cpu(tmp_path):
    command = [sys.executable, str(BENCHMARKS / "gpu.py"), "--smoke", "--out", str(tmp_path)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=250, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = read(tmp_path / "results.jsonl")
    assert [row for row in rows if row.error] == []
    assert len({row.section for row in rows}) == 11
    assert "a smoke run" in done.stdout
    assert (tmp_path / "table.txt").read_text() in done.stdout
    first = json.loads((tmp_path / "results.jsonl").read_text().splitlines()[0])
    assert set(first["environment"]) == {"device", "python", "torch", "triton", "transformers"}


@pytest.mark.long
def test_sections_in_processes_of_their_own(tmp_path):
    command = [sys.executable, str(BENCHMARKS / "gpu.py"), "--smoke", "--isolate"]
    flags = ["--only", "ceilings", "elementwise", "--out", str(tmp_path)]
    done = subprocess.run([*command, *flags], capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stdout + done.stderr
    found = {row.section: row for row in read(tmp_path / "results.jsonl")}
    assert len(found) == 2
    assert all(row.error == "" for row in found.values())
    assert found["norms, activations, rope"].share is not None


@pytest.mark.parametrize("name", [QWEN3, LLAMA])
def test_transformers_gets_the_weights_of_the_engine(tmp_path, name):
    from gpu_models import make_engine
    from gpu_transformers import transformers_twin

    from pagestream.sampling_params import SamplingParams

    directory = model_directory(tmp_path, name, smoke=True)
    prompt = list(range(3, 40))
    twin = transformers_twin(directory, torch.device("cpu"), torch.float32)
    with torch.inference_mode():
        expected = twin(torch.tensor([prompt])).logits[0, -1].log_softmax(-1).topk(5)
    engine = make_engine(directory, torch.device("cpu"))
    engine.add_request("a", prompt, SamplingParams(temperature=0, max_tokens=1, logprobs=5))
    outputs = []
    while engine.has_unfinished_requests():
        outputs += engine.step()
    (found,) = [item for output in outputs for item in output.logprobs]
    assert found.top_ids == expected.indices.tolist()
    assert found.top_logprobs == pytest.approx(expected.values.tolist(), abs=1e-4)
