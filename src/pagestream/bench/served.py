"""ServedTarget: a running tritonserver, asked through its `ensemble` over streaming gRPC.

One connection for all requests; tokens are counted by the server (``num_output_tokens`` of each
response). Queue depth comes from the metrics port, memory from /proc where the server runs on this
machine.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

from tritonclient.grpc import InferenceServerClient

from pagestream.bench.driver import RequestTimedOut, Response
from pagestream.bench.workload import PlannedRequest
from pagestream_client import PagestreamClient, RequestTimeout
from pagestream_client.metrics import read_metrics

WAITING = "pagestream_requests_waiting"
LOCAL_HOSTS = frozenset({"localhost", "127.0.0.1", "[::1]"})
_LOOK_TIMEOUT_S = 2.0


class ServedTarget:
    """``url``: host:port of the gRPC endpoint. ``metrics_url``, ``pid`` (tritonserver's): None
    where they are not known."""

    def __init__(
        self,
        url: str,
        metrics_url: str | None,
        pid: int | None,
        *,
        stream: bool,
        ignore_eos: bool,
        seed: int,
    ) -> None:
        self._client = PagestreamClient(url)
        self._url = url
        self._metrics_url = metrics_url
        self._pid = pid
        self._stream = stream
        self._ignore_eos = ignore_eos
        self._seed = seed

    @property
    def is_ready(self) -> bool:
        return self._client.is_ready("ensemble")

    def server_version(self) -> str:
        """tritonserver's own; raises InferenceServerException when it does not answer."""
        client = InferenceServerClient(self._url)
        try:
            return str(client.get_server_metadata().version)
        finally:
            client.close()

    def send(self, request: PlannedRequest, timeout_s: float) -> Iterator[Response]:
        stream = self._client.stream(
            "ensemble",
            stream=self._stream,
            timeout_s=timeout_s,
            prompt_token_ids=request.prompt_token_ids,
            max_tokens=request.max_tokens,
            ignore_eos=self._ignore_eos,
            temperature=0.0,
            seed=self._seed,
        )
        with stream:
            try:
                for chunk in stream:
                    yield Response(
                        chunk.received_at,
                        chunk.num_output_tokens or 0,
                        chunk.num_input_tokens,
                        chunk.num_cached_tokens,
                        chunk.finish_reason,
                    )
            except RequestTimeout as error:
                raise RequestTimedOut(str(error)) from None

    def queue_depth(self) -> float | None:
        if self._metrics_url is None:
            return None
        with contextlib.suppress(OSError, ValueError, IndexError):
            return read_metrics(self._metrics_url, timeout_s=_LOOK_TIMEOUT_S).get(WAITING)
        return None

    def peak_memory_bytes(self) -> int | None:
        """Of the largest process of the server, which is the engine's."""
        if self._pid is None and self._url.rpartition(":")[0] not in LOCAL_HOSTS:
            return None
        peaks = [peak_memory_of(pid) for pid in server_processes(self._pid)]
        return max((peak for peak in peaks if peak is not None), default=None)

    def close(self) -> None:
        self._client.close()


def peak_memory_of(pid: int, proc: Path = Path("/proc")) -> int | None:
    """Most resident memory that the process has had, in bytes; None if it is not to be seen."""
    with contextlib.suppress(OSError):
        for line in (proc / str(pid) / "status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    return None


def server_processes(pid: int | None, proc: Path = Path("/proc")) -> list[int]:
    """Those of tritonserver's session, which it leads. Without ``pid``, of the only tritonserver
    that runs here; none if there are several: whose would it be?"""
    sessions: dict[int, list[int]] = {}
    servers = set()
    for stat in proc.glob("[0-9]*/stat"):
        with contextlib.suppress(OSError, ValueError):
            text = stat.read_text()
            session = int(text.rpartition(")")[2].split()[3])
            sessions.setdefault(session, []).append(int(stat.parent.name))
            if "(tritonserver)" in text:
                servers.add(session)
    if pid is None:
        return sessions[servers.pop()] if len(servers) == 1 else []
    return sessions.get(pid, [])
