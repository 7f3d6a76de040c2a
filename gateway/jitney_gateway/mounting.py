"""The seam for what another package mounts into the gateway: endpoints, work beside them, and API
keys of its own.

A package offers a service by an entry point of the group ``jitney.gateway_services``. So the
gateway names no package that stands above it. Who calls it: ``run_gateway.py`` opens the services,
``app.py`` serves their endpoints, ``keys.py`` asks them for keys.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from importlib.metadata import entry_points
from pathlib import Path
from typing import Protocol

from jitney.errors import InstallationError

from jitney_gateway.document import Endpoint
from jitney_gateway.server_client import ServerClient

SERVICES = "jitney.gateway_services"
"""The group of entry points. Each is named like the gateway's option that gives it a folder."""


class MountedService(Protocol):
    """What is mounted."""

    def endpoints(self, backend: ServerClient) -> Sequence[Endpoint]:
        """What it answers. ``backend``: the models that the gateway serves."""

    def working(self, url: str) -> AbstractAsyncContextManager[None]:
        """Its work beside the requests, for as long as the gateway at ``url`` serves."""

    def keys_of(self, owner: str) -> Mapping[str, str]:
        """API keys with which its own requests come to the gateway for ``owner`` of other keys: key
        -> owner. Raises ConfigError and OSError."""


OpenService = Callable[[Path | None], MountedService]
"""What an entry point is. Without a folder the service's endpoints say how to get one. Raises
ConfigError for a folder that cannot be used, InstallationError for packages that it needs."""


def open_service(name: str, folder: Path | None) -> MountedService:
    """The installed service of that name. Raises what it raises."""
    for point in entry_points(group=SERVICES, name=name):
        open_: OpenService = point.load()
        return open_(folder)
    raise InstallationError(f"no installed package offers {name}: install triton-jitney again")
