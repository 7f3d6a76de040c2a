"""A loader for :class:`SupervisedEngine`: the real one, of an engine that computes every draft,
whether it pays or not."""

from jitney.core.policy.prices import Prices
from jitney.core.policy.speculation import Speculation
from jitney.engine.assemble import prepare
from jitney.engine.loading import LoadModel


def loader() -> LoadModel:
    """For the fork server."""
    Speculation._prices = lambda self, some: Prices(0.0)  # type: ignore[method-assign]
    return prepare()
