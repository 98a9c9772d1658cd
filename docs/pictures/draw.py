"""Makes the pictures and the tables of docs/batching.md from real runs of SmolLM2 on the CPU.

    .venv/bin/python docs/pictures/draw.py

writes the SVG files beside it and the tables between the page's `<!-- numbers: ... -->` marks. The
iterations are the same in every run; the times are this machine's.
"""

from __future__ import annotations

import re
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from pagestream.cli.trace_picture import draw, make_panel
from pagestream.config import EngineConfig
from pagestream.engine.llm_engine import LLMEngine
from pagestream.engine.step_trace import Trace, read_trace
from pagestream.model_store import DEFAULT_MODEL, resolve_model
from pagestream.sampling_params import SamplingParams
from pagestream.text.tokenizer import Tokenizer

HERE = Path(__file__).parent
PAGE = HERE.parent / "batching.md"
SYSTEM = (
    "You are the friendly guide of a small museum by the sea. You know its three rooms well: the "
    "ships, the maps and the lighthouse lamp. You answer in short, plain sentences, you never make "
    "things up, and when you do not know something you say so and point to the desk at the door. "
    "The museum opens at nine and closes at five; on Mondays it is closed. Entry is free for "
    "children. Dogs have to wait outside, where there is a bowl of water for them. There is a "
    "small cafe with a view over the harbour, and the last boat to the island leaves at four."
)


@dataclass(frozen=True)
class Job:
    name: str
    prompt: str
    max_tokens: int
    system: str | None = None
    before_step: int = 0
    """It comes before this step starts."""


EIGHT = (
    Job("A", "Tell me a story about a fox.", 40),
    Job("B", "Name one colour.", 6),
    Job("C", "What is the capital of France, and what is it known for?", 22),
    Job("D", "Write a haiku about rain.", 12),
    Job("E", "Explain how a bicycle stays upright, in a few sentences, to a child.", 34),
    Job("F", "Say hello.", 5),
    Job("G", "List three fruits and what each tastes like.", 18),
    Job("H", "What is 17 plus 25?", 9),
)
VISITORS = (
    Job("A", "When do you open?", 24, SYSTEM),
    Job("B", "May I bring my dog?", 20, SYSTEM, before_step=8),
    Job("C", "Is there anything to eat?", 18, SYSTEM, before_step=14),
    Job("D", "How does a lighthouse lamp work?", 14, before_step=16),
)
TIGHT = (
    Job("A", "Tell me a story about a fox.", 44),
    Job("B", "Describe a rainy day in a big city.", 44),
    Job("C", "Explain how bread is made.", 30, before_step=4),
)


def run(name: str, jobs: Sequence[Job], **options: object) -> Trace:
    """The trace of one fresh engine, once the last job has ended."""
    directory = resolve_model(DEFAULT_MODEL)
    tokenizer = Tokenizer(directory)
    with tempfile.TemporaryDirectory() as scratch:
        path = Path(scratch) / f"{name}.jsonl"
        config = {"model": str(directory), "block_size": 16, "num_blocks": 200, **options}
        engine = LLMEngine(EngineConfig.from_dict({**config, "step_trace": str(path)}))
        engine.warm_up()
        coming = list(jobs)
        step = 0
        while coming or engine.has_unfinished_requests():
            for job in [job for job in coming if job.before_step <= step]:
                coming.remove(job)
                messages = [{"role": "system", "content": job.system}] if job.system else []
                messages.append({"role": "user", "content": job.prompt})
                params = SamplingParams(temperature=0.0, max_tokens=job.max_tokens, ignore_eos=True)
                engine.add_request(job.name, tokenizer.encode_chat(messages), params)
            engine.step()
            step += 1
        return read_trace(path)


def picture(name: str, traces: dict[str, Trace]) -> None:
    panels = [make_panel(title, trace, 0, None) for title, trace in traces.items()]
    (HERE / f"{name}.svg").write_text(draw(panels), encoding="utf-8")


def table(header: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(map(str, line)) + " |" for line in lines)


