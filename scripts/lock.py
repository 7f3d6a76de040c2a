"""Write the lock files ``locks/demo.txt`` and ``locks/rest.txt`` from constraints.txt.

    .venv/bin/python scripts/lock.py

For each Python that Jitney runs on, pip says which file of the configured index it would install
for each pin, and its hash; nothing is installed. ``demo.txt`` has what the demo needs, ``rest.txt``
the rest: tests, benchmarks, documentation, GPU. Since the environment is installed from these files
without resolving, the pins are checked here: everything that a pin or pyproject.toml requires must
be pinned, to a version that fits. torch is left out: its build is the user's.
"""

import json
import re
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path
from typing import Any

from packaging.markers import default_environment
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parent.parent
PYTHONS = ("3.11", "3.12")
# Extras of the demo, the build backend of the editable installation, and what every torch needs.
DEMO = ("server", "gateway", "cpu", "export", "jobs")
BESIDE = ("hatchling", "editables", "setuptools", "networkx", "sympy", "fsspec", "filelock")
REST = ("ray", "gpu", "quantization", "gguf", "bench", "docs", "dev", "otel")
USERS_OWN = "torch"

Pins = dict[str, dict[str, Any]]


def main() -> int:
    """Returns the exit status."""
    constraints = (ROOT / "constraints.txt").read_text(encoding="utf-8")
    wanted = re.findall(rf"^(?!{USERS_OWN}==)[\w.-]+==\S+", constraints, re.M)
    found = {version: report(wanted, version) for version in PYTHONS}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"]
    first = [*project["dependencies"], *BESIDE, *(need for name in DEMO for need in extras[name])]
    every = first + [need for name in REST for need in extras[name]]
    demo: set[str] = set()
    rest: set[str] = set()
    missing: set[str] = set()
    for version, pins in found.items():
        demo |= closure(first, pins, version, missing)
        rest |= closure(every, pins, version, missing)
    if missing:
        print("constraints.txt does not fit:", *sorted(missing), sep="\n  ", file=sys.stderr)
        return 1
    (ROOT / "locks").mkdir(exist_ok=True)
    for part, names in (("demo", demo), ("rest", rest - demo)):
        lines = [f"# Made from constraints.txt by scripts/lock.py: {part}."]
        lines += [locked(name, list(found.values())) for name in sorted(names)]
        (ROOT / "locks" / f"{part}.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return 0


def report(wanted: list[str], version: str) -> Pins:
    """Name -> what pip would install for each pin with that version of Python."""
    command = [
        sys.executable, "-m", "pip", "install", "--quiet", "--dry-run", "--ignore-installed",
        "--no-deps", "--report", "-", "--python-version", version,
    ]  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        answer = subprocess.run(
            [*command, "--target", folder, *wanted], capture_output=True, text=True, check=False
        )
    if answer.returncode != 0:
        raise SystemExit(*re.findall(r"^ERROR: (?:Could|No) .*", answer.stderr, re.M)[:1])
    installs = json.loads(answer.stdout)["install"]
    return {canonicalize_name(each["metadata"]["name"]): each for each in installs}


def closure(needs: list[str], pins: Pins, version: str, missing: set[str]) -> set[str]:
    """The names of all that ``needs`` ask for, directly or not; what is not pinned, or to a version
    that does not fit, goes into ``missing``."""
    base: dict[str, str] = {**default_environment(), "python_version": version}  # type: ignore
    base["python_full_version"] = f"{version}.0"
    seen: set[tuple[str, str]] = set()
    todo = [(need, "") for need in needs]
    while todo:
        text, extra = todo.pop()
        need = Requirement(text)
        name = canonicalize_name(need.name)
        if need.marker and not need.marker.evaluate({**base, "extra": extra}):
            continue
        if name == USERS_OWN:
            continue
        if name not in pins or not need.specifier.contains(pins[name]["metadata"]["version"]):
            missing.add(text)
            continue
        for wanted in ("", *need.extras):
            if (name, wanted) not in seen:
                seen.add((name, wanted))
                rest = pins[name]["metadata"].get("requires_dist", [])
                todo += [(each, wanted) for each in rest]
    return {name for name, _ in seen}


def locked(name: str, pins: list[Pins]) -> str:
    """A line of the lock: the pin with the hash of each file that may be installed for it."""
    hashes = {each[name]["download_info"]["archive_info"]["hashes"]["sha256"] for each in pins}
    pin = f"{name}=={pins[0][name]['metadata']['version']}"
    return " \\\n    ".join([pin, *(f"--hash=sha256:{each}" for each in sorted(hashes))])


if __name__ == "__main__":
    sys.exit(main())
