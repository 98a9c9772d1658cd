"""The bodies of the three Python models: pb_utils on one side, our classes on the other.

tritonserver makes one object of each per process and calls initialize, execute and finalize from
its main thread. Nothing that a client sent may raise out of ``execute``: the message would carry
paths and a traceback to the client. The shims in model_repository name these classes.
"""

from __future__ import annotations

import json
import logging
import os
import sys
from pathlib import Path
from typing import Any

import triton_python_backend_utils as pb_utils

from pagestream.config import EngineConfig, ModelConfig, resolve_max_model_len
from pagestream.engine.metrics import EngineStats
from pagestream.model_store import resolve_model
from pagestream.serving import tensors
from pagestream.serving.engine_bridge import EngineBridge
from pagestream.serving.postprocessing import Answer, Chunk, Postprocessor
from pagestream.serving.preprocessing import Preprocessor
from pagestream.text.token_bytes import read_token_bytes

logger = logging.getLogger(__name__)

FINAL: int = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL
_INTERNAL_ERROR = "internal error; the server's log has the details"


def load_config(args: dict[str, str]) -> EngineConfig:
    """PAGESTREAM_CONFIG, else the engine's own engine.json. Also sets up this process's log."""
    logging.basicConfig(
        stream=sys.stderr,
        level=os.environ.get("PAGESTREAM_LOG_LEVEL", "INFO"),
        format=f"%(asctime)s {args['model_name']} %(levelname)s %(message)s",
    )
    path = os.environ.get("PAGESTREAM_CONFIG")
    repository = Path(args["model_repository"]).parent
    return EngineConfig.from_json(path or repository / "engine" / "1" / "engine.json")


class PreprocessingModel:
    def initialize(self, args: dict[str, str]) -> None:
        config = load_config(args)
        directory = resolve_model(config.model)
        max_model_len = resolve_max_model_len(config, ModelConfig.from_hf(directory))
        self._preprocessor = Preprocessor(directory, max_model_len)

    def execute(self, requests: list[Any]) -> list[Any]:
        return [self._respond(request) for request in requests]

    def _respond(self, request: Any) -> Any:
        try:
            inputs = tensors.read_inputs(request, tensors.PREPROCESSING_INPUTS)
            parameters = json.loads(request.parameters() or "{}")
            prepared = self._preprocessor.prepare(inputs, parameters)
            return tensors.write_outputs(
                {name: getattr(prepared, name) for name in tensors.PREPROCESSING_OUTPUTS},
                tensors.PREPROCESSING_OUTPUTS,
            )
        except ValueError as error:
            return tensors.error_response(str(error))
        except Exception:
            logger.exception("preprocessing failed")
            return tensors.error_response(_INTERNAL_ERROR)


class PostprocessingModel:
    def initialize(self, args: dict[str, str]) -> None:
        config = load_config(args)
        self._answer = tensors.ANSWERS[args["model_name"]]
        self._batched = args["model_name"] == "postprocessing_batched"
        self._postprocessor = Postprocessor(
            read_token_bytes(resolve_model(config.model) / "tokenizer.json"),
            config.heartbeat_interval_ms / 1000,
            self._relay_stop,
        )

    def execute(self, requests: list[Any]) -> None:
        for request in requests:
            sender = request.get_response_sender()
            try:
                inputs = tensors.read_inputs(request, tensors.CHUNK)
                answer = self._postprocessor.handle(_chunk(inputs), request.is_cancelled)
            except ValueError as error:
                answer = Answer(error=str(error))
            except Exception:
                logger.exception("postprocessing failed")
                answer = Answer(error=_INTERNAL_ERROR)
            if answer is None:
                sender.send(flags=FINAL)
            elif answer.error is not None:
                sender.send(tensors.error_response(answer.error), flags=FINAL)
            else:
                sender.send(tensors.write_outputs(answer.outputs, self._answer), flags=FINAL)

    def _relay_stop(self, request_key: str, index: int) -> None:
        control = json.dumps({"command": "stop", "request_key": request_key, "index": index})
        call = pb_utils.InferenceRequest(
            model_name="engine",
            requested_output_names=["stats"],
            inputs=tensors.write_inputs({"control": control}, tensors.ENGINE_INPUTS),
        )
        for response in call.exec(decoupled=True):
            if response.has_error():
                logger.error("stop of %s refused: %s", request_key, response.error().message())


def _chunk(inputs: dict[str, Any]) -> Chunk:
    if "request_key" not in inputs:
        raise ValueError("request_key is required")
    return Chunk(
        request_key=inputs["request_key"],
        index=inputs.get("index", 0),
        token_ids=inputs.get("token_ids", []),
        finish_reason=inputs.get("finish_reason"),
        stop_reason=inputs.get("stop_reason"),
        error=inputs.get("error"),
        text_params=inputs.get("text_params"),
    )


class EngineModel:
    def initialize(self, args: dict[str, str]) -> None:
        self._bridge = EngineBridge(load_config(args), PbResponder())
        self._bridge.start()

    def execute(self, requests: list[Any]) -> None:
        for request in requests:
            sender = request.get_response_sender()
            try:
                inputs = tensors.read_inputs(request, tensors.ENGINE_INPUTS)
                self._bridge.submit(inputs, sender)
            except ValueError as error:
                self._bridge.refuse(sender, str(error))
            except Exception:
                logger.exception("the request could not be read")
                self._bridge.refuse(sender, _INTERNAL_ERROR)

    def finalize(self) -> None:
        self._bridge.shutdown()


_METRICS = {
    "requests_running": "Requests in the running batch",
    "requests_waiting": "Requests waiting to run",
    "kv_blocks_free": "KV-cache blocks free",
    "kv_blocks_total": "KV-cache blocks in all",
    "step_batch_size": "Requests in the last step",
    "generated_tokens_total": "Tokens generated",
    "preemptions_total": "Requests preempted for want of KV-cache blocks",
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
        response = tensors.write_outputs(values, tensors.ENGINE_OUTPUTS)
        sender.send(response, flags=FINAL if final else 0)

    def send_error(self, sender: Any, message: str) -> None:
        sender.send(tensors.error_response(message), flags=FINAL)

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
