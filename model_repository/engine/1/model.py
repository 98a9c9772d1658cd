"""engine: the LLM engine behind a decoupled model. The code is in pagestream.serving."""

from pagestream.serving.engine_model import EngineModel as TritonPythonModel

__all__ = ["TritonPythonModel"]
