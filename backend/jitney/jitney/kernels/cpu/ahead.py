"""Compiles the attention kernel in a process of its own, while its parent imports transformers.

Of all kernels that one takes the longest to compile. The fork server
(``engine.process``) calls :func:`compile_ahead` before its long imports. An engine that is forked
from it calls :func:`wait_for_compiler` when it needs the kernel, and then loads it from
``code_cache``.
"""

import ctypes
import os
import signal
from contextlib import suppress
from typing import NoReturn

import torch

DTYPE = torch.bfloat16
"""The kernel is compiled for a model, and its cache, of this dtype: the one that ``dtype: auto``
chooses for most models."""

_PR_SET_PDEATHSIG = 1
"""Linux, prctl: the signal that a process gets when its parent ends."""
_MOST_DESCRIPTORS = 1 << 16
_end_of_compiler: int | None = None
"""The reading end of a pipe whose other end the compiling process alone holds, and never writes to.
So a read returns when that process has ended. None: nothing was forked."""


def compile_ahead() -> None:
    """Fork a process that compiles the kernel. If the kernel is in the cache, the process ends at
    once.

    The caller must have a single thread, and must wait for a child that has ended (``os.wait``).
    Does nothing without Numba, or where torch was built for a GPU.
    """
    global _end_of_compiler
    if torch.backends.cuda.is_built():
        return
    with suppress(ImportError):
        # Imported before the fork: the fork server and its engines need this module, too.
        from jitney.kernels.cpu import attention_kernel  # noqa: F401

        reading_end, writing_end = os.pipe()
        if os.fork() == 0:
            _compile_and_exit(writing_end)
        os.close(writing_end)
        _end_of_compiler = reading_end


def _compile_and_exit(writing_end: int) -> NoReturn:
    """What the forked process does. It keeps ``writing_end`` open until it ends."""
    try:
        from jitney.kernels.cpu.attention_kernel import attention_kernels

        # Others wait for the end of the parent's sockets: a copy that stays open here would keep
        # them waiting.
        os.closerange(3, writing_end)
        os.closerange(writing_end + 1, _MOST_DESCRIPTORS)
        # This process ends when its parent does.
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        attention_kernels(DTYPE, DTYPE)
    finally:
        # Also after an exception, which nobody here could report: an engine that needs the kernel
        # compiles it itself, and reports what fails then.
        os._exit(0)


def wait_for_compiler() -> None:
    """Return once the process has ended, if one was forked."""
    global _end_of_compiler
    if _end_of_compiler is not None:
        os.read(_end_of_compiler, 1)
        os.close(_end_of_compiler)
        _end_of_compiler = None
