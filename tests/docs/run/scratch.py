"""A copy of the repository with an environment of its own, for commands to do what they will in.

The environment costs nothing to make: it sees the packages of the one that runs the tests, but has
the copy's packages, its own scripts and its own stamp, so that `make` takes it for complete and
`pip install` writes nothing outside of it.
"""

import os
import shutil
import subprocess
import sys
import tomllib
from importlib.metadata import entry_points
from pathlib import Path

from tests.docs.blocks import ROOT

_STAMP = (
    "import sys; sys.path.insert(0, 'scripts'); import environment as e; "
    "[e.stamp(part).write_text(e.fingerprint(part), encoding='utf-8') for part in e.PARTS]"
)

# Of the tests, and of the `make` that started them, whose words the pages' own must not inherit.
_OURS = ("PYTEST_", "PYTHON", "TRITON_", "MAKE", "MFLAGS", "ARGS")


def make_scratch(folder: Path) -> Path:
    """A copy that has the environment of the tests."""
    copy_project(folder)
    _make_environment(folder)
    return folder


def copy_project(folder: Path) -> None:
    """Copy what git tracks, what it does not ignore, and the models that were built."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    for name in filter(None, listed.split("\0")):
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name)
    shutil.copytree(
        ROOT / "model_repository",
        folder / "model_repository",
        dirs_exist_ok=True,
        ignore=shutil.ignore_patterns(".export-*", "__pycache__"),
    )


def _make_environment(folder: Path) -> None:
    venv = folder / ".venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", venv], check=True)
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    site = venv / "lib" / version / "site-packages"
    # Read first: what pip writes beside it imports from there.
    shared = [path for path in sys.path if path.endswith(("site-packages", "dist-packages"))]
    (site / "000_shared.pth").write_text("\n".join(shared) + "\n", encoding="utf-8")
    # Links, and no paths: beside the engine's package stands the backend's model.py, which no other
    # backend's stub may import.
    project = tomllib.loads((folder / "pyproject.toml").read_text(encoding="utf-8"))
    for package in project["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]:
        (site / Path(package).name).symlink_to(folder / package)
    for entry in entry_points(group="console_scripts"):
        script = venv / "bin" / entry.name
        if not script.exists():
            script.write_text(
                f"#!{venv}/bin/python\nimport sys\nfrom {entry.module} import {entry.attr}\n"
                # As pip's: worker processes import it.
                f"if __name__ == '__main__':\n    sys.exit({entry.attr}())\n",
                encoding="utf-8",
            )
            script.chmod(0o755)
    for name in ("perf_analyzer", "constraints.txt"):  # what scripts/ put beside the packages
        if Path(sys.prefix, name).exists():
            (venv / name).symlink_to(Path(sys.prefix, name))
    for library in Path(sys.prefix, "lib").glob("libpython*"):
        (venv / "lib" / library.name).symlink_to(library)
    subprocess.run([venv / "bin" / "python", "-c", _STAMP], cwd=folder, check=True)


def environment(folder: Path) -> dict[str, str]:
    """Variables of a shell in the copy, its environment activated."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(_OURS)}
    venv = folder / ".venv"
    # An answer that is an error ends a block, which curl by itself would not notice.
    (folder.parent / ".curlrc").write_text(
        "fail-with-body\nsilent\nshow-error\nmax-time = 120\n", encoding="utf-8"
    )
    return {
        **kept,
        "CURL_HOME": str(folder.parent),
        "PATH": f"{venv / 'bin'}:{os.environ['PATH']}",
        "VIRTUAL_ENV": str(venv),
        "PIP_NO_BUILD_ISOLATION": "0",  # pip's way of saying: build with what is installed
        "NO_COLOR": "1",
        "COLUMNS": "120",
    }
