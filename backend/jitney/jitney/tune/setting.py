"""The axes of a model and a setting as one value of each. Pure data."""

from dataclasses import dataclass

Setting = tuple[int, ...]
"""A value for each axis of a Space, in its order."""

BATCH, WINDOW, INSTANCES = "batch_size", "window_us", "instances"
SEQUENCES, TOKENS = "max_num_seqs", "max_num_batched_tokens"


@dataclass(frozen=True)
class Axis:
    """One thing that is tuned. ``values`` ascend."""

    name: str
    values: tuple[int, ...]
    given: bool = False
    """By the user, or there is no choice: no other values are tried."""


@dataclass(frozen=True)
class Space:
    """Everything that may be tried. ``current`` is what the configuration says now; its values are
    among those of the axes unless the user gave others."""

    axes: tuple[Axis, ...]
    current: Setting

    @property
    def names(self) -> tuple[str, ...]:
        """Of the axes."""
        return tuple(axis.name for axis in self.axes)

    def canonical(self, setting: Setting) -> Setting:
        """One of all settings that mean the same: single requests wait for nobody."""
        if self.names[0] == BATCH and setting[0] == 1:
            return (1, 0, *setting[2:])
        return setting

    def named(self, setting: Setting) -> dict[str, int]:
        """Axis -> value."""
        return dict(zip(self.names, setting, strict=True))

    def size(self) -> int:
        """How many different settings there are, the current one included."""
        made = {self.current}
        for batch_or_sequences in self.axes[0].values:
            heads: list[Setting] = [(batch_or_sequences,)]
            for axis in self.axes[1:]:
                heads = [(*head, value) for head in heads for value in axis.values]
            made.update(map(self.canonical, heads))
        return len(made)


def label(values: dict[str, int]) -> str:
    """A setting as it is shown."""
    return ", ".join(_part(name, value) for name, value in values.items())


def _part(name: str, value: int) -> str:
    if name == BATCH:
        return f"batch {value}"
    if name == WINDOW:
        return f"window {show_window(value)}"
    if name == INSTANCES:
        return f"{value} instance{'' if value == 1 else 's'}"
    return f"{name} {value}"


def show_window(microseconds: int) -> str:
    """As the option takes it."""
    if microseconds and microseconds % 1000 == 0:
        return f"{microseconds // 1000}ms"
    return f"{microseconds}us" if microseconds else "0"
