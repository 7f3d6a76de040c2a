"""Silence for what libraries log while they are imported and nobody who serves a model can change.

Called by whoever owns the process (the server's model, the commands, the benchmarks), never by the
package itself: a program that uses Jitney as a library decides on its own log.
"""

import logging

# torchao, which transformers imports where it is installed: extensions of its own that were built
# for another torch. torch: how torchao registers some classes of its own.
_LOGGERS = ("torchao", "torch.utils._pytree")


def quiet_imports() -> None:
    """Let these loggers pass errors only. To be called before transformers is imported."""
    for name in _LOGGERS:
        logging.getLogger(name).setLevel(logging.ERROR)
