"""Makes Triton's interpreter compute bfloat16 by value, rounded as a GPU does.

Triton 3.6 to 3.9 keep bfloat16 as uint16 there and multiply, add and compare the raw bits, and
truncate when they convert from float32. Imported by conftest before any kernel runs.
"""

from __future__ import annotations

import numpy as np
import triton.language as tl
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

_create_dot = InterpreterBuilder.create_dot
_binary_op = InterpreterBuilder.binary_op
_unary_op = InterpreterBuilder.unary_op
_cast_impl = InterpreterBuilder.cast_impl
_CASTS = (
    "create_si_to_fp",
    "create_ui_to_fp",
    "create_fp_to_si",
    "create_fp_to_ui",
    "create_fp_ext",
    "create_fp_trunc",
)


def install() -> None:
    InterpreterBuilder.create_dot = _dot
    InterpreterBuilder.binary_op = _binary
    InterpreterBuilder.unary_op = _unary
    for name in ("cast_impl", *_CASTS):
        setattr(InterpreterBuilder, name, _cast)


def _values(bits):
    return (bits.astype(np.uint32) << 16).view(np.float32)


def _bits(values):
    """To nearest, ties to even."""
    raw = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
    rounded = (raw + 0x7FFF + ((raw >> 16) & 1)) >> 16
    return np.where(np.isnan(values), 0x7FC0, rounded).astype(np.uint16)


def _is_bf16(handle) -> bool:
    return isinstance(handle, TensorHandle) and handle.dtype.scalar == tl.bfloat16


def _dot(self, a, b, acc, *rest):
    a, b = (
        TensorHandle(_values(handle.data), tl.float32) if _is_bf16(handle) else handle
        for handle in (a, b)
    )
    return _create_dot(self, a, b, acc, *rest)


def _binary(self, a, b, op):
    if not _is_bf16(a):
        return _binary_op(self, a, b, op)
    result = op(_values(a.data), _values(b.data))
    if result.dtype == bool:
        return TensorHandle(result, tl.int1)
    return TensorHandle(_bits(result), a.dtype.scalar)


def _unary(self, a, op):
    if not _is_bf16(a):
        return _unary_op(self, a, op)
    return TensorHandle(_bits(op(_values(a.data))), a.dtype.scalar)


def _cast(self, source, target):
    if source.dtype.scalar == tl.float32 and target.scalar == tl.bfloat16:
        return TensorHandle(_bits(source.data), target.scalar)
    return _cast_impl(self, source, target)
