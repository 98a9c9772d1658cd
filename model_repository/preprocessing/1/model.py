"""preprocessing: chat template, tokenization, validation. The code is in pagestream.serving."""

from pagestream.serving.preprocessing_model import PreprocessingModel as TritonPythonModel

__all__ = ["TritonPythonModel"]
