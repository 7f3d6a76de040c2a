"""What an engine's process is at work for, as far as its messages tell.

The supervisor owns one. If the process dies, the journal blames these requests for it.
"""

from jitney.engine.wire import Making, RowOwner, StepBegun
from jitney.messages import StepReport


class AtWork:
    """See the module's docstring. Used by the supervisor's thread alone."""

    def __init__(self) -> None:
        self.rows: list[RowOwner] = []
        """Of the steps in flight, and of the step that is about to be launched."""
        self._latest_rows: list[RowOwner] = []  # those of the step that was launched last
        self._making: dict[int, Making] = {}  # by number

    @property
    def making(self) -> list[Making]:
        """The resources that are being made, or looked for."""
        return list(self._making.values())

    def note_step(self, step: StepBegun) -> None:
        """A step is about to be launched."""
        self.rows = step.in_flight + step.new
        self._latest_rows = step.new

    def note_making(self, making: Making) -> None:
        """A resource is about to be made, or this is over."""
        if making.keys:
            self._making[making.number] = making
        else:
            self._making.pop(making.number, None)

    def note_report(self, report: StepReport) -> None:
        """A call of ``Engine.step`` has ended. A step may be in flight after it: at most one, the
        one that was launched last (see ``Steps.make``)."""
        self.rows = self._latest_rows if report.stats.steps_in_flight else []

    def clear(self) -> None:
        """The process has ended."""
        self.rows = []
        self._latest_rows = []
        self._making.clear()
