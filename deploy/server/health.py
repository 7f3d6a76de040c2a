"""The health check of the server containers: status 0 if the server and every model are ready.

    python health.py [--url HOST:PORT] [--metrics-url HOST:PORT] [--models FOLDER]

The server's own readiness does not say which model is not ready. So this asks for each model by
name: those that were in the repository when the server started, which is the only time that the
server reads it.

The server (2.51) calls a language model ready even if the model has no engine, for example while
the engine is started again. The metrics say whether it has one.

Standard library only, because it runs every few seconds.
"""

import argparse
import http.client
import re
import string
import sys
import tempfile
from pathlib import Path
from urllib.parse import quote

_TIMEOUT_S = 5.0
_SENT_AS_THEY_ARE = "".join(set(string.punctuation) - set("/?"))
"""The server (2.51) does not decode a path, and knows a model by its name as it is."""
_SERVED = Path(tempfile.gettempdir()) / "jitney-served"


def main() -> int:
    """Returns the exit status; what is not ready is printed, for `docker inspect` to show."""
    parser = argparse.ArgumentParser(description="Is the server with all its models ready?")
    parser.add_argument("--url", default="127.0.0.1:8000", help="host:port of the HTTP listener")
    parser.add_argument("--models", type=Path, default=Path("/models"))
    parser.add_argument("--metrics-url", default="127.0.0.1:8002", help="and of the metrics")
    options = parser.parse_args()
    missing = not_ready(options.url, remembered(options.models))
    missing += without_engine(options.metrics_url)
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


def remember(repository: Path) -> None:
    """Note which models the server that starts now will serve."""
    _SERVED.write_text("\n".join(model_names(repository)), encoding="utf-8")


def remembered(repository: Path) -> list[str]:
    """The models noted; without a note, those of the repository."""
    if not _SERVED.exists():
        return model_names(repository)
    return _SERVED.read_text(encoding="utf-8").splitlines()


def not_ready(url: str, models: list[str]) -> list[str]:
    """What does not answer 200: `server`, or names of models.

    A model is not asked for if its name cannot stand in a path as it is: the server would not know
    it. Such a model has no stub that could end, and without it the server would not have started.
    """
    paths = {"server": "/v2/health/ready"}
    for name in models:
        if quote(name, safe=_SENT_AS_THEY_ARE) == name:
            paths[name] = f"/v2/models/{name}/ready"
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


def without_engine(metrics_url: str) -> list[str]:
    """Language models of which an instance has no engine; none if the server has no metrics."""
    connection = http.client.HTTPConnection(metrics_url, timeout=_TIMEOUT_S)
    try:
        connection.request("GET", "/metrics")
        text = connection.getresponse().read().decode(errors="replace")
    except (OSError, http.client.HTTPException):
        return []
    finally:
        connection.close()
    down = re.findall(r'^jitney_engine_up\{.*?\bmodel="([^"]*)".*\} 0(?:\.0*)?$', text, re.M)
    return [f"{name} (no engine)" for name in sorted(set(down))]


if __name__ == "__main__":
    sys.exit(main())
