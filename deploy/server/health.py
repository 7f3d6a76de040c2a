"""The health check of the server containers: status 0 if the server and every model are ready.

    python health.py [--url HOST:PORT] [--models FOLDER]

The server's own readiness does not say which model it waits for, so each is asked by name. Standard
library only: it runs every few seconds.
"""

import argparse
import http.client
import sys
from pathlib import Path

_TIMEOUT_S = 5.0


def main() -> int:
    """Returns the exit status; what is not ready is printed, for `docker inspect` to show."""
    parser = argparse.ArgumentParser(description="Is the server with all its models ready?")
    parser.add_argument("--url", default="127.0.0.1:8000", help="host:port of the HTTP listener")
    parser.add_argument("--models", type=Path, default=Path("/models"))
    options = parser.parse_args()
    missing = not_ready(options.url, model_names(options.models))
    if missing:
        print(f"not ready: {', '.join(missing)}")
    return 1 if missing else 0


def model_names(repository: Path) -> list[str]:
    """The models of a repository: the server loads all of them, or does not start."""
    return sorted(
        entry.name
        for entry in repository.iterdir()
        if entry.is_dir() and not entry.name.startswith(".")
    )


def not_ready(url: str, models: list[str]) -> list[str]:
    """What does not answer 200: `server`, or names of models."""
    paths = {"server": "/v2/health/ready", **{name: f"/v2/models/{name}/ready" for name in models}}
    connection = http.client.HTTPConnection(url, timeout=_TIMEOUT_S)
    missing = []
    try:
        for name, path in paths.items():
            connection.request("GET", path)
            response = connection.getresponse()
            response.read()
            if response.status != 200:
                missing.append(name)
    except (OSError, http.client.HTTPException) as error:
        missing.append(f"server ({error})")
    finally:
        connection.close()
    return missing


if __name__ == "__main__":
    sys.exit(main())
