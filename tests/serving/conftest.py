"""A stand-in for the module that exists only inside tritonserver's python backend."""

import sys
import types

import numpy as np
import pytest


class Tensor:
    def __init__(self, name, array):
        self._name, self._array = name, array

    def name(self):
        return self._name

    def as_numpy(self):
        return self._array


class TritonError:
    INVALID_ARG = 3

    def __init__(self, message, code=None):
        self._message = message

    def message(self):
        return self._message


class InferenceResponse:
    def __init__(self, output_tensors=(), error=None):
        self.tensors = {tensor.name(): tensor.as_numpy() for tensor in output_tensors}
        self.error = error


class Request:
    """An incoming request with the given tensors."""

    def __init__(self, tensors, parameters="{}"):
        self.tensors = {name: Tensor(name, array) for name, array in tensors.items()}
        self._parameters = parameters

    def inputs(self):
        return list(self.tensors.values())

    def parameters(self):
        return self._parameters


def _module():
    module = types.ModuleType("triton_python_backend_utils")
    module.TRITONSERVER_RESPONSE_COMPLETE_FINAL = 1
    module.Tensor = Tensor
    module.TritonError = TritonError
    module.InferenceResponse = InferenceResponse
    return module


sys.modules.setdefault("triton_python_backend_utils", _module())


@pytest.fixture
def make_request():
    return Request


@pytest.fixture
def strings():
    return lambda *texts: np.array([text.encode() for text in texts], dtype=object)
