"""What Ray's errors mean for a job: ours, which says in a line what happened. Ray's own text has
stack traces of its processes; it goes to the log of this module."""

import logging

from jitney.errors import JitneyError, UnavailableError

from jitney_jobs.ray_library import ray
from jitney_jobs.rows import reason

_LOG = logging.getLogger(__name__)
RESUME = "`jitney batch resume` goes on, with --ray or without"
_MEANINGS: dict[type[BaseException], str] = {
    ray.exceptions.OutOfMemoryError: "a node had no memory left, and Ray ended a process there",
    ray.exceptions.NodeDiedError: "a node died",
    ray.exceptions.LocalRayletDiedError: "Ray's process on this machine died",
    ray.exceptions.WorkerCrashedError: "a process on a node died",
    ray.exceptions.ActorUnavailableError: "an actor cannot be reached",
    ray.exceptions.RayActorError: "an actor died",
    ray.exceptions.ObjectStoreFullError: "a node's object store is full",
    ray.exceptions.OutOfDiskError: "a node's disk is full",
    ray.exceptions.RuntimeEnvSetupError: "a process could not be set up (runtime_env)",
    ray.exceptions.OwnerDiedError: "the process died that had a block of rows",
    ray.exceptions.ObjectLostError: "a block of rows was lost",
}
"""By class; the first one that fits counts."""


def failure_of(error: BaseException) -> JitneyError:
    """The JitneyError that an error of Ray's came from; if there is none, one that tells what
    happened."""
    cause = _root_of(error)
    if isinstance(cause, JitneyError):
        return cause
    _LOG.info("Ray says: %s", error)
    return UnavailableError(f"the Ray cluster failed: {_what_happened(cause)}: {RESUME}")


def _root_of(error: BaseException) -> BaseException:
    """The error that all others came from, but no further than to one of ours."""
    # The error of a task is of its cause's class too, and has Ray's text.
    while isinstance(error, ray.exceptions.RayError) or not isinstance(error, JitneyError):
        # Ray has the cause in an attribute, which not all of its errors have.
        cause = getattr(error, "cause", None) or error.__cause__
        if not isinstance(cause, BaseException):
            break
        error = cause
    return error


def _what_happened(error: BaseException) -> str:
    for kind, text in _MEANINGS.items():
        if isinstance(error, kind):
            return f"{text}; Ray's logs say more"
    if isinstance(error, ray.exceptions.RayError):
        return f"{type(error).__name__}; Ray's logs say more"
    return reason(error)
