"""The stubs of a server: the processes that it runs the models of its Python backend in.

``stopping`` sends them signals; ``supervision`` and ``starting_stubs`` look whether they live.
"""

from pathlib import Path

import psutil

_STUB = "triton_python_backend_stub"


def model_processes(server_pid: int | None) -> list[psutil.Process]:
    """The processes of a server's models. There are none if the server has ended."""
    if server_pid is None:
        return []
    try:
        return psutil.Process(server_pid).children()
    except psutil.NoSuchProcess:
        return []


def model_of(process: psutil.Process) -> str | None:
    """The model whose process this is. None: it is no model's process, or it has ended."""
    # A zombie has no command line, and neither has a process that is about to become one.
    try:
        words = process.cmdline()
    except psutil.NoSuchProcess:
        return None
    if len(words) < 2 or _STUB not in words[0]:
        return None
    # The first argument of a stub is a file of a version: …/MODEL/1/model.py.
    return Path(words[1]).parents[1].name
