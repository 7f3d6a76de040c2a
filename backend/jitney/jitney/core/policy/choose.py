"""Which policies an engine runs by, from its options. The scheduler calls :func:`choose_policies`
once; what is not set is answered by an object of ``plain``."""

from dataclasses import dataclass

from jitney.batch import StepOutput
from jitney.config import EngineConfig
from jitney.core.kv_cache import KvCache
from jitney.core.policy.cost import StepCost
from jitney.core.policy.pace import Pace
from jitney.core.policy.plain import ByRank, NoCosts, NoDrafts, NoLimits
from jitney.core.policy.seam import Admission, CostModel, DraftPolicy, StepLimits
from jitney.core.policy.speculation import Speculation
from jitney.core.policy.tiers import TierAdmission, TierCounts
from jitney.core.step_in_flight import StepInFlight


@dataclass(frozen=True, slots=True)
class Policies:
    """The objects that answer the questions of the seam, one for each Protocol."""

    admission: Admission
    limits: StepLimits
    drafts: DraftPolicy
    cost: CostModel

    def note_step(
        self, step: StepInFlight, output: StepOutput, *, seconds: float, now: float
    ) -> None:
        """A step is complete: learn from it. ``seconds`` that it took; 0 if not measured."""
        self.drafts.note_rows(step.batch.rows)
        self.cost.note_step(step.batch, output, seconds)
        self.limits.note_step(step.target, now)


def choose_policies(
    config: EngineConfig, kv: KvCache, *, max_running: int, watermark: int
) -> Policies:
    """Make the policies. At most ``max_running`` sequences may run, and admissions leave
    ``watermark`` blocks free."""
    speculation = config.speculation
    tiers = config.tiers
    admission: Admission = ByRank(max_running, config.max_queued)
    limits: StepLimits = NoLimits()
    drafts: DraftPolicy = NoDrafts()
    if speculation is None and not tiers:
        return Policies(admission, limits, drafts, cost=NoCosts())
    cost = StepCost()
    if speculation is not None:
        drafts = Speculation(speculation, cost)
    if tiers:
        counts = TierCounts(held_back=[0] * len(tiers), overdue=[0] * len(tiers))
        limits = Pace(tiers, cost, config.block_size, counts)
        admission = TierAdmission(
            config, kv, max_running=max_running, watermark=watermark, counts=counts
        )
    return Policies(admission, limits, drafts, cost)
