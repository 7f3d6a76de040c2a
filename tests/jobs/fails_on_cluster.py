"""A function of a user's whose module cannot be imported in an actor of Ray's."""

from typing import Any

import ray

if ray.is_initialized() and ray.get_runtime_context().get_actor_id():
    raise ImportError("libexample.so.1: cannot open shared object file")


def same(row: dict[str, Any]) -> dict[str, Any]:
    return row
