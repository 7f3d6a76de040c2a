"""Paths that the server's stubs can be started with.

The server hands the command of a stub to a shell without quotes, and the stub reads it as ASCII. So
a folder whose path has a space or a letter like ü is replaced by a link to it, which lies in a
folder with a plain path. For the folder of one model that does not help: the server knows the model
by the folder's name, so the link would need the same name. Called by ``server``.
"""

import re
import tempfile
from collections.abc import Iterable
from pathlib import Path

from jitney.errors import InstallationError

_PLAIN = re.compile(r"[\w./+,:@%=-]+", re.ASCII)
_BACKEND = re.compile(r"""\b(?:backend|platform)\s*:\s*["']([^"']*)""")
_COMMENT = re.compile(r"^\s*#.*$", re.MULTILINE)
_BACKENDS_OF_STUBS = (
    "jitney",
    "onnxruntime",
    "onnxruntime_onnx",
    "python",
    "tensorrt",
    "tensorrt_plan",
    "vllm",
)
"""Backends that are written in Python, and the platforms whose models they serve."""
_FILES_OF_STUBS = ("model.py", "model.onnx", "model.plan")
_TEMPORARY_FOLDERS = ("/tmp", "/var/tmp", "/dev/shm")
"""If the path of the folder for temporary files (``TMPDIR``) is not plain, the first of these in
which a folder can be made takes its place."""


def is_plain(path: Path | str) -> bool:
    """Whether a stub's command line may hold this path as it is."""
    return _PLAIN.fullmatch(str(path)) is not None


def make_runtime_folder(prefix: str) -> Path:
    """A new folder for temporary files with a plain path. Raises InstallationError if there is no
    place for one."""
    parents = runtime_parents()
    for folder in parents:
        try:
            return Path(tempfile.mkdtemp(prefix=prefix, dir=folder))
        except OSError:
            continue
    raise InstallationError(
        f"no folder can be made in {', '.join(parents)} (TMPDIR is {tempfile.gettempdir()!r}); set "
        f"TMPDIR to a folder whose path has only ASCII letters and no spaces: the server can start "
        f"its models' processes only from such a path"
    )


def runtime_parents() -> tuple[str, ...]:
    """The folders in one of which :func:`make_runtime_folder` makes its own."""
    usual = tempfile.gettempdir()
    return (usual,) if is_plain(usual) else _TEMPORARY_FOLDERS


def plain_path(folder: Path, link: Path) -> Path:
    """``folder`` if its path is plain; else ``link``, which is made and leads to it."""
    if is_plain(folder):
        return folder
    link.symlink_to(folder)
    return link


def unservable_models(folders: Iterable[Path]) -> dict[str, str]:
    """Name -> the reason, for each of these models that cannot be served: the name of its folder is
    not plain. A model that needs no stub may have any name."""
    found = {}
    for folder in folders:
        if not is_plain(folder.name) and _has_stub(folder):
            found[folder.name] = (
                f"model {folder.name!r} cannot be served: the name of its folder may have ASCII "
                f"letters, digits and any of . _ + , : @ % = - only"
            )
    return found


def _has_stub(folder: Path) -> bool:
    """Whether the server starts a stub for this model, as far as its configuration tells."""
    try:
        config = (folder / "config.pbtxt").read_text(encoding="utf-8", errors="replace")
    except OSError:
        # Without a configuration, the server finds the backend by the name of the model's file.
        return any(any(folder.glob(f"*/{name}")) for name in _FILES_OF_STUBS)
    named = _BACKEND.search(_COMMENT.sub("", config))
    # A configuration that names no backend is taken for one of a stub: that refuses too many names
    # rather than too few.
    return named is None or named[1] in _BACKENDS_OF_STUBS
