"""EngineBridge: between tritonserver's calls and the engine loop.

    execute() --------> outbox --> sender thread ----> response_sender.send
        |                  ^        |  is_cancelled, metrics: every pb_utils call is made here
        +----> inbox --> engine loop (its own thread)

Owns the open requests and their response senders. ``execute`` only decodes and enqueues; a single
sender thread answers, because pb_utils is not safe to call from several. It never sees text or
tensors of the model. Used by EngineModel.
"""

from __future__ import annotations

import hmac
import json
import logging
import os
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, Protocol

from pagestream.config import EngineConfig
from pagestream.engine.engine_loop import (
    AbortRequest,
    AddRequest,
    Command,
    EngineLoop,
    Shutdown,
    StepReport,
)
from pagestream.engine.engine_process import EngineProcess
from pagestream.engine.metrics import EngineStats
from pagestream.runner.model_runner import resolve_device
from pagestream.sampling_params import Limits
from pagestream.serving.engine_requests import Control, Submission, parse_request
from pagestream.serving.responses import UNSTREAMED_INTERVAL_S, OpenAnswer, OpenRequest, pace

logger = logging.getLogger(__name__)

_CANCEL_CHECK_INTERVAL_S = 0.2
_METRICS_INTERVAL_S = 0.1
_HEARTBEATS_PER_SECOND = 200
_IDLE_WAIT_S = 3600.0


class Responder(Protocol):
    """What the sender thread does through pb_utils; tests put a recorder in its place."""

    def send(self, sender: Any, values: dict[str, Any], *, final: bool) -> None: ...
    def send_error(self, sender: Any, message: str) -> None: ...
    def set_metrics(self, stats: EngineStats) -> None: ...


@dataclass(frozen=True, slots=True)
class Refusal:
    response_sender: Any
    message: str


@dataclass(frozen=True, slots=True)
class Opening:
    response_sender: Any
    submission: Submission


@dataclass(frozen=True, slots=True)
class ControlCall:
    response_sender: Any
    control: Control


Message = Refusal | Opening | ControlCall | StepReport | None


