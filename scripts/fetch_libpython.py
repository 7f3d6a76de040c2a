"""Put Python's shared library into `.venv/lib` if this machine lacks it. Run by the environment's
Python, once jitney is installed in it; nothing is done if the library is found."""

import sys
from pathlib import Path

from debian_package import DebianPackageError, extract
from jitney.errors import InstallationError
from jitney_server.installation import find_libpython


def main() -> int:
    """Returns 0 if the library is there, or is there now."""
    try:
        find_libpython()
        return 0
    except InstallationError as error:
        missing = error
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    try:
        extract(f"libpython{version}", f"libpython{version}.so.1.0", Path(sys.prefix, "lib"))
        print(f"Fetched {find_libpython()}")
        return 0
    except (DebianPackageError, InstallationError) as error:
        print(f"{missing}\n(fetching it failed: {error})", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
