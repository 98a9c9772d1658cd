"""pagestream: an LLM inference engine that lives in a tritonserver model repository.

This is the public surface; everything else is internal. What needs torch is loaded on first
use, so that the processes around the engine do not pay for torch.
"""

import importlib
from typing import TYPE_CHECKING, Any

from pagestream.config import EngineConfig
from pagestream.request import FinishReason
from pagestream.sampling_params import SamplingParams
from pagestream.text.chat import ChatOptions

if TYPE_CHECKING:
    from pagestream.engine.async_llm import AsyncLLM
    from pagestream.engine.completion import Completion, Delta
    from pagestream.engine.llm import LLM

__all__ = [
    "LLM",
    "AsyncLLM",
    "ChatOptions",
    "Completion",
    "Delta",
    "EngineConfig",
    "FinishReason",
    "SamplingParams",
]

_DEFERRED = {
    "LLM": "pagestream.engine.llm",
    "AsyncLLM": "pagestream.engine.async_llm",
    "Completion": "pagestream.engine.completion",
    "Delta": "pagestream.engine.completion",
}


def __getattr__(name: str) -> Any:
    if name in _DEFERRED:
        return getattr(importlib.import_module(_DEFERRED[name]), name)
    raise AttributeError(f"module 'pagestream' has no attribute {name!r}")
