"""Imports of large libraries, without what they log and nobody who serves a model can change; in
an engine's process also without what serving does not need.

Called by whoever owns the process (the server's model, the commands, the benchmarks), never by the
package itself: a program that uses Jitney as a library decides on its own log.
"""

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import metadata

# torchao, which transformers imports where it is installed: extensions of its own that were built
# for another torch. torch: how torchao registers some classes of its own.
_LOGGERS = ("torchao", "torch.utils._pytree")

# transformers imports these where they are installed: for losses, for saving, for images.
_SPARED = ("scipy", "sklearn", "torchao", "PIL", "torchvision")
_FOR_GPUS = ("accelerate", "triton")


def quiet_imports() -> None:
    """Let these loggers pass errors only. To be called before transformers is imported."""
    for name in _LOGGERS:
        logging.getLogger(name).setLevel(logging.ERROR)


@contextmanager
def lean_imports() -> Iterator[None]:
    """Hide from imports what transformers can do without: a quarter of what they take. Afterwards
    all can be imported, but transformers goes on without them."""
    names = _SPARED + _FOR_GPUS * metadata.version("torch").endswith("+cpu")
    hidden = dict.fromkeys(name for name in names if name not in sys.modules)
    sys.modules.update(hidden)  # type: ignore[arg-type]  # None: Python's word for an absent one
    try:
        yield
    finally:
        for name in hidden:
            del sys.modules[name]
