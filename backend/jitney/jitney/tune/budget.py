"""How long a run takes, before and while it runs, and what still fits. Pure: no clock."""

from dataclasses import dataclass, field

from jitney.tune.search import Strategy

LOADS_OF_A_TRIAL = 3
"""About so many loads tell how good a setting is, once it is known where to begin."""
_OVERHEAD_S = 5.0
"""Of one load: perf_analyzer starts twice, and warms up."""
_FIRST_LOAD_S = {False: 5.0, True: 20.0}
"""To load a model, whether it is a language model, until one was loaded."""


@dataclass
class Budget:
    """``limit_s`` is for everything. Learns from what took how long."""

    limit_s: float
    load_seconds: float
    """What a load is meant to last."""
    ladder: int
    """Loads of a whole ladder."""
    language: bool
    _loads: list[float] = field(default_factory=list)
    _loadings: list[float] = field(default_factory=list)

    def took(self, load_s: float) -> None:
        """A load was measured."""
        self._loads.append(load_s)

    def loaded(self, loading_s: float) -> None:
        """A setting was loaded."""
        self._loadings.append(loading_s)

    @property
    def load_s(self) -> float:
        """What a load is expected to take."""
        return _mean(self._loads, self.load_seconds + _OVERHEAD_S)

    @property
    def loading_s(self) -> float:
        """What loading a setting is expected to take."""
        return _mean(self._loadings, _FIRST_LOAD_S[self.language])

    def trials_s(self, count: int) -> float:
        """``count`` settings of the search."""
        return count * (self.loading_s + LOADS_OF_A_TRIAL * self.load_s)

    @property
    def whole_s(self) -> float:
        """One setting with its whole ladder."""
        return self.loading_s + self.ladder * self.load_s

    @property
    def finals_s(self) -> float:
        """The best and the current one, measured again: kept free for the end, if that leaves half
        of the time for the search."""
        return min(2 * self.whole_s, self.limit_s / 3)

    def strategy(self, spent_s: float, settings: int) -> Strategy:
        """The whole grid where it fits."""
        left = self.limit_s - spent_s - self.finals_s
        return "grid" if self.trials_s(settings) <= left else "axes"

    def may_try(self, spent_s: float) -> bool:
        """Whether one more setting of the search can be loaded and measured."""
        return spent_s + self.loading_s + self.load_s + self.finals_s <= self.limit_s

    def may_measure(self, spent_s: float) -> bool:
        """Whether one more load of the search fits."""
        return spent_s + self.load_s + self.finals_s <= self.limit_s

    @property
    def least_s(self) -> float:
        """The shortest time that makes sense: the current setting at one load, and another."""
        return 2 * (self.loading_s + self.load_s)


def _mean(values: list[float], otherwise: float) -> float:
    return sum(values) / len(values) if values else otherwise


def show(seconds: float) -> str:
    """As a person says it."""
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min"
