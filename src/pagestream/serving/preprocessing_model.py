"""PreprocessingModel: the body of `preprocessing`, between pb_utils and Preprocessor.

tritonserver makes one object per process and calls initialize, execute and finalize from its main
thread. Nothing that a client sent may raise out of ``execute``: the message would carry paths and a
traceback to the client. Named by the shim in model_repository.
"""

from __future__ import annotations

import json
import logging
from typing import Any

from pagestream.config import ModelConfig, resolve_max_model_len
from pagestream.model_store import resolve_model
from pagestream.serving import tensors
from pagestream.serving.model_config import INTERNAL_ERROR, load_config
from pagestream.serving.preprocessing import Preprocessor
from pagestream.serving.tensor_specs import PREPROCESSING_INPUTS, PREPROCESSING_OUTPUTS

logger = logging.getLogger(__name__)


class PreprocessingModel:
    def initialize(self, args: dict[str, str]) -> None:
        config = load_config(args)
        directory = resolve_model(config.model)
        max_model_len = resolve_max_model_len(config, ModelConfig.from_hf(directory))
        self._preprocessor = Preprocessor(directory, max_model_len, config.exclude_input_in_output)

    def execute(self, requests: list[Any]) -> list[Any]:
        return [self._respond(request) for request in requests]

    def finalize(self) -> None:
        tensors.forget_constants()

    def _respond(self, request: Any) -> Any:
        try:
            inputs = tensors.read_inputs(request, PREPROCESSING_INPUTS)
            parameters = json.loads(request.parameters() or "{}")
            prepared = self._preprocessor.prepare(inputs, parameters)
            return tensors.write_outputs(
                {name: getattr(prepared, name) for name in PREPROCESSING_OUTPUTS},
                PREPROCESSING_OUTPUTS,
            )
        except ValueError as error:
            return tensors.error_response(request.request_id(), str(error))
        except Exception:
            logger.exception("preprocessing failed")
            return tensors.error_response(request.request_id(), INTERNAL_ERROR)
