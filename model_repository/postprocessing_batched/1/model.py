"""postprocessing_batched: streams text for `ensemble`. The code is in pagestream.serving."""

from pagestream.serving.postprocessing_model import PostprocessingModel as TritonPythonModel

__all__ = ["TritonPythonModel"]
