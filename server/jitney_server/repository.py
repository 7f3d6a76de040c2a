"""The models of a repository: which there are, and which of them a server loads.

A model that needs a stub cannot be served if its name is not plain (see ``plain_paths``). Called by
``server`` and ``welcome``.
"""

from collections.abc import Sequence
from pathlib import Path

from jitney.errors import InvalidArgumentError

from jitney_server.plain_paths import unservable_models

ALL_MODELS = "*"
"""Stands for every model of the repository, on the server's command line."""


def model_names(repository: Path) -> list[str]:
    """The names of the repository's folders, without hidden ones."""
    names = sorted(entry.name for entry in repository.iterdir() if entry.is_dir())
    return [name for name in names if not name.startswith(".")]


def unservable(repository: Path, models: Sequence[str] | None) -> dict[str, str]:
    """Name -> the reason, for each model that cannot be served under its name.

    ``models``: the names to look at. None: every model of the repository.
    """
    names = model_names(repository) if models is None else models
    return unservable_models(repository / name for name in names)


def names_to_load(repository: Path, models: Sequence[str] | None) -> list[str]:
    """What the server is told to load: ``models``, or the whole repository if that is None. Models
    that cannot be served are left out."""
    left_out = unservable(repository, models)
    if models is None and not left_out:
        return [ALL_MODELS]
    names = model_names(repository) if models is None else models
    return [name for name in names if name not in left_out]


def check_repository(repository: Path, models: Sequence[str] | None, *, keep_going: bool) -> None:
    """Raise InvalidArgumentError if the repository is no folder, or if one of ``models`` is not in
    it. Raise it for a model that cannot be served too, unless ``keep_going`` is set."""
    if not repository.is_dir():
        raise InvalidArgumentError(f"the model repository {repository} is not a folder")
    present = model_names(repository)
    for name in models or ():
        if name not in present:
            listed = ", ".join(present) or "nothing"
            raise InvalidArgumentError(
                f"model {name!r} is not in {repository}, which holds {listed}"
            )
    if keep_going:
        return
    for reason in unservable(repository, models).values():
        raise InvalidArgumentError(reason)
