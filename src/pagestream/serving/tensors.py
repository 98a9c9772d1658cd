"""The passage between pb_utils tensors and Python values.

The only file that knows how values lie in tensors; their names and types are tensor_specs.py's.
Used by the three models' bodies.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils

from pagestream.serving.tensor_specs import Spec

FINAL: int = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL


_NUMPY = {
    "INT32": np.int32,
    "INT64": np.int64,
    "UINT32": np.uint32,
    "UINT64": np.uint64,
    "FP16": np.float16,
    "FP32": np.float32,
    "BOOL": np.bool_,
    "STRING": np.object_,
}


def read_inputs(request: Any, specs: dict[str, Spec]) -> dict[str, Any]:
    """The inputs that were sent, as Python values. ValueError names the field that is wrong."""
    values = {}
    for tensor in request.inputs():  # few are sent of the many that there are
        name = tensor.name()
        if name in specs:
            values[name] = _read(name, tensor.as_numpy(), specs[name])
    return values


def write_outputs(values: dict[str, Any], specs: dict[str, Spec]) -> Any:
    """An InferenceResponse with one tensor per value that is not None."""
    return pb_utils.InferenceResponse(
        [_write(name, value, specs[name]) for name, value in values.items() if value is not None]
    )


def write_inputs(values: dict[str, Any], specs: dict[str, Spec]) -> list[Any]:
    return [_write(name, value, specs[name]) for name, value in values.items()]


def error_response(request_id: str, message: str) -> Any:
    """Names the request by the id its client gave it, as tritonserver does in its own errors:
    several requests share a stream, and a stream's errors carry nothing but their text."""
    if request_id:
        message = f"[request id: {request_id:.80}] {message}"
    error = pb_utils.TritonError(message, pb_utils.TritonError.INVALID_ARG)
    return pb_utils.InferenceResponse(error=error)


class Sender:
    """The way back to whoever sent a request to a decoupled model."""

    def __init__(self, request: Any) -> None:
        self._response_sender = request.get_response_sender()
        self._request_id = request.request_id()

    def send(self, values: dict[str, Any], specs: dict[str, Spec], *, final: bool) -> None:
        self._response_sender.send(write_outputs(values, specs), flags=FINAL if final else 0)

    def send_error(self, message: str) -> None:
        self._response_sender.send(error_response(self._request_id, message), flags=FINAL)

    def end(self) -> None:
        """The last flag, without a response."""
        self._response_sender.send(flags=FINAL)

    def is_cancelled(self) -> bool:
        return bool(self._response_sender.is_cancelled())


def _read(name: str, array: np.ndarray[Any, Any], spec: Spec) -> Any:
    flat = array.reshape(-1).tolist()
    if spec.datatype == "STRING":
        flat = [_text(name, item) for item in flat]
    if spec.many:
        return flat
    if len(flat) != 1:
        raise ValueError(f"{name} must hold one value, got {len(flat)}")
    return flat[0]


def _text(name: str, item: Any) -> str:
    try:
        return item.decode("utf-8") if isinstance(item, bytes) else str(item)
    except UnicodeDecodeError as error:
        raise ValueError(f"{name} is not valid UTF-8 at byte {error.start}") from None


def forget_constants() -> None:
    """To be called before the process ends: kept tensors live in memory that it shares."""
    _constant.cache_clear()


def _write(name: str, value: Any, spec: Spec) -> Any:
    items = value if spec.many else [value]
    if len(items) == 1 and (type(items[0]) is int or items[0] == ""):
        return _constant(name, items[0], spec)
    return _tensor(name, items, spec)


@lru_cache(maxsize=512)
def _constant(name: str, item: int | str, spec: Spec) -> Any:
    """Most tensors of most responses are the same few, and making one takes microseconds."""
    return _tensor(name, [item], spec)


def _tensor(name: str, items: list[Any], spec: Spec) -> Any:
    if spec.datatype == "STRING":
        # Lone surrogates cannot be encoded, and a client must never get invalid UTF-8.
        items = [item.encode("utf-8", errors="replace") for item in items]
    array = np.array(items, dtype=_NUMPY[spec.datatype])
    if array.size == 0:
        array = array.reshape([0] * len(spec.dims))
    return pb_utils.Tensor(name, array)
