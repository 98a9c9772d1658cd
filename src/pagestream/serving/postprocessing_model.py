"""PostprocessingModel: the body of both postprocessing models, between pb_utils and Postprocessor.

tritonserver makes one object per process and calls initialize, execute and finalize from its main
thread, which reads chunks; one other thread makes and sends the answers, because a send waits for
tritonserver, which meanwhile can hand over the next chunk. Nothing that a client sent may raise out
of ``execute``: the message would carry paths and a traceback to the client. Its process loads
neither torch nor transformers.
"""

from __future__ import annotations

import json
import logging
import queue
import threading
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
        self._arrived: queue.SimpleQueue[tuple[tensors.Sender, Chunk | Answer] | None] = (
            queue.SimpleQueue()
        )
        self._thread = threading.Thread(target=self._run, name="answers", daemon=True)
        self._thread.start()

    def execute(self, requests: list[Any]) -> None:
        for request in requests:
            self._arrived.put((tensors.Sender(request), _read(request)))

    def finalize(self) -> None:
        self._arrived.put(None)
        self._thread.join()
        tensors.forget_constants()

    def _run(self) -> None:
        while (arrived := self._arrived.get()) is not None:
            sender, chunk = arrived
            try:
                self._reply(sender, self._handle(chunk, sender))
            except Exception:
                logger.exception("an answer could not be sent")

    def _handle(self, chunk: Chunk | Answer, sender: tensors.Sender) -> Answer | None:
        if isinstance(chunk, Answer):
            return chunk
        try:
            return self._postprocessor.handle(chunk, sender.is_cancelled)
        except Exception as error:
            return _refusal(error)

    def _reply(self, sender: tensors.Sender, answer: Answer | None) -> None:
        if answer is None:
            sender.end()
        elif answer.error is not None:
            sender.send_error(answer.error)
        else:
            sender.send(answer.outputs, self._answer, final=True)

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


def _read(request: Any) -> Chunk | Answer:
    """The chunk, or the refusal of one."""
    try:
        inputs = tensors.read_inputs(request, CHUNK)
        if "request_key" not in inputs:
            raise ValueError("request_key is required")
        return Chunk(**{"index": 0, "token_ids": [], **inputs})
    except Exception as error:
        return _refusal(error)


def _refusal(error: Exception) -> Answer:
    """A ValueError's message is for the client."""
    if isinstance(error, ValueError):
        return Answer(error=str(error))
    logger.error("postprocessing failed", exc_info=error)
    return Answer(error=INTERNAL_ERROR)
