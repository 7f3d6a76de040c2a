"""A user's checkout of the project, for the tests to be users in: settings, secrets and builds do
not touch the real one. It shares the environment and the built models. And the commands that the
document gives such a user.
"""

import subprocess
import sys
from pathlib import Path

from tests.compose.engine.machine import ROOT
from tests.docs.blocks import Block, read_page
from tests.docs.run.scratch import copy_project


def check_out(folder: Path) -> Path:
    """Copy the files of the project, as they are now, to ``folder``, and the models, built."""
    subprocess.run([sys.executable, ROOT / "scripts" / "build_models.py"], check=True)
    copy_project(folder)
    share_environment(folder)
    return folder


def share_environment(folder: Path) -> None:
    """Give the copy the environment that the tests run in, as if `make env` had made it there."""
    venv = folder / ".venv"
    venv.mkdir()
    for name in ("bin", "lib", "pyvenv.cfg"):
        (venv / name).symlink_to(Path(sys.prefix) / name)
    program = (
        "import environment as e; "
        "[e.stamp(part).write_text(e.fingerprint(part), encoding='utf-8') for part in e.PARTS]"
    )
    command = [venv / "bin" / "python", "-c", program]
    subprocess.run(command, cwd=folder / "scripts", check=True)


def document_block(part: str) -> Block:
    """The block of docs/deploying.md that has this text in it."""
    (found,) = (each for each in read_page(Path("docs/deploying.md")) if part in each.text)
    return found
