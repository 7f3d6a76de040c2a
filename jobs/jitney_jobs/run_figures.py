"""The figures of one run: counts and seconds, which the user, the metrics and the journal get."""

import msgspec


class RunFigures(msgspec.Struct, kw_only=True):
    """What one run has done so far. The job's thread owns it; other threads return their seconds.
    On a cluster each actor has its own, and the run adds them up.

    ``RunMeter.snapshot`` adds what is known elsewhere.
    """

    read_s: float = 0.0
    """Seconds in which the reader's thread worked."""
    prepare_s: float = 0.0
    """Seconds in which workers prepared, added up over all of them."""
    waited_s: float = 0.0
    """Seconds in which the executor had nothing to do."""
    run_s: float = 0.0
    """Seconds in which the executor worked."""
    write_s: float = 0.0
    """Seconds in which parts were written."""
    done: int = 0
    """Rows that have ended, bad ones too."""
    bad: int = 0
    """The bad ones of these."""
    tries: int = 0
    """How often a row was tried again."""
    most_in_flight: int = 0
    """The most rows that were between reading and a part at a time."""
    taken: int = 0
    """Rows that were read and prepared."""
    position: float = 0.0
    """The share of the whole input that has been read, 0 to 1."""
    moved_at: float
    """When a row last ended, or the run began; in seconds since 1970."""

    def to_dict(self) -> dict[str, float]:
        return {name: float(value) for name, value in msgspec.structs.asdict(self).items()}
