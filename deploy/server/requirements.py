"""Prints what pyproject.toml asks for, one requirement a line, for the images' first layers.

    python requirements.py [--without NAME … --] EXTRA …

An image installs the requirements before it gets the source, so that a change of the source does
not install them again. Standard library only.
"""

import argparse
import re
import tomllib
from pathlib import Path


def main() -> None:
    """Print the requirements of the project and of the extras that are named."""
    parser = argparse.ArgumentParser(description="Print the requirements of pyproject.toml.")
    parser.add_argument("extras", nargs="*", metavar="EXTRA")
    parser.add_argument("--without", nargs="+", default=[], metavar="NAME")
    options = parser.parse_args()
    project = tomllib.loads(Path("pyproject.toml").read_text(encoding="utf-8"))["project"]
    requirements = list(project["dependencies"])
    for extra in options.extras:
        if extra not in project["optional-dependencies"]:
            parser.error(f"pyproject.toml has no extra {extra!r}")
        requirements += project["optional-dependencies"][extra]
    for requirement in requirements:
        if re.split(r"[^A-Za-z0-9_.-]", requirement)[0] not in options.without:
            print(requirement)


if __name__ == "__main__":
    main()
