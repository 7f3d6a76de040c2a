"""The environment and the interpreter of the Python processes that an engine's front starts."""

import os
import shutil
import sys
from pathlib import Path

from jitney.errors import LoadError


def child_environment() -> dict[str, str]:
    """This process's environment, with the folders that it imports from as PYTHONPATH."""
    folders = [path for path in sys.path if path]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(folders)}


def python_executable() -> str:
    """The interpreter of this environment. It need not be ``sys.executable``, because the server's
    stub embeds Python. Raises a LoadError."""
    for path in (Path(sys.prefix, "bin", "python3"), Path(sys.executable)):
        if path.name.startswith("python") and path.is_file():
            return str(path)
    found = shutil.which("python3")
    if found is None:
        raise LoadError("no Python interpreter was found to run the engine with")
    return found