class EngineBridge:
    """``die`` ends the process: a dead engine must not leave a server that looks alive."""

    def __init__(
        self,
        config: EngineConfig,
        responder: Responder,
        die: Callable[[], None] = lambda: os._exit(1),
    ) -> None:
        self._config = config
        self._responder = responder
        self._die = die
        self._outbox: queue.SimpleQueue[Message] = queue.SimpleQueue()
        make_loop = EngineProcess if config.engine_process else EngineLoop
        self._loop = make_loop(config, self._outbox.put)
        self._sender = threading.Thread(target=self._send_loop, name="sender", daemon=True)
        self._open: dict[str, OpenRequest] = {}
        self._pace = pace(
            config.stream_interval_ms,
            resolve_device(config.device).type == "cuda",
            os.cpu_count() or 1,
        )
        self._heartbeat = config.heartbeat_interval_ms / 1000
        self._next_heartbeat = 0.0
        self._draining = False
        self._stats = EngineStats()
        self._last_report = time.monotonic()
        self._next_metrics = 0.0
        self._exported: EngineStats | None = None
        self.limits: Limits | None = None

    def start(self) -> None:
        """Returns when the engine can serve; raises what loading raised."""
        self.limits = self._loop.start()
        self._sender.start()

    def submit(self, inputs: dict[str, Any], response_sender: Any) -> None:
        """Decode one request and queue it. Never raises for what a client sent."""
        assert self.limits is not None
        try:
            parsed = parse_request(inputs, self.limits)
        except ValueError as error:
            self.refuse(response_sender, str(error))
            return
        if isinstance(parsed, Control):
            self._outbox.put(ControlCall(response_sender, parsed))
        else:
            self._outbox.put(Opening(response_sender, parsed))

    def refuse(self, response_sender: Any, message: str) -> None:
        self._outbox.put(Refusal(response_sender, message))

    def shutdown(self) -> None:
        """Abort what is open, answer it, and end both threads."""
        self._loop.submit(Shutdown())
        self._loop.join(timeout=60)
        self._outbox.put(None)
        self._sender.join(timeout=10)

    def _send_loop(self) -> None:
        try:
            while True:
                try:
                    message = self._outbox.get(timeout=self._time_to_wait())
                except queue.Empty:
                    pass
                else:
                    if message is None:
                        self._close("abort")
                        return
                    self._handle(message)
                self._flush_due()
                self._export_metrics()
        except Exception:
            logger.exception("the sender thread died")
            self._die()

    def _handle(self, message: Message) -> None:
        if isinstance(message, StepReport):
            self._absorb(message)
        elif isinstance(message, Opening):
            self._admit(message.response_sender, message.submission)
        elif isinstance(message, ControlCall):
            self._control(message.response_sender, message.control)
        elif isinstance(message, Refusal):
            self._responder.send_error(message.response_sender, message.message)

    def _admit(self, response_sender: Any, submission: Submission) -> None:
        """A refusal before the first response may be a tritonserver error; later ones may not."""
        key = submission.request_key
        if self._draining:
            self._responder.send_error(response_sender, "the server is shutting down")
            return
        if key in self._open:
            self._responder.send_error(response_sender, f"request_key {key!r} is already in use")
            return
        arrival = submission.arrival_time_ns / 1e9
        self._open[key] = OpenRequest(
            request_key=key,
            response_sender=response_sender,
            num_prompt_tokens=len(submission.prompt_token_ids),
            stream=submission.stream,
            answers={
                index: OpenAnswer(index, arrival, submission.text_params)
                for index in range(submission.sampling_params.n)
            },
        )
        self._command(
            AddRequest(key, submission.prompt_token_ids, submission.sampling_params, arrival)
        )

    def _absorb(self, report: StepReport) -> None:
        now = self._last_report = time.monotonic()
        self._stats = report.stats
        for output in report.outputs:
            request = self._open.get(output.request_id)
            if request is not None and output.index in request.answers:
                request.answers[output.index].take(output, now)
        if report.failure is not None:
            self._close("error", report.failure)
            self._die()

    def _close(self, finish_reason: str, error: str | None = None) -> None:
        """Answer whatever is still open: nothing more will come from the loop."""
        for request in self._open.values():
            for answer in request.answers.values():
                if answer.finish_reason is None:
                    answer.finish_reason, answer.error = finish_reason, error
        self._flush_due()

    def _control(self, response_sender: Any, control: Control) -> None:
        if control.command != "stop" and not self._authorised(control.secret):
            message = f"control {control.command} needs the secret of this server's configuration"
            self._responder.send_error(response_sender, message)
            return
        if control.command == "stop" and control.request_key in self._open:
            self._command(AbortRequest(control.request_key, control.index))
        elif control.command == "drain":
            self._draining = True
        self._responder.send(response_sender, {"stats": self._stats_json()}, final=True)

    def _authorised(self, secret: str) -> bool:
        expected = self._config.control_secret
        return bool(expected) and hmac.compare_digest(secret.encode(), expected.encode())

    def _command(self, command: Command) -> None:
        self._loop.submit(command)

    def _due(self) -> list[tuple[OpenRequest, OpenAnswer, float]]:
        """Every open answer, and when its next response is owed."""
        streams = sum(len(request.answers) for request in self._open.values() if request.stream)
        streamed = self._pace.interval(streams)
        return [
            (
                request,
                answer,
                answer.due(streamed if request.stream else UNSTREAMED_INTERVAL_S, self._heartbeat),
            )
            for request in self._open.values()
            for answer in request.answers.values()
        ]

    def _flush_due(self) -> None:
        now = time.monotonic()
        for request in self._open.values():
            self._check_cancelled(request, now)
        for request, answer, due in self._due():
            if due > now:
                continue
            if not answer.token_ids and answer.finish_reason is None:
                if now < self._next_heartbeat:
                    continue
                self._next_heartbeat = now + 1 / _HEARTBEATS_PER_SECOND
            self._send(request, answer, now)

    def _send(self, request: OpenRequest, answer: OpenAnswer, now: float) -> None:
        """The last response of the last answer ends the request for tritonserver."""
        if answer.finish_reason is not None:
            del request.answers[answer.index]
            logger.info("%s", request.summary(answer, now))
        final = not request.answers
        if final:
            self._open.pop(request.request_key, None)
        chunk = {"request_key": request.request_key, **answer.flush(now)}
        try:
            self._responder.send(request.response_sender, chunk, final=final)
        except Exception:
            # The client is gone in a way that tritonserver reports by refusing the response.
            logger.exception("request %s: response refused", request.request_key)
            if not final:
                self._open.pop(request.request_key, None)
                self._command(AbortRequest(request.request_key))

    def _check_cancelled(self, request: OpenRequest, now: float) -> None:
        """Only a request sent straight to the engine is ever seen as cancelled here."""
        if now - request.last_cancel_check < _CANCEL_CHECK_INTERVAL_S:
            return
        request.last_cancel_check = now
        if request.response_sender.is_cancelled():
            self._command(AbortRequest(request.request_key))

    def _time_to_wait(self) -> float:
        now = time.monotonic()
        due = [due for _, _, due in self._due()]
        if self._open:
            due.append(now + _CANCEL_CHECK_INTERVAL_S)
        if self._stats != self._exported:
            due.append(self._next_metrics)
        return max(0.0, min(due, default=now + _IDLE_WAIT_S) - now)

    def _export_metrics(self) -> None:
        now = time.monotonic()
        if self._stats != self._exported and now >= self._next_metrics:
            self._responder.set_metrics(self._stats)
            self._exported = self._stats
            self._next_metrics = now + _METRICS_INTERVAL_S

    def _stats_json(self) -> str:
        stats = {
            **asdict(self._stats),
            "num_running": self._stats.requests_running,
            "num_waiting": self._stats.requests_waiting,
            "num_open_requests": len(self._open),
            "last_step_age_s": round(time.monotonic() - self._last_report, 3),
            "draining": self._draining,
        }
        return json.dumps(stats)
