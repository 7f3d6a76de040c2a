"""How the language models of a repository would keep their past, found without their weights::

    python -m jitney_server.model_caches REPOSITORY

prints one line of JSON for each model of the backend ``jitney``. ``doctor`` runs it in a process of
its own, because it imports torch and runs code of checkpoints' types.
"""

import re
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path

import msgspec
from jitney.errors import JitneyError

from jitney_server.repository import model_names

_COMMENT = re.compile(r"^\s*#.*$", re.MULTILINE)
_BACKEND = re.compile(r"""\bbackend\s*:\s*["']jitney["']""")
_PARAMETER = re.compile(
    r"""key\s*:\s*["']([a-z_]+)["'],?\s*value\s*:?\s*\{\s*string_value\s*:\s*["']([^"']*)["']"""
)
"""An option among the parameters of a configuration; the server's own have names in capitals."""


class ModelCache(msgspec.Struct):
    """What was found of one model."""

    name: str
    kind: str = ""
    """``ModelInfo.cache``; empty if the model would not load."""
    problem: str = ""
    """Why it would not load."""


def find_caches(repository: Path) -> Iterator[ModelCache]:
    """Of each model of the backend ``jitney``, in its newest version."""
    for name in model_names(repository):
        text = _configuration(repository / name)
        if text is None or _BACKEND.search(text) is None:
            continue
        versions = [path.name for path in (repository / name).iterdir() if path.name.isdecimal()]
        newest = max(versions, key=int, default="1")
        options = repository / name / newest / "model.json"
        yield _find_cache(name, options, dict(_PARAMETER.findall(text)))


def _configuration(folder: Path) -> str | None:
    """The text of ``config.pbtxt`` without comments; None if there is none."""
    try:
        text = (folder / "config.pbtxt").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    return _COMMENT.sub("", text)


def _find_cache(name: str, options: Path, parameters: dict[str, str]) -> ModelCache:
    from jitney.engine.assemble import weigh_here  # imports torch
    from jitney.read_config import load_config

    try:
        footprint = weigh_here(load_config(options, parameters))
    except (JitneyError, MemoryError) as error:
        return ModelCache(name, problem=str(error))
    return ModelCache(name, kind=footprint.cache)


def main() -> None:
    warnings.filterwarnings("ignore")
    for found in find_caches(Path(sys.argv[1])):
        print(msgspec.json.encode(found).decode(), flush=True)


if __name__ == "__main__":
    main()
