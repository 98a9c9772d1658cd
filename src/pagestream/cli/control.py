"""What the command line asks of a running server over HTTP: inference, statistics, drain.

Owns the request bodies and the reading of the answers, and knows that this version of tritonserver
stays "ready" when a model's process is dead. It keeps no state and starts nothing. Called by the
supervisor and by `pagestream healthcheck`.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import urllib.error
import urllib.request
from dataclasses import dataclass
from typing import Any

PREPROCESSING = "preprocessing"
POSTPROCESSING = ("postprocessing", "postprocessing_batched")
TEXT_MODELS = (PREPROCESSING, *POSTPROCESSING)
PROBE_KEY = "drain-probe"
DEAD_STUB = "is not healthy"
NOT_LOADED = "unknown model"


class ControlError(Exception):
    """The server did not answer, or answered with an error."""


class ServerRefusalError(ControlError):
    """The server is there and answered with an error."""


class DeadModelError(ControlError):
    """A model's process is gone; tritonserver never starts it again."""


class NotLoadedError(ControlError):
    """The model is not loaded: with --model-control explicit, somebody has unloaded it."""


@dataclass(frozen=True)
class EngineStats:
    num_running: int
    num_waiting: int
    num_open_requests: int
    last_step_age_s: float


class Control:
    """One server's HTTP endpoint."""

    def __init__(self, host: str, port: int, secret: str = "") -> None:
        self.url = base_url(host, port)
        self._secret = secret
        # The server is on this machine, wherever a proxy set for the user may be.
        self._open = urllib.request.build_opener(urllib.request.ProxyHandler({})).open

    def infer(self, timeout: float) -> None:
        """One token through the whole of `ensemble`; raises ControlError."""
        body = {"text_input": "Hello", "max_tokens": 1}
        answer = self._generate("ensemble", body, timeout)
        if "text_output" not in answer:
            raise ControlError(f"model 'ensemble' answered without text_output: {answer}")

    def is_loaded(self, timeout: float) -> bool:
        """Every model is loaded; says nothing about whether they work."""
        try:
            with self._open(f"{self.url}/v2/health/ready", timeout=timeout):
                return True
        except (OSError, http.client.HTTPException):
            return False

    def stats(self, timeout: float) -> EngineStats:
        answer = self._command("stats", timeout)
        try:
            values = json.loads(answer["stats"])
            return EngineStats(
                num_running=int(values["num_running"]),
                num_waiting=int(values["num_waiting"]),
                num_open_requests=int(values["num_open_requests"]),
                last_step_age_s=float(values["last_step_age_s"] or 0.0),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise ControlError(f"the engine's stats cannot be read ({error!r}): {answer}") from None

    def drain(self, timeout: float) -> None:
        """The engine refuses new requests from now on."""
        self._command("drain", timeout)

    def passed_through(self, model: str, timeout: float) -> None:
        """Returns when `model` has handled all that was queued before; its answer is ignored.

        Only a dead model, or no answer at all, raises.
        """
        with contextlib.suppress(ServerRefusalError, NotLoadedError):
            self._generate(model, {"request_key": PROBE_KEY}, timeout)

    def _command(self, command: str, timeout: float) -> dict[str, Any]:
        control = json.dumps({"command": command, "secret": self._secret})
        return self._generate("engine", {"control": control}, timeout)

    def _generate(self, model: str, body: dict[str, Any], timeout: float) -> dict[str, Any]:
        request = urllib.request.Request(
            f"{self.url}/v2/models/{model}/generate",
            data=json.dumps(body).encode(),
            headers={"Content-Type": "application/json"},
        )
        try:
            with self._open(request, timeout=timeout) as response:
                text = response.read()
        except urllib.error.HTTPError as error:
            with error:
                text = error.read()
            raise _refusal(model, _error_message(text) or f"HTTP {error.code}") from None
        except (OSError, http.client.HTTPException) as error:
            reason = getattr(error, "reason", None) or error
            raise ControlError(f"model '{model}' did not answer: {reason!r}") from None
        if message := _error_message(text):
            raise _refusal(model, message)
        answer: dict[str, Any] = json.loads(text)
        return answer


def _refusal(model: str, message: str) -> ControlError:
    text = f"model '{model}': {message}"
    if DEAD_STUB in message:
        return DeadModelError(text)
    if NOT_LOADED in message:
        return NotLoadedError(text)
    return ServerRefusalError(text)


def base_url(host: str, port: int) -> str:
    return f"http://{f'[{host}]' if ':' in host else host}:{port}"


def reachable_host(host: str) -> str:
    """Where to reach a server that listens on `host`, from the same machine."""
    return {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)


def _error_message(text: bytes) -> str | None:
    """The server's error, from an answer of any status (some come with status 200)."""
    try:
        answer = json.loads(text)
    except ValueError:
        return f"not JSON: {text[:200]!r}"
    if not isinstance(answer, dict):
        return f"not a JSON object: {text[:200]!r}"
    error = answer.get("error")
    return None if error is None else str(error)
