"""Imports of large libraries: without log lines that nobody who serves a model can act on, and, in
an engine's process, without what serving does not need.

Called by the code that owns the process: the server's model, the commands, the benchmarks, the fork
server. An import of the package never calls it, because a program that uses Jitney as a library
decides on its own log.
"""

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import metadata

# transformers imports torchao where that is installed. torchao logs that its extensions were built
# for another torch, torch.utils._pytree how torchao registers some of its classes.
_LOGGERS = ("torchao", "torch.utils._pytree")

# transformers imports these where they are installed: for losses, for saving, for images.
_SPARED = ("scipy", "sklearn", "torchao", "PIL", "torchvision")
_SPARED_WITHOUT_GPU = (*_SPARED, "accelerate", "triton")


def quiet_imports() -> None:
    """Let these loggers pass errors only. To be called before transformers is imported."""
    for name in _LOGGERS:
        logging.getLogger(name).setLevel(logging.ERROR)


@contextmanager
def lean_imports() -> Iterator[None]:
    """Inside this context, hide the libraries that transformers can do without. That saves a
    quarter of the imports' time. Afterwards the libraries can be imported again, but transformers,
    which has looked for them once, goes on without them."""
    for_cpu = metadata.version("torch").endswith("+cpu")
    spared = _SPARED_WITHOUT_GPU if for_cpu else _SPARED
    hidden = [name for name in spared if name not in sys.modules]
    for name in hidden:
        # To Python, None says that there is no such module.
        sys.modules[name] = None  # type: ignore[assignment]
    try:
        yield
    finally:
        for name in hidden:
            del sys.modules[name]
