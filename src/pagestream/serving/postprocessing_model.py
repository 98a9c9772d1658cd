"""PostprocessingModel: the body of both postprocessing models, between pb_utils and Postprocessor.

tritonserver makes one object per process and calls initialize, execute and finalize from its main
thread. Nothing that a client sent may raise out of ``execute``: the message would carry paths and a
traceback to the client. Its process loads neither torch nor transformers.
"""

from __future__ import annotations

import json
import logging
from typing import Any

import triton_python_backend_utils as pb_utils

from pagestream.model_store import resolve_model
from pagestream.serving import tensors
from pagestream.serving.answers import Answer, Chunk
from pagestream.serving.model_config import INTERNAL_ERROR, load_config
from pagestream.serving.postprocessing import Postprocessor
from pagestream.serving.tensor_specs import ANSWERS, CHUNK, ENGINE_INPUTS
from pagestream.text.token_bytes import read_token_bytes

logger = logging.getLogger(__name__)


class PostprocessingModel:
    def initialize(self, args: dict[str, str]) -> None:
        config = load_config(args)
        self._answer = ANSWERS[args["model_name"]]
        self._postprocessor = Postprocessor(
            read_token_bytes(resolve_model(config.model) / "tokenizer.json"),
            config.heartbeat_interval_ms / 1000,
            config.block_size,
            self._relay_stop,
        )

    def execute(self, requests: list[Any]) -> None:
        for request in requests:
            sender = tensors.Sender(request)
            try:
                inputs = tensors.read_inputs(request, CHUNK)
                answer = self._postprocessor.handle(_chunk(inputs), request.is_cancelled)
            except ValueError as error:
                answer = Answer(error=str(error))
            except Exception:
                logger.exception("postprocessing failed")
                answer = Answer(error=INTERNAL_ERROR)
            if answer is None:
                sender.end()
            elif answer.error is not None:
                sender.send_error(answer.error)
            else:
                sender.send(answer.outputs, self._answer, final=True)

    def finalize(self) -> None:
        tensors.forget_constants()

    def _relay_stop(self, request_key: str, index: int) -> None:
        control = json.dumps({"command": "stop", "request_key": request_key, "index": index})
        call = pb_utils.InferenceRequest(
            model_name="engine",
            requested_output_names=["stats"],
            inputs=tensors.write_inputs({"control": control}, ENGINE_INPUTS),
        )
        for response in call.exec(decoupled=True):
            if response.has_error():
                logger.error("stop of %s refused: %s", request_key, response.error().message())


def _chunk(inputs: dict[str, Any]) -> Chunk:
    if "request_key" not in inputs:
        raise ValueError("request_key is required")
    return Chunk(**{"index": 0, "token_ids": [], **inputs})
