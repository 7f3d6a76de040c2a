"""One loaded setting under one load: everything that is taken from ``sweep`` to measure it."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from jitney.sweep import inputs
from jitney.sweep.plan import Plan
from jitney.sweep.point import Driver, Tick
from jitney.sweep.record import Load, Point
from jitney.sweep.target import Model, Target
from jitney.sweep.tool import PerfAnalyzer


@dataclass
class Gauge:
    """What all measurements share. ``folder`` holds the requests while the run lasts.

    A load of the same level gets the same requests under every setting, and other ones than the
    other levels and than its second attempt, so that none finds its prompts in the prefix cache.
    """

    tool: PerfAnalyzer
    plan: Plan
    protocol: str
    prompts: inputs.Prompts
    shapes: Mapping[str, tuple[int, ...]]
    data: Path | None
    folder: Path
    _words_per_token: float | None = None
    _files: dict[str, Path] = field(default_factory=dict)

    def point(self, target: Target, model: Model, load: Load, attempt: int, tick: Tick) -> Point:
        """``attempt``: the how manieth at this load since the setting was loaded.

        Raises InvalidArgumentError for inputs that no rows can be made for.
        """
        driver = Driver(self.tool, target, model, self.plan, self.protocol)
        requests = self._requests(target, model, f"{load} {attempt}")
        # Of its own: else the prefix cache of a language model knows what is then measured.
        warm_up = self._requests(target, model, f"{load} {attempt} warm-up")
        return driver.run(load, requests, tick, warm_up)

    def _requests(self, target: Target, model: Model, salt: str) -> Path:
        if self.data is not None:
            return self.data
        if salt not in self._files:
            if model.language:
                entries = self.prompts.entries(model, self._ratio(target, model), salt)
            else:
                entries = inputs.rows(model, self.shapes, self.prompts.seed)
            path = self.folder / f"{len(self._files)}.json"
            path.write_text(json.dumps({"data": entries}), encoding="utf-8")
            self._files[salt] = path
        return self._files[salt]

    def _ratio(self, target: Target, model: Model) -> float:
        if self._words_per_token is None:
            asked = not self.prompts.given
            self._words_per_token = inputs.words_per_token(target, model) if asked else 1.0
        return self._words_per_token
