"""What the gateway mounts: it finds :func:`open_service` by an entry point named ``batches``."""

import importlib.util
from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from pathlib import Path

from jitney.errors import ConfigError, InstallationError, install_extra
from jitney_gateway.document import Endpoint
from jitney_gateway.server_client import ServerClient

from jitney_jobs.batches.endpoints import Batches
from jitney_jobs.batches.records import Folder
from jitney_jobs.batches.work import working

_NEEDED = ("pyarrow", "yaml", "openai")
"""Packages of the extra ``jobs``, which the gateway's own does not bring along."""


class BatchService:
    """What the gateway mounts: its ``MountedService``."""

    def __init__(self, folder: Folder | None) -> None:
        """Without a folder the endpoints say how to get one."""
        self._folder = folder

    def endpoints(self, backend: ServerClient) -> Sequence[Endpoint]:
        """``/v1/files`` and ``/v1/batches``."""
        return Batches(self._folder, backend).endpoints()

    def working(self, url: str) -> AbstractAsyncContextManager[None]:
        """A thread advances the batches. Their lines are asked of the gateway at ``url``."""
        return working(self._folder, url)

    def keys_of(self, owner: str) -> Mapping[str, str]:
        """The key with which the jobs of an owner's batches come to the gateway."""
        if self._folder is None:
            return {}
        return self._folder.key_of_jobs(owner)


def open_service(root: Path | None) -> BatchService:
    """The service on the folder ``root``, which is made if need be. Raises InstallationError, and
    ConfigError for a folder that cannot be used."""
    if root is None:
        return BatchService(None)
    for package in _NEEDED:
        if importlib.util.find_spec(package) is None:
            needed = install_extra("gateway", "jobs")
            raise InstallationError(f"batches are jobs, which need {package}: {needed}")
    try:
        return BatchService(Folder(root.absolute()))
    except OSError as error:
        raise ConfigError(f"batches cannot be kept in {root}: {error.strerror}") from None
