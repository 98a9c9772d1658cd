"""EngineModel: the body of `engine`, between pb_utils and EngineBridge.

tritonserver makes one object per process and calls initialize, execute and finalize from its main
thread. Nothing that a client sent may raise out of ``execute``: the message would carry paths and a
traceback to the client. Named by the shim in model_repository.
"""

from __future__ import annotations

import logging
from typing import Any

import triton_python_backend_utils as pb_utils

from pagestream.engine.metrics import EngineStats
from pagestream.serving import tensors
from pagestream.serving.engine_bridge import EngineBridge
from pagestream.serving.model_config import INTERNAL_ERROR, load_config
from pagestream.serving.tensor_specs import ENGINE_INPUTS, ENGINE_OUTPUTS

logger = logging.getLogger(__name__)


class EngineModel:
    def initialize(self, args: dict[str, str]) -> None:
        self._bridge = EngineBridge(load_config(args), PbResponder())
        self._bridge.start()

    def execute(self, requests: list[Any]) -> None:
        for request in requests:
            sender = tensors.Sender(request)
            try:
                inputs = tensors.read_inputs(request, ENGINE_INPUTS)
                self._bridge.submit(inputs, sender)
            except ValueError as error:
                self._bridge.refuse(sender, str(error))
            except Exception:
                logger.exception("the request could not be read")
                self._bridge.refuse(sender, INTERNAL_ERROR)

    def finalize(self) -> None:
        self._bridge.shutdown()
        tensors.forget_constants()


_METRICS = {
    "requests_running": "Requests in the running batch",
    "requests_waiting": "Requests waiting to run",
    "kv_blocks_free": "KV-cache blocks free",
    "kv_blocks_total": "KV-cache blocks in all",
    "kv_blocks_cached": "KV-cache blocks that are free and kept for reuse",
    "step_batch_size": "Requests in the last step",
    "generated_tokens_total": "Tokens generated",
    "preemptions_total": "Requests preempted for want of KV-cache blocks",
    "expired_total": "Requests ended by their deadline",
    "prefix_queries_total": "Prompt tokens looked up in the prefix cache",
    "prefix_hits_total": "Prompt tokens found in the prefix cache",
    "cancelled_total": "Requests ended before their time by a cancel or a stop",
}


class PbResponder:
    """Every method is called from the sender thread alone."""

    def __init__(self) -> None:
        self._metrics = {}
        for name, description in _METRICS.items():
            kind = "COUNTER" if name.endswith("_total") else "GAUGE"
            if name == "kv_blocks_total":
                kind = "GAUGE"
            family = pb_utils.MetricFamily(
                name=f"pagestream_{name}",
                description=description,
                kind=getattr(pb_utils.MetricFamily, kind),
            )
            self._metrics[name] = kind, family, family.Metric(labels={})
        self._exported = EngineStats()

    def send(self, sender: Any, values: dict[str, Any], *, final: bool) -> None:
        sender.send(values, ENGINE_OUTPUTS, final=final)

    def send_error(self, sender: Any, message: str) -> None:
        sender.send_error(message)

    def set_metrics(self, stats: EngineStats) -> None:
        for name, (kind, _family, metric) in self._metrics.items():
            value = getattr(stats, name)
            before = getattr(self._exported, name)
            if value == before:
                continue
            if kind == "COUNTER":
                metric.increment(value - before)
            else:
                metric.set(value)
        self._exported = stats
