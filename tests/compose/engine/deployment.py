"""One deployment under test: docker-compose.yml with settings, and questions about what runs."""

import json
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import quote

from tests.compose.engine.clients import Client
from tests.compose.engine.machine import Engine

SERVICES = ("triton-cpu", "gateway", "proxy", "prometheus", "prober", "disks", "grafana")
"""Of profile `cpu`."""


class Deployment:
    """``project`` is the folder of a user's checkout. ``settings`` are environment variables, which
    go before what its .env says."""

    def __init__(self, engine: Engine, project: Path, settings: Mapping[str, str]) -> None:
        self.engine = engine
        self.project = project
        self.settings = dict(settings)

    def compose(self, *arguments: str, timeout_s: float = 300) -> str:
        """Output of one docker-compose command, given in the project's folder."""
        return self.run("docker-compose", *arguments, timeout_s=timeout_s)

    def shell(self, script: str, timeout_s: float = 300) -> str:
        """Output of a piece of shell, run in the project's folder, up to its first failure."""
        return self.run("bash", "-euo", "pipefail", "-c", script, timeout_s=timeout_s)

    def run(self, *command: str, timeout_s: float) -> str:
        """Output of a command in the project's folder."""
        return self.engine.run(
            command, folder=self.project, settings=self.settings, timeout_s=timeout_s
        ).stdout

    def down(self) -> None:
        """Remove every container, network and volume of it."""
        self.compose("down", "--volumes", "--timeout", "60")

    def container(self, service: str) -> str:
        """Id of a service's container, also of one that has ended."""
        labels = {
            "com.docker.compose.project": self.settings.get("COMPOSE_PROJECT_NAME", "jitney"),
            "com.docker.compose.service": service,
        }
        filters = [f"--filter=label={name}={value}" for name, value in labels.items()]
        return self.engine.docker("ps", "--all", "--quiet", *filters).stdout.strip()

    def inspect(self, service: str) -> dict[str, Any]:
        """All that the engine knows of a service's container."""
        found = self.engine.docker("inspect", self.container(service)).stdout
        described: dict[str, Any] = json.loads(found)[0]
        return described

    def run_in(self, service: str, *command: str, check: bool = True) -> str:
        """Output of a command in a running container, as its own user."""
        return self.engine.docker("exec", self.container(service), *command, check=check).stdout

    def logs(self, service: str) -> str:
        """All that a service has printed."""
        done = self.engine.docker("logs", self.container(service))
        return done.stdout + done.stderr

    def network(self, name: str) -> str:
        """What the engine calls one of the project's networks."""
        return f"{self.settings.get('COMPOSE_PROJECT_NAME', 'jitney')}_{name}"

    def address(self, service: str, network: str) -> str:
        """A service's address on one of the project's networks."""
        networks = self.inspect(service)["NetworkSettings"]["Networks"]
        found: str = networks[self.network(network)]["IPAddress"]
        return found

    def wait_healthy(self, *services: str, timeout_s: float = 1200) -> None:
        """Wait for the services' own health checks. Raises AssertionError with their logs."""
        for service in services:
            wait_for(
                partial(self.is_healthy, service),
                f"{service} to be healthy",
                timeout_s,
                partial(self.logs, service),
            )

    def is_healthy(self, service: str) -> bool:
        """What its own health check says."""
        return bool(self.inspect(service)["State"]["Health"]["Status"] == "healthy")

    def client(self, name: str = "first") -> Client:
        """A client with the key of that name; an empty name has none."""
        secrets = self.project / "deploy" / "secrets"
        lines = (secrets / "api_keys").read_text(encoding="utf-8").splitlines()
        keys = dict(line.split(":") for line in lines if not line.startswith("#"))
        port = int(self.settings["HTTPS_PORT"])
        return Client(port, secrets / "tls_certificate", keys[name] if name else "")

    def ask_prometheus(self, path: str) -> Any:
        """The `data` of one call of Prometheus' interface, asked inside its container."""
        answer = self.run_in("prometheus", "curl", "-sS", f"http://127.0.0.1:9090/api/v1/{path}")
        made = json.loads(answer)
        assert made["status"] == "success", made
        return made["data"]

    def query(self, expression: str) -> list[dict[str, Any]]:
        """The series of an expression now, each with `metric` and `value`."""
        found: list[dict[str, Any]] = self.ask_prometheus(f"query?query={quote(expression)}")[
            "result"
        ]
        return found


def wait_for(
    is_done: Callable[[], object],
    what: str,
    timeout_s: float,
    explain: Callable[[], str] = lambda: "",
) -> None:
    """Wait until ``is_done`` returns something true. Raises AssertionError after ``timeout_s``."""
    deadline = time.monotonic() + timeout_s
    while not is_done():
        assert time.monotonic() < deadline, (
            f"waited {timeout_s:.0f} s for {what}\n{explain()[-4000:]}"
        )
        time.sleep(0.5)
