"""preprocessing: chat template, tokenization, validation. The code is in pagestream.serving."""

from pagestream.serving.models import PreprocessingModel as TritonPythonModel

__all__ = ["TritonPythonModel"]
