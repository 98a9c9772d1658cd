"""pagestream: an LLM inference engine that lives in a tritonserver model repository.

This is the public surface; everything else is internal. LLM and Completion are loaded on first
use, so that the processes around the engine do not pay for torch.
"""

from typing import TYPE_CHECKING, Any

from pagestream.config import EngineConfig
from pagestream.request import FinishReason
from pagestream.sampling_params import SamplingParams

if TYPE_CHECKING:
    from pagestream.engine.completion import Completion
    from pagestream.engine.llm import LLM

__all__ = ["LLM", "Completion", "EngineConfig", "FinishReason", "SamplingParams"]


def __getattr__(name: str) -> Any:
    if name in {"LLM", "Completion"}:
        from pagestream.engine import completion, llm  # noqa: PLC0415 (deferred on purpose)

        return llm.LLM if name == "LLM" else completion.Completion
    raise AttributeError(f"module 'pagestream' has no attribute {name!r}")
