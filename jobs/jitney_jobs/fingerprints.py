"""Fingerprints of what makes a job's rows beside its settings: the model's files, and the source of
map's function.

Half the rows of one model and half of another would be a job that lies. So the journal has the
fingerprints, and a later run with others is refused. What is not covered: what a model on a server
is, packages that are installed, files that map's function reads by itself, and a few changed bytes
in the midst of a large file.
"""

import ast
import hashlib
import importlib.util
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from jitney_jobs.job import Job

_WHOLE_BYTES = 32 << 20
"""A file of so many bytes is hashed as a whole: configurations, templates and tokenizers are."""
_SAMPLES = 128
_SAMPLE_BYTES = 32 << 10
"""Of a larger file, which has weights, the size and samples at even distances are hashed, its first
and its last bytes among them. Training changes every tensor that it trains at all: one sample of it
is enough."""
_NO_PART_OF_A_MODEL = (".md", ".lock", ".log", ".tmp", ".incomplete", ".pyc", ".png", ".jpg")
_MOST_SOURCES = 500
_INSTALLED = ("site-packages", "dist-packages")


def fingerprints_of(job: Job) -> dict[str, str]:
    """Name -> digest: ``model config.json``, ``map module.py``."""
    prints: dict[str, str] = {}
    for name, place in _places(job).items():
        for path in _files_of(place):
            shown = path.name if path == place else path.relative_to(place).as_posix()
            prints[f"{name} {shown}"] = _digest(path)
    if job.task == "map" and job.map is not None:
        for shown, path in _sources_of(job.map).items():
            prints[f"map {shown}"] = _digest(path)
    return prints


def print_differences(before: dict[str, str], now: dict[str, str]) -> list[str]:
    """What differs, with what to do about it. Empty if nothing does."""
    changes = [f"{name} is gone" for name in before if name not in now]
    changes += [f"{name} is new" for name in now if name not in before]
    changes += [
        f"{name} has changed" for name in before if name in now and before[name] != now[name]
    ]
    if not changes:
        return []
    changes[0] = (
        "its rows are of another model or function (put it back, or go on with accept_changes): "
        f"{changes[0]}"
    )
    return changes


def _places(job: Job) -> dict[str, Path]:
    """Files and folders that the output depends on."""
    places: dict[str, Path] = {}
    if job.model is not None and job.server is None and job.task != "map":
        model = Path(job.model)
        places["model"] = model if model.exists() else _in_hub(job.model)
        beside = model.with_name(f"{model.name}_tokenizer")
        if job.task != "generate" and job.tokenizer is None:
            places[beside.name] = beside
    if job.tokenizer is not None:
        places["tokenizer"] = Path(job.tokenizer)
    if isinstance(job.engine.get("adapters"), str):
        places["adapters"] = Path(job.engine["adapters"])
    return places


def _in_hub(model: str) -> Path:
    """The folder of a model in the local hub cache. If it is not there, loading it says so."""
    import huggingface_hub
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        return Path(huggingface_hub.snapshot_download(model, local_files_only=True))
    except (HFValidationError, LocalEntryNotFoundError):
        return Path(model)


def _files_of(place: Path) -> Iterator[Path]:
    """The file, or those of the folder that a model may be read from, sorted."""
    if place.is_file():
        yield place
        return
    seen: set[str] = set()  # a link may lead back to a folder above it
    for folder, folders, names in os.walk(place, followlinks=True):
        real = os.path.realpath(folder)
        if real in seen:
            folders.clear()
            continue
        seen.add(real)
        folders[:] = sorted(name for name in folders if name[0] not in "._")
        for name in sorted(names):
            if name[0] not in "._" and not name.lower().endswith(_NO_PART_OF_A_MODEL):
                yield Path(folder, name)


def _digest(path: Path) -> str:
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            if size <= _WHOLE_BYTES:
                return f"{size} {hashlib.file_digest(file, 'sha256').hexdigest()[:32]}"
            return f"{size} sampled {_digest_of_samples(file, size)}"
    except OSError:
        return "cannot be read"  # who loads it says so


def _digest_of_samples(file: BinaryIO, size: int) -> str:
    digest = hashlib.sha256()
    last = size - _SAMPLE_BYTES
    for number in range(_SAMPLES):
        file.seek(last * number // (_SAMPLES - 1))
        digest.update(file.read(_SAMPLE_BYTES))
    return digest.hexdigest()[:32]


# ------------------------------------------------------------------ map's code


def _sources_of(function: str) -> dict[str, Path]:
    """The source of a function's module, ``MODULE:FUNCTION``, and of what it imports from beside
    it: of its own package, and of modules in the same folder. Shown name -> file. Nothing is
    imported. Empty if the module is not found: making the task says so."""
    module = function.partition(":")[0]
    top = module.partition(".")[0]
    root = _folder_of(top)
    if root is None:
        return {}
    # Among installed packages the neighbours are not of the user.
    is_installed = any(part in _INSTALLED for part in root.parts)
    sources: dict[str, Path] = {}
    left = [module]
    seen: set[str] = set()
    while left and len(sources) < _MOST_SOURCES:
        name = left.pop()
        if name in seen or (is_installed and name.partition(".")[0] != top):
            continue
        seen.add(name)
        path = _source_of(root, name)
        if path is None:
            continue
        sources[path.relative_to(root).as_posix()] = path
        left += _imports_of(path, name)
    return dict(sorted(sources.items()))


def _folder_of(top: str) -> Path | None:
    """The folder that a package or module without dots is in."""
    for entry in sys.path:
        folder = Path(entry or os.curdir).absolute()
        if (folder / top).is_dir() or (folder / f"{top}.py").is_file():
            return folder
    try:
        spec = importlib.util.find_spec(top)
    except (ImportError, ValueError):
        return None
    if spec is None or spec.origin is None:
        return None
    path = Path(spec.origin)
    return path.parent.parent if path.name == "__init__.py" else path.parent


def _source_of(root: Path, module: str) -> Path | None:
    path = root.joinpath(*module.split("."))
    for candidate in (path / "__init__.py", path.parent / f"{path.name}.py"):
        if candidate.is_file():
            return candidate
    return None


def _imports_of(path: Path, module: str) -> list[str]:
    """The modules that a module's source names in imports, and the packages that they are in. It
    may be that some of the names are no modules."""
    try:
        tree = ast.parse(path.read_bytes())
    except (SyntaxError, ValueError):
        return []  # importing it says so
    package = module.split(".") if path.name == "__init__.py" else module.split(".")[:-1]
    names = [".".join(package)]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else []
            base = ".".join([*above, *filter(None, [node.module])])
            names += [base, *(f"{base}.{alias.name}" for alias in node.names)]
    with_packages: list[str] = []
    for name in filter(None, names):
        parts = name.strip(".").split(".")
        with_packages += [".".join(parts[:length]) for length in range(1, len(parts) + 1)]
    return with_packages
