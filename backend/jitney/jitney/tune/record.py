"""What a run found, as it stands in the JSON file. Each setting's loads are a result of ``sweep``.

Times are seconds.
"""

from pathlib import Path
from typing import Literal

import msgspec

from jitney.errors import InvalidArgumentError, show
from jitney.sweep.record import Load, Result

VERSION = 1

Phase = Literal["current", "search", "refine", "final"]
Ending = Literal["complete", "out of time", "interrupted"]


class Trial(msgspec.Struct, frozen=True):
    """One setting, loaded and measured. It may be so twice: the last time is ``final``."""

    values: dict[str, int]
    """Axis -> value."""
    phase: Phase
    load_s: float | None = None
    """How long the model took to load; None if the server loaded it while it started."""
    failure: str = ""
    """The server's reason why it did not load; then there is no result."""
    result: Result | None = None
    cut: bool = False
    """Whether greater loads were left out: the time was over, or the run was interrupted."""


class Near(msgspec.Struct, frozen=True):
    """The load that came nearest to the bounds, where none met them."""

    values: dict[str, int]
    load: Load
    excess: float
    """The worst figure as a multiple of its bound."""
    figure: str
    """That figure in words."""


class Choice(msgspec.Struct, frozen=True):
    """The best setting. ``before``: the current setting's throughput within the bounds, if any."""

    values: dict[str, int]
    load: Load
    throughput: float
    is_current: bool
    before: float | None
    cautions: tuple[str, ...] = ()


class Tuning(msgspec.Struct, frozen=True):
    """A whole run."""

    model: str
    language: bool
    slo: str
    began: str
    """ISO 8601, UTC."""
    seconds: float
    budget_s: float
    strategy: str
    axes: dict[str, tuple[int, ...]]
    options: dict[str, str]
    trials: tuple[Trial, ...]
    ending: Ending
    choice: Choice | None = None
    nearest: Near | None = None
    lines: str = ""
    """For config.pbtxt; empty if there is nothing to change."""
    version: int = VERSION

    @property
    def unit(self) -> str:
        """Of the throughput."""
        return "tokens/s" if self.language else "rows/s"


def write(tuning: Tuning, path: Path) -> None:
    """As JSON, whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    made = path.with_suffix(".part")
    made.write_bytes(msgspec.json.format(msgspec.json.encode(tuning), indent=1) + b"\n")
    made.replace(path)


def read(path: Path) -> Tuning:
    """Raises InvalidArgumentError if it is not the file of a run."""
    try:
        tuning = msgspec.json.decode(path.read_bytes(), type=Tuning)
    except OSError as error:
        raise InvalidArgumentError(f"cannot read {path}: {error.strerror}") from None
    except msgspec.MsgspecError as error:
        raise InvalidArgumentError(f"{path} is not the record of jitney tune: {error}") from None
    if tuning.version != VERSION:
        raise InvalidArgumentError(
            f"{path} is of version {show(tuning.version)}, but must be of {VERSION}"
        )
    return tuning
