"""The seam for what another package mounts into the gateway: a service with endpoints, work of its
own beside the requests, and API keys of its own.

A package offers a service by an entry point of the group ``jitney.gateway_services``, so the
gateway names no package that stands above it. ``run_gateway.py`` opens the services, ``app.py``
serves their endpoints, ``keys.py`` asks them for keys.
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
"""The group of entry points. An entry point has the name of the gateway's option that gives the
service its folder."""


class MountedService(Protocol):
    """A service that is mounted into the gateway."""

    def endpoints(self, server: ServerClient, /) -> Sequence[Endpoint]:
        """Its endpoints. ``server`` has the models that the gateway serves."""

    def working(self, url: str) -> AbstractAsyncContextManager[None]:
        """A context in which it does its work beside the requests. The service asks the gateway at
        ``url``, like a client."""

    def keys_of(self, owner: str) -> Mapping[str, str]:
        """API keys with which the service sends requests for ``owner``, the name of an owner in the
        key file: key -> owner. Raises ConfigError and OSError."""


OpenService = Callable[[Path | None], MountedService]
"""What an entry point is: it opens the service with its folder.

The folder is None if the gateway's option is not given. Then the service still has its endpoints,
but each of them refuses, and names the option.

Raises ConfigError for a folder that cannot be used, and InstallationError if a package that the
service needs is missing."""


def open_service(name: str, folder: Path | None) -> MountedService:
    """Open the installed service ``name``. Raises InstallationError if there is none, and what its
    entry point raises."""
    for point in entry_points(group=SERVICES, name=name):
        open_: OpenService = point.load()
        return open_(folder)
    raise InstallationError(
        f"no installed package offers {name}: run `pip install --no-deps -e .` in Jitney's checkout"
    )
