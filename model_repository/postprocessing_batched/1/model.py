"""postprocessing_batched: streams text for `ensemble`. The code is in pagestream.serving."""

from pagestream.serving.models import PostprocessingModel as TritonPythonModel

__all__ = ["TritonPythonModel"]