def totals(trace: Trace) -> list[str]:
    shares = [share for step in trace.steps for share in step.scheduled]
    seconds = trace.steps[-1].end_s - trace.steps[0].start_s
    output = sum(share.num_new_tokens for share in shares)
    ended = [step.end_s for step in trace.steps for share in step.scheduled if share.finish_reason]
    return [
        f"{len(trace.steps)}",
        f"{len(shares) / len(trace.steps):.2f}",
        f"{output}",
        f"{seconds:.2f} s",
        f"{output / seconds:.0f}",
        f"{sum(ended) / len(ended):.2f} s",
    ]


def compare(static: Trace, continuous: Trace) -> str:
    names = ["iterations", "requests per iteration", "output tokens", "time until all have ended",
             "output tokens per second", "time until a request has ended, mean"]  # fmt: skip
    columns = (names, totals(static), totals(continuous))
    return table(["", "static", "continuous"], list(zip(*columns, strict=True)))


def iterations(trace: Trace) -> dict[str, tuple[int, int]]:
    """Of each request's first and last output token, by request_id."""
    names = {arrival.request: arrival.request_id for arrival in trace.arrivals}
    found: dict[str, tuple[int, int]] = {}
    for step in trace.steps:
        for share in step.scheduled:
            if share.num_new_tokens:
                name, now = names[share.request], step.step + 1
                found[name] = found.get(name, (now, now))[0], now
    return found


def one_by_one(static: Trace, continuous: Trace) -> str:
    before, after = iterations(static), iterations(continuous)
    return table(
        ["request", "output tokens", "first token in iteration: static", "continuous",
         "last token in iteration: static", "continuous"],
        [
            [job.name, job.max_tokens, before[job.name][0], after[job.name][0],
             before[job.name][1], after[job.name][1]]
            for job in EIGHT
        ],
    )  # fmt: skip


def prefix_table(trace: Trace) -> str:
    rows = []
    for arrival in trace.arrivals:
        steps = [
            (step, share)
            for step in trace.steps
            for share in step.scheduled
            if share.request == arrival.request and share.phase == "prefill"
        ]
        computed = sum(share.num_scheduled_tokens for _, share in steps)
        seconds = steps[-1][0].end_s - arrival.time_s
        cached = steps[0][1].num_cached_tokens
        rows.append(
            [arrival.request_id, arrival.num_prompt_tokens, cached, computed, len(steps),
             f"{seconds * 1000:.0f} ms"]
        )  # fmt: skip
    return table(
        ["request", "prompt tokens", "from the cache", "computed", "iterations for it",
         "first token after"],
        rows,
    )  # fmt: skip


def write_numbers(tables: dict[str, str]) -> None:
    page = PAGE.read_text(encoding="utf-8")
    for name, text in tables.items():
        marks = rf"(<!-- numbers: {name} -->\n).*?(<!-- end -->)"
        page, count = re.subn(marks, rf"\1\n{text}\n\n\2", page, flags=re.DOTALL)
        if count != 1:
            raise SystemExit(f"{PAGE.name} has {count} places for the numbers {name!r}, not 1")
    PAGE.write_text(page, encoding="utf-8")


def main() -> None:
    seats = {"max_num_seqs": 4, "enable_prefix_caching": False}
    static = run("static", EIGHT, static_batching=True, **seats)
    continuous = run("continuous", EIGHT, **seats)
    picture("batching", {"Static batching": static, "Continuous batching": continuous})
    hit = run("prefix", VISITORS, max_num_batched_tokens=48)
    picture("prefix-hit", {"Three prompts that begin alike, and another": hit})
    tight = run("tight", TIGHT, num_blocks=13, enable_prefix_caching=False)
    picture("preemption", {"13 KV blocks for three requests": tight})
    write_numbers(
        {
            "batching": compare(static, continuous),
            "requests": one_by_one(static, continuous),
            "prefix": prefix_table(hit),
        }
    )


if __name__ == "__main__":
    main()
