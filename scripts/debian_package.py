"""Get files out of a Debian package without root: `apt-get download`, then `dpkg -x`."""

import shutil
import subprocess
import tempfile
from pathlib import Path


class DebianPackageError(Exception):
    """The package could not be fetched; the text says why."""


def extract(package: str, pattern: str, target: Path) -> list[Path]:
    """Copy what matches the glob ``pattern`` in ``package`` into the folder ``target``, flat.

    Symbolic links become copies of what they point to. Returns the new paths. Raises
    DebianPackageError if apt is not there, does not know the package, or nothing matches.
    """
    for tool in ("apt-get", "dpkg"):
        if shutil.which(tool) is None:
            raise DebianPackageError(f"{tool} is not on this machine")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        folder.chmod(0o755)  # apt downloads as a user of its own if it runs as root
        _download(package, folder)
        archives = list(folder.glob("*.deb"))
        if not archives:
            raise DebianPackageError(f"apt-get downloaded nothing for {package}")
        _run(["dpkg", "-x", str(archives[0]), "content"], folder)
        found = sorted(path for path in (folder / "content").rglob(pattern) if path.is_file())
        if not found:
            raise DebianPackageError(f"{archives[0].name} holds nothing like {pattern}")
        target.mkdir(parents=True, exist_ok=True)
        return [Path(shutil.copy2(path, target / path.name)) for path in found]


def _download(package: str, folder: Path) -> None:
    """With the machine's own lists of packages or, where there are none (fresh containers), with
    lists that are fetched into ``folder``, which needs no root."""
    command = ["apt-get", "download", "--quiet", package]
    try:
        _run(command, folder)
    except DebianPackageError:
        (folder / "lists" / "partial").mkdir(parents=True)
        (folder / "cache" / "archives" / "partial").mkdir(parents=True)
        private = [f"-oDir::State::lists={folder}/lists", f"-oDir::Cache={folder}/cache"]
        private.append("-oAPT::Sandbox::User=")  # else root downloads as a user without a way in
        _run(["apt-get", *private, "update", "--quiet"], folder)
        _run([*command, *private], folder)


def _run(command: list[str], folder: Path) -> None:
    result = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    if result.returncode != 0:
        last = (result.stderr.strip() or result.stdout.strip()).splitlines()[-1:]
        raise DebianPackageError(f"{' '.join(command)}: {' '.join(last)}")
