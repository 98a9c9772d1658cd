"""Everything worth measuring on a GPU, in one command of under eight minutes, without downloads.

Each section runs in a process of its own, with a limit: one that hangs or breaks the device takes
nothing with it. Rows are written as they come, and one table is printed last. Runs from a checkout,
with or without an installed pagestream. `--smoke` runs every section on CPU, in shapes so small
that it only shows that the script works. `make bench-gpu`; benchmarks/README.md tells how to read
it.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.metadata
import importlib.util
import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from gpu_report import Bench, Row, merged, read, table

ROOT = Path(__file__).resolve().parents[1]
TOTAL_S = 465.0
_SOFT = 0.85
"""Share of a section's limit after which none of its cases starts."""


@dataclass(frozen=True)
class Section:
    name: str
    module: str
    function: str
    limit_s: float
    processes: int = 1
    needs_cuda: bool = False


SECTIONS = [  # what says whether the rest means anything first, what takes longest last
    Section("ceilings", "gpu_timing", "ceilings", 30),
    Section("compile", "gpu_kernels", "compile_all", 60, processes=12, needs_cuda=True),
    Section("correctness", "gpu_correctness", "correctness", 90, processes=12),
    Section("qwen3", "gpu_engine", "qwen3", 70),
    Section("attention", "gpu_attention", "attention", 70),
    Section("elementwise", "gpu_kernels", "elementwise", 30),
    Section("sampling", "gpu_kernels", "sampling", 25),
    Section("modes", "gpu_engine", "modes", 100),
    Section("transformers", "gpu_transformers", "transformers", 110),
    Section("llama", "gpu_engine", "llama", 70),
    Section("loops", "gpu_engine", "loops", 60),
    Section("smollm2", "gpu_engine", "smollm2", 50),
]


def main() -> None:
    parser = argparse.ArgumentParser(description="What the kernels and the engine do on a GPU.")
    default = Path(os.environ.get("OUT", "gpu-bench"))
    parser.add_argument("--out", type=Path, default=default, help=f"for the results ({default})")
    parser.add_argument("--smoke", action="store_true", help="tiny shapes, on CPU")
    names = [section.name for section in SECTIONS]
    parser.add_argument("--only", nargs="*", default=names, choices=names, metavar="SECTION")
    parser.add_argument("--total-s", type=float, default=TOTAL_S, help="most seconds in all")
    parser.add_argument("--isolate", action="store_true", help="processes in a smoke run, too")
    parser.add_argument("--child", nargs=4, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    device = torch.device("cpu" if arguments.smoke else "cuda")
    if device.type == "cuda" and not torch.cuda.is_available():
        sys.exit("torch finds no CUDA device; --smoke runs on CPU, to see that the script works")
    if arguments.smoke:
        torch.set_num_threads(1)
    arguments.out.mkdir(parents=True, exist_ok=True)
    path = arguments.out / "results.jsonl"
    _find_pagestream()
    if arguments.child:
        name, seconds, part, parts = arguments.child
        bench = Bench(device, arguments.smoke, path, time.monotonic() + float(seconds))
        bench.part = (int(part), int(parts))
        _run_section(_section(name), bench)
        return
    path.write_text(json.dumps({"environment": _environment(device)}) + "\n", encoding="utf-8")
    chosen = [section for section in SECTIONS if section.name in arguments.only]
    end = time.monotonic() + arguments.total_s
    for section in chosen:
        if section.needs_cuda and device.type != "cuda":
            continue
        print(f"{section.name} ({end - time.monotonic():.0f} s left)", flush=True)
        bench = Bench(device, arguments.smoke, path, end)
        if arguments.smoke and not arguments.isolate:
            _run_section(section, bench)
        else:
            _guard(section, bench)
    sys.exit(_summary(path, device))


def _section(name: str) -> Section:
    return next(section for section in SECTIONS if section.name == name)


def _guard(section: Section, bench: Bench) -> None:
    """Run the section in processes of its own, and end with it, whatever becomes of them."""
    limit = min(section.limit_s, bench.deadline - time.monotonic())
    if limit < 15:  # no time to start in
        bench.add(Row(section.name, section.name, error="skipped: out of time"))
        return
    flags = ["--out", str(bench.path.parent), *(["--smoke"] if bench.smoke else [])]
    children = []
    for part in range(section.processes):
        child = ["--child", section.name, str(_SOFT * limit), str(part), str(section.processes)]
        command = [sys.executable, __file__, *flags, *child]
        children.append(subprocess.Popen(command, start_new_session=True))
    end = time.monotonic() + limit
    for child in children:
        try:
            status = child.wait(max(0.0, end - time.monotonic()))
            if status:
                bench.add(Row(section.name, section.name, error=f"ended with status {status}"))
        except subprocess.TimeoutExpired:
            os.killpg(child.pid, signal.SIGKILL)
            child.wait()
            bench.add(Row(section.name, section.name, error=f"killed after {limit:.0f} s"))


def _run_section(section: Section, bench: Bench) -> None:
    try:
        run = getattr(importlib.import_module(section.module), section.function)
        run(bench)
    except Exception as error:
        bench.add(Row(section.name, section.name, error=f"{type(error).__name__}: {error:.140}"))


def _find_pagestream() -> None:
    """Make pagestream importable, here and in child processes, where it is not installed. Without
    xgrammar an empty stand-in does: nothing here has a grammar."""
    missing = []
    if importlib.util.find_spec("pagestream") is None:
        missing += [str(ROOT / "src"), str(ROOT / "kernels")]
    if importlib.util.find_spec("xgrammar") is None:
        stand_in = Path(tempfile.gettempdir()) / f"pagestream-stand-in-{os.getuid()}"
        stand_in.mkdir(exist_ok=True)
        (stand_in / "xgrammar.py").write_text("", encoding="utf-8")
        missing.append(str(stand_in))
    sys.path += missing
    known = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join([*missing, *([known] if known else [])])
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")


def _environment(device: torch.device) -> dict[str, str]:
    name = f"{platform.machine()} CPU, a smoke run: no figure below says anything about a GPU"
    if device.type == "cuda":
        major, minor = torch.cuda.get_device_capability()
        name = f"{torch.cuda.get_device_name()}, sm_{major}{minor}"
    versions = {"python": platform.python_version(), "torch": torch.__version__}
    for package in ("triton", "transformers"):
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            versions[package] = "none"
    return {"device": name, **versions}


def _summary(path: Path, device: torch.device) -> int:
    """Print and keep the table; 1 where something failed, or a correct answer was not."""
    rows = merged(read(path))
    environment = _environment(device)
    versions = ", ".join(f"{key} {value}" for key, value in environment.items() if key != "device")
    text = f"{environment['device']}\n{versions}\n{table(rows)}\n"
    (path.parent / "table.txt").write_text(text, encoding="utf-8")
    print(f"\n{text}\nrows: {path}")
    failed = [row for row in rows if row.error and not row.error.startswith("skipped")]
    wrong = [row for row in rows if row.section == "correctness" and row.met is False]
    return 1 if failed or wrong else 0


if __name__ == "__main__":
    main()
