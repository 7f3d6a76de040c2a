"""Compiles the attention kernel in a process of its own, while its parent imports transformers.

It takes as long as all other kernels together. The fork server (``engine.process``) calls
:func:`compile_ahead` before its long imports, and an engine that is forked from it waits in
:func:`wait_for_compiler` when it needs the kernel, which is in Numba's cache then.
"""

import ctypes
import os
import signal
from contextlib import suppress

import torch

DTYPE = torch.bfloat16
"""Of the cache and the model whose kernel is compiled: what ``dtype: auto`` chooses for most."""

_PR_SET_PDEATHSIG = 1
_MOST_DESCRIPTORS = 1 << 16
_ending: int | None = None
"""Readable once the process has ended: it alone holds the other end of the pipe."""


def compile_ahead() -> None:
    """Fork a process that compiles the kernel, or finds in a moment that it is in the cache.

    To be called where there is one thread alone. Whoever calls it has to reap a child. Does nothing
    without Numba, or where torch was built for a GPU.
    """
    global _ending
    if torch.backends.cuda.is_built():
        return
    with suppress(ImportError):
        from jitney.kernels.cpu.attention_kernel import attention_kernels

        ours, theirs = os.pipe()
        if os.fork() == 0:
            try:
                # Whoever waits for the end of one of the parent's sockets must not wait for us.
                os.closerange(3, theirs)
                os.closerange(theirs + 1, _MOST_DESCRIPTORS)
                # We end when the parent does.
                ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
                attention_kernels(DTYPE, DTYPE)
            finally:
                os._exit(0)  # what failed here fails again, and is told, where it is needed
        os.close(theirs)
        _ending = ours


def wait_for_compiler() -> None:
    """Return once the process has ended, if one was forked."""
    global _ending
    if _ending is not None:
        os.read(_ending, 1)
        os.close(_ending)
        _ending = None
