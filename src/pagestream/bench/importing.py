"""Other load generators' results as runs of ours, so that they can be compared.

Reads perf_analyzer's ``--profile-export-file`` (JSON, times in nanoseconds) and aiperf's
``profile_export.jsonl`` (one request per line, latencies in milliseconds). What such a file does
not say is noted in the run, never made up silently.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pagestream.bench.records import RequestRecord, RunWriter, Samples
from pagestream.bench.summary import Slo, summarize
from pagestream.bench.workload import point_label

_NO_COUNTS = "responses without num_output_tokens: each is taken for one token"
_SPREAD = "tokens per response are not recorded: the first has one, the last has what is left"
_KINDS = {"concurrency": "concurrency", "request_rate": "rate"}
Imported = tuple[str, float, list[RequestRecord]]
"""Kind and value of a point, and its records."""


def import_run(source: Path, output: Path, name: str | None, slo: Slo) -> Path:
    """Write a run directory; raises ValueError for a file of neither kind."""
    text = source.read_text(encoding="utf-8")
    notes: set[str] = set()
    try:
        tool, points = _read(text, notes)
    except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
        raise ValueError(
            f"{source} is neither an export of perf_analyzer nor one of aiperf: {error!r}"
        ) from None
    if not any(records for _, _, records in points):
        raise ValueError(f"{source} has no requests")
    info = {
        "name": name or source.stem,
        "tool": tool,
        "source": str(source),
        "points": [
            {"kind": kind, "value": value, "label": point_label(kind, value)}
            for kind, value, _ in points
        ],
        "slo": dataclasses.asdict(slo),
        "notes": sorted(notes),
    }
    writer = RunWriter(output, info)
    summaries = []
    for kind, value, records in points:
        writer.add(records)
        summary = summarize(point_label(kind, value), kind, value, records, slo, Samples([], None))
        summaries.append(dataclasses.asdict(summary))
    writer.close(summaries, complete=True)
    return output


def _read(text: str, notes: set[str]) -> tuple[str, list[Imported]]:
    try:
        whole = json.loads(text)
    except ValueError:
        return "aiperf", [_aiperf([json.loads(line) for line in text.splitlines() if line], notes)]
    if "experiments" in whole:
        return "perf_analyzer", list(_perf_analyzer(whole, notes))
    return "aiperf", [_aiperf([whole], notes)]


def _perf_analyzer(export: dict[str, Any], notes: set[str]) -> Iterator[Imported]:
    for place, experiment in enumerate(export["experiments"]):
        load, requests = experiment["experiment"], experiment["requests"]
        if not requests:
            notes.add(f"no requests at {load['mode']} {load['value']}: left out")
            continue
        origin = min(request["timestamp"] for request in requests)
        records = [
            _perf_analyzer_record(place, index, request, origin, notes)
            for index, request in enumerate(requests)
        ]
        yield _KINDS.get(load["mode"], "imported"), float(load["value"]), records


def _perf_analyzer_record(
    place: int, index: int, request: dict[str, Any], origin: int, notes: set[str]
) -> RequestRecord:
    started = (request["timestamp"] - origin) / 1e9
    record = RequestRecord(place, index, started, started, end_s=started)
    outputs = request.get("response_outputs") or []
    for number, stamp in enumerate(request["response_timestamps"]):
        output = outputs[number] if number < len(outputs) else None
        if not isinstance(output, dict):
            output = None  # its text alone, in exports of early versions
        time_s = (stamp - origin) / 1e9
        record.responses.append((time_s, _count_of(output, notes)))
        record.end_s = time_s
        if output and record.num_input_tokens is None:
            _note_prompt(record, output)
        if output and output.get("finish_reason"):
            record.finish_reason = str(output["finish_reason"])
    record.num_output_tokens = sum(count for _, count in record.responses)
    if not record.responses:
        record.outcome, record.error = "error", "no response"
    return record


def _note_prompt(record: RequestRecord, output: dict[str, Any]) -> None:
    num_input, num_cached = output.get("num_input_tokens"), output.get("num_cached_tokens")
    if num_input is None:
        return
    record.num_input_tokens = int(num_input)
    # For an empty tensor, perf_analyzer writes whatever lay in the memory beside it.
    if num_cached is not None and 0 <= num_cached <= num_input:
        record.num_cached_tokens = int(num_cached)


def _count_of(output: dict[str, Any] | None, notes: set[str]) -> int:
    if output is not None and not output:
        return 0  # nothing but the mark of the end
    if output is None or output.get("num_output_tokens") is None:
        notes.add(_NO_COUNTS)
        return 1
    return int(output["num_output_tokens"])


def _aiperf(lines: list[dict[str, Any]], notes: set[str]) -> Imported:
    lines = [
        line for line in lines if line["metadata"].get("benchmark_phase", "profiling") != "warmup"
    ]
    origin = min(line["metadata"]["request_start_ns"] for line in lines)
    records = [_aiperf_record(index, line, origin, notes) for index, line in enumerate(lines)]
    notes.add("aiperf's lines do not say under which load they were sent: the number of requests")
    return "imported", len(records), records


def _aiperf_record(index: int, line: dict[str, Any], origin: int, notes: set[str]) -> RequestRecord:
    metadata, metrics = line["metadata"], line.get("metrics") or {}
    started = (metadata["request_start_ns"] - origin) / 1e9
    ended = (metadata["request_end_ns"] - origin) / 1e9
    record = RequestRecord(0, index, started, started, end_s=ended)
    error = line.get("error")
    if error or metadata.get("was_cancelled"):
        what = error or {"message": "cancelled"}
        record.outcome = "timeout" if "imeout" in str(what.get("type")) else "error"
        record.error = str(what.get("message") or what)
        return record
    record.num_input_tokens = int(metrics["input_sequence_length"]["value"])
    record.num_output_tokens = int(metrics["output_sequence_length"]["value"])
    latency = metrics["request_latency"]["value"] / 1e3
    record.end_s = started + latency
    first = metrics["time_to_first_token"]["value"] / 1e3 if _has_first(metrics) else latency
    gaps = [gap / 1e3 for gap in metrics.get("inter_chunk_latency", {}).get("value", ())]
    times = [started + first]
    for gap in gaps:
        times.append(times[-1] + gap)
    if not gaps and latency > first:
        times.append(record.end_s)
    record.responses = list(zip(times, _spread(record.num_output_tokens, len(times)), strict=True))
    if len(times) != record.num_output_tokens:
        notes.add(_SPREAD)
    return record


def _has_first(metrics: dict[str, Any]) -> bool:
    return "time_to_first_token" in metrics


def _spread(total: int, num_responses: int) -> list[int]:
    """One token each; the last has the rest (the first ones none beyond the total)."""
    counts = [1 if place < total else 0 for place in range(num_responses)]
    counts[-1] += total - sum(counts)
    return counts
