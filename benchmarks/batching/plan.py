"""How much is measured: the loads and the durations of a run of the batching benchmarks."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Loads and seconds. Rates are shares of a capacity that is measured at the start: of the
    unbatched model for a model of one call, of static batching for a language model."""

    seconds: float
    """Of each load."""
    rates: tuple[float, ...]
    users: tuple[int, ...]
    sizes: tuple[int, ...]
    """Of the grid, with ``windows_us``."""
    windows_us: tuple[int, ...]
    grid_rates: tuple[float, ...]
    grid_seconds: float
    mix_seconds: float
    """Of urgent requests beside bulk work."""
    language_seconds: float
    language_rates: tuple[float, ...]
    language_users: tuple[int, ...]


FULL = Plan(
    seconds=2.5,
    rates=(0.25, 0.5, 0.8, 1.2, 1.8),
    users=(1, 4, 16, 32),
    sizes=(4, 8, 32),
    windows_us=(0, 1_000, 5_000, 20_000),
    grid_rates=(0.5, 1.2),
    grid_seconds=1.5,
    mix_seconds=3.0,
    language_seconds=8.0,
    language_rates=(0.5, 0.9, 1.5, 3.0),
    language_users=(4, 16),
)
QUICK = Plan(
    seconds=1.0,
    rates=(0.5, 1.2),
    users=(1, 16),
    sizes=(8,),
    windows_us=(0, 5_000),
    grid_rates=(1.2,),
    grid_seconds=1.0,
    mix_seconds=1.0,
    language_seconds=3.0,
    language_rates=(1.5,),
    language_users=(),
)
