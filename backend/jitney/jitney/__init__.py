"""Jitney: in-flight batching over a paged KV cache, as a backend of Triton Inference Server.

Importing the package does nothing; ``LLM`` and ``SamplingParams`` are resolved on first use.

The files of this folder, in the order in which they are read:

- ``errors``: every error, and its code for clients.
- ``config``, ``read_config``, ``field_types``: the engine's options, how they are read and checked,
  and what a field may hold, in words.
- ``sampling_params``: what a client may ask of one request.
- ``messages``, ``batch``: what front and engine send each other; one step, as scheduler and runner
  hand it over.
- ``named_tokens``, ``token_counts``, ``rank``: of a request, the tokens that its parameters name,
  how often tokens occur in its sequences, and its place in the order of those that wait.
- ``llm``, ``open_requests``: the engine without a server, and the requests that it has open.
- ``progress``, ``generate``, ``cli``: the progress bar, ``jitney generate``, and the ``jitney``
  command.
- ``access``: TLS and API keys for a client of a server. ``addresses``: where a server listens.
  ``cgroups``: the limits of a container. ``tracing``: spans of requests.
- ``server_log``, ``server_watch``, ``stop_signals``, ``stub_memory``: what a model needs of its
  server: where log records go, the server's end, how a stop is announced, and whether the shared
  memory has room.

After ``batch`` come the rooms: ``core``, ``engine``, ``text``, ``execution``, ``frontend``. Each
begins with the docstring of its own ``__init__``. docs/architecture.md follows a request through
them.
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
