"""Jitney: in-flight batching over a paged KV cache, as a backend of Triton Inference Server.

Importing the package does nothing; ``LLM`` and ``SamplingParams`` are resolved on first use.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jitney.llm import LLM as LLM
    from jitney.sampling_params import SamplingParams as SamplingParams

__version__ = "0.1.0"
__all__ = ["LLM", "SamplingParams", "__version__"]


def __getattr__(name: str) -> Any:
    homes = {"LLM": "jitney.llm", "SamplingParams": "jitney.sampling_params"}
    if name in homes:
        return getattr(importlib.import_module(homes[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
