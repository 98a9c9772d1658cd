"""native.cpp, compiled for this machine once, and its functions on tensors.

The library is kept in the user's cache under a name made from its source, the compiler and the
CPU's abilities, so that it is never run on a CPU that lacks what it was compiled for. Where there
is no compiler, ``LIBRARY`` is None and torch's ops do the work. ``PAGESTREAM_NATIVE=0`` does the
same. All tensors here are contiguous float32 on the CPU unless said otherwise; callers check.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
from pathlib import Path

import torch

logger = logging.getLogger(__name__)

GROUP = 32
"""Weights of one output that share a scale and a minimum."""
TILE = 32
"""Outputs that are packed together."""
_SOURCE = Path(__file__).with_name("native.cpp")
# Threads come from torch's own OpenMP library: hence no linking against one.
_COMPILE = ("-std=c++17", "-O3", "-march=native", "-fopenmp", "-fPIC", "-c")
_MATH = ("-fno-math-errno", "-fno-trapping-math")


def _build() -> Path | None:
    """The compiled library's file; compiles it if that was not done. None without a compiler."""
    compiler = shutil.which(os.environ.get("CXX", "c++")) or shutil.which("g++")
    if compiler is None:
        logger.info("no C++ compiler: CPU ops are torch's alone")
        return None
    version = subprocess.check_output([compiler, "--version"])
    made_of = _SOURCE.read_bytes() + version + _abilities() + " ".join(_COMPILE + _MATH).encode()
    name = f"{hashlib.sha256(made_of).hexdigest()[:24]}.so"
    base = os.environ.get("XDG_CACHE_HOME", "")
    root = Path(base) if base and Path(base).is_absolute() else Path.home() / ".cache"
    file = root / "pagestream" / "native" / name
    if not file.is_file():
        file.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=file.parent) as scratch:
            compiled, linked = Path(scratch) / "native.o", Path(scratch) / name
            for command in (
                [compiler, *_COMPILE, *_MATH, str(_SOURCE), "-o", str(compiled)],
                [compiler, "-shared", str(compiled), "-o", str(linked)],
            ):
                subprocess.run(command, check=True, capture_output=True, text=True)
            linked.replace(file)  # whole or not at all: several processes may be at it
    return file


def _abilities() -> bytes:
    """What -march=native depends on."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor().encode()
    return next((line for line in lines if line.startswith(("flags", "Features"))), "").encode()


def _load() -> ctypes.CDLL | None:
    if os.environ.get("PAGESTREAM_NATIVE") == "0":
        return None
    try:
        file = _build()
        library = None if file is None else ctypes.CDLL(str(file))
    except subprocess.CalledProcessError as error:
        logger.warning("native.cpp does not compile here, torch's ops are used: %s", error.stderr)
        return None
    except OSError as error:
        logger.warning("the CPU library cannot be used, torch's ops are: %s", error)
        return None
    if library is not None:
        _declare(library)
    return library


def _declare(library: ctypes.CDLL) -> None:
    pointer, integer, real = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float
    library.pagestream_int8_linear.argtypes = [*[pointer] * 3, *[integer] * 3]
    library.pagestream_decode_attention.argtypes = [*[pointer] * 7, *[integer] * 8, real]
    library.pagestream_add_rms_norm.argtypes = [*[pointer] * 4, *[integer] * 2, real]
    library.pagestream_silu_and_mul.argtypes = [*[pointer] * 2, *[integer] * 2]
    library.pagestream_rope_kv_write.argtypes = [pointer, integer, *[pointer] * 6, *[integer] * 4]


LIBRARY = _load()
HAS_INT8 = LIBRARY is not None and bool(LIBRARY.pagestream_has_int8())
"""Whether the CPU multiplies bytes (AVX512-VNNI)."""


def takes(*tensors: torch.Tensor) -> bool:
    """Whether the library can work on these."""
    return LIBRARY is not None and all(
        tensor.dtype is torch.float32 and tensor.is_contiguous() for tensor in tensors
    )


def int8_linear(x: torch.Tensor, packed: torch.Tensor) -> torch.Tensor:
    """[m, k] by packed uint8 [n / TILE, k / GROUP, tile bytes] -> [m, n]."""
    assert LIBRARY is not None
    out = x.new_empty((len(x), len(packed) * TILE))
    LIBRARY.pagestream_int8_linear(
        x.data_ptr(), packed.data_ptr(), out.data_ptr(), len(x), out.shape[1], x.shape[1]
    )
    return out


def decode_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    out: torch.Tensor,
    rows: torch.Tensor,
    seq_lens: torch.Tensor,
    block_tables: torch.Tensor,
    scale: float,
) -> None:
    """Attention of one query token per request, into ``out`` at its row.

    q, out: [num_tokens, num_heads, head_dim]; caches as ``paged_attention``; rows: int64 [n], of q;
    seq_lens: int64 [n]; block_tables: int32 [n, width].
    """
    assert LIBRARY is not None
    _, block_size, kv_heads, head_dim = k_cache.shape
    LIBRARY.pagestream_decode_attention(
        *(tensor.data_ptr() for tensor in (q, k_cache, v_cache, out, rows, seq_lens, block_tables)),
        *(len(rows), block_tables.stride(0), block_size, kv_heads),
        *(q.shape[1] // kv_heads, head_dim, q.stride(0), k_cache.stride(0)),
        scale,
    )


def add_rms_norm(
    x: torch.Tensor | None, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> torch.Tensor:
    """``residual += x`` in place, if x is given, and the norm of it: [..., hidden]."""
    assert LIBRARY is not None
    out = torch.empty_like(residual)
    hidden = residual.shape[-1]
    LIBRARY.pagestream_add_rms_norm(
        None if x is None else x.data_ptr(),
        *(residual.data_ptr(), weight.data_ptr(), out.data_ptr()),
        *(residual.numel() // hidden, hidden, eps),
    )
    return out


def silu_and_mul(gate_up: torch.Tensor) -> torch.Tensor:
    assert LIBRARY is not None
    inner = gate_up.shape[-1] // 2
    out = gate_up.new_empty((*gate_up.shape[:-1], inner))
    LIBRARY.pagestream_silu_and_mul(gate_up.data_ptr(), out.data_ptr(), out.numel() // inner, inner)
    return out


def rope_kv_write(
    heads: torch.Tensor,
    rope: torch.Tensor,
    positions: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    num_heads: int,
) -> torch.Tensor:
    """heads: [num_tokens, num_heads + 2 * num_kv_heads, head_dim], q then k then v; its tokens may
    lie apart. Otherwise as the public op; returns q, rotated."""
    assert LIBRARY is not None
    num_tokens, _, head_dim = heads.shape
    out = heads.new_empty((num_tokens, num_heads, head_dim))
    LIBRARY.pagestream_rope_kv_write(
        *(heads.data_ptr(), heads.stride(0), rope.data_ptr(), positions.data_ptr()),
        *(slot_mapping.data_ptr(), out.data_ptr(), k_cache.data_ptr(), v_cache.data_ptr()),
        *(num_tokens, num_heads, k_cache.shape[2], head_dim),
    )
    return out
