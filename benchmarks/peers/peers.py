"""The same workload through pagestream and whichever peers are at hand, in one run, as ratios.

Each peer runs alone, in a process and (if given) a Python of its own; `make bench-peers` runs all
that its arguments name, benchmarks/README.md says how to install them. A peer that fails is
reported as failed. One run compares what ran in it, on this machine, and nothing else.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from pagestream.model_store import DEFAULT_MODEL, resolve_model

HERE = Path(__file__).parent
COLUMNS = {"prefill": "prefill of 512", "single": "one stream", "concurrent": "16 at once"}


def commands(options: argparse.Namespace) -> list[list[str]]:
    """Of every peer that can be run, ours first."""
    checkpoint = str(resolve_model(DEFAULT_MODEL))
    here = sys.executable
    chosen = [
        [here, "pagestream_offline.py", checkpoint, "none"],
        [here, "pagestream_offline.py", checkpoint, "int8"],
        [here, "transformers_generate.py", checkpoint],
    ]
    if options.vllm_python:
        chosen.append([options.vllm_python, "vllm_offline.py", checkpoint])
    for model in options.openvino_model:
        chosen.append([options.openvino_python, "openvino_genai.py", model])
    for model in options.llama_model:
        chosen.append([here, "llama_server.py", options.llama_server, model])
    return chosen


def run(command: list[str]) -> dict[str, Any] | str:
    """The peer's figures, or why there are none."""
    python, script, *arguments = command
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    environment.pop("OMP_WAIT_POLICY", None)
    try:
        done = subprocess.run(
            [python, str(HERE / script), *arguments],
            env=environment,
            capture_output=True,
            text=True,
            timeout=1800,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if done.returncode or not lines:
        return (done.stderr.strip().splitlines() or ["no figures"])[-1]
    figures: dict[str, Any] = json.loads(lines[-1])
    return figures


def show(results: list[dict[str, Any]]) -> None:
    first = results[0]
    table = Table("tokens/s (times pagestream's)", box=None, pad_edge=False)
    for title in (*COLUMNS.values(), "peak MiB"):
        table.add_column(title, justify="right")
    for result in results:
        cells = [f"{result[key]:,.1f} ({result[key] / first[key]:.2f})" for key in COLUMNS]
        table.add_row(
            f"{result['name']} {result['version']}", *cells, f"{result['peak_rss_mib']:,.0f}"
        )
    Console(width=140).print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--vllm-python", help="a Python that has vLLM's CPU build")
    parser.add_argument("--openvino-python", default=sys.executable, help="one with OpenVINO GenAI")
    parser.add_argument("--openvino-model", action="append", default=[], help="an IR's directory")
    parser.add_argument("--llama-server", default="llama-server", help="the binary")
    parser.add_argument("--llama-model", action="append", default=[], help="a GGUF file")
    parser.add_argument("--json", type=Path, help="file for the figures of every run")
    options = parser.parse_args()
    results, failed = [], []
    for command in commands(options):
        name = " ".join([Path(command[1]).stem, *(Path(each).name for each in command[2:])])
        print(f"{name} ...", file=sys.stderr, flush=True)
        result = run(command)
        if isinstance(result, str):
            failed.append(f"{name}: {result}")
        else:
            results.append(result)
    if options.json:
        options.json.write_text(json.dumps(results, indent=2) + "\n")
    if results:
        show(results)
    if failed:
        sys.exit("\n".join(failed))


if __name__ == "__main__":
    main()
