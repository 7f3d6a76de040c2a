"""What `make test-browser` needs beside the environment: Debian's Chromium and the library that
drives it. The library brings no browser of its own; Debian's gets its security updates.

    python -m tests.browser.install
"""

import os
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PROGRAMS = ("chromium", "chromium-browser", "google-chrome")
LIBRARY = "playwright"


def chromium() -> str | None:
    """The path of the browser, if there is one."""
    return next((found for name in PROGRAMS if (found := shutil.which(name))), None)


def main() -> int:
    """Install what is missing; returns the exit status."""
    if find_spec(LIBRARY) is None:
        install_library()
    if chromium() is not None:
        return 0
    if os.geteuid() != 0 or shutil.which("apt-get") is None:
        print(
            "There is no Chromium on the path. As root: apt-get install chromium (Debian). "
            f"Elsewhere, install it by hand; these names are looked for: {', '.join(PROGRAMS)}.",
            file=sys.stderr,
        )
        return 1
    install_chromium()
    return 0


def install_library() -> None:
    """The extra `browser`, at the version of constraints.txt; nothing else is moved by it."""
    made = ROOT / ".venv" / "constraints.txt"  # with the torch that is really there
    constraints = made if made.exists() else ROOT / "constraints.txt"
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--constraint", str(constraints)]
    subprocess.run([*pip, "--editable", f"{ROOT}[browser]"], check=True)


def install_chromium() -> None:
    """Debian's package, and no more than it needs."""
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    apt = ["apt-get", "-qq", "-o", "DPkg::Lock::Timeout=300"]
    subprocess.run([*apt, "update"], env=environment, check=True)
    install = [*apt, "install", "--no-install-recommends", "-y", "chromium"]
    subprocess.run(install, env=environment, stdout=subprocess.DEVNULL, check=True)


if __name__ == "__main__":
    sys.exit(main())
