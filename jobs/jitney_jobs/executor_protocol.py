"""What runs prepared rows, as the rest of a job sees it: ``executors.py`` makes them."""

from typing import Any, Protocol

Outcome = tuple[int, Any]
"""The row's key, and its result or a JitneyError."""


class Executor(Protocol):
    """For one thread."""

    figures: dict[str, float]
    """What was done in this job. An executor may lack any of them:

    - ``steps``: its steps;
    - ``rows_in_steps``: the rows in all of them;
    - ``tokens``: tokens that were generated;
    - ``most_rows``: how many rows fit into a step. If that differs from step to step, the mean;
    - ``tries``: how often a request was sent again.
    """

    @property
    def capacity(self) -> int:
        """How many rows it may hold now, counting those that it holds already."""

    def rank(self, prepared: Any, is_last: bool) -> Any:
        """The key by which a :class:`~jitney_jobs.feeder.Feeder` sorts rows. It sorts one batch of
        rows at a time, a *generation*, ascending or descending. ``is_last``: the row's generation
        is the last one, which always ascends."""

    def submit(self, key: int, prepared: Any) -> None:
        """Take a row. Raises InvalidArgumentError for one that cannot be run."""

    def step(self) -> list[Outcome]:
        """Work for a while. Returns the rows that have ended. It is called while rows are held;
        each of them ends after some steps."""

    def close(self) -> None:
        """Give memory and connections back. Rows that are held are dropped."""
