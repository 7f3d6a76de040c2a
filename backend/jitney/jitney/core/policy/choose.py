"""Makes the policies of an engine from its options. The scheduler calls :func:`choose_policies`
once. For an option that is not set, an object of ``plain`` answers.
"""

from jitney.config import EngineConfig
from jitney.core.kv_cache import KvCache
from jitney.core.policy.cost import StepCost
from jitney.core.policy.making_way import MakingWay
from jitney.core.policy.plain import ByRank, NoCosts, NoDrafts, NoLimits
from jitney.core.policy.seam import Admission, DraftPolicy, Policies, StepLimits
from jitney.core.policy.speculation import Speculation
from jitney.core.policy.tier_limits import TierLimits
from jitney.core.policy.tiers import TierAdmission


def choose_policies(
    config: EngineConfig, kv: KvCache, *, max_running: int, watermark: int
) -> Policies:
    """Make the policies. At most ``max_running`` sequences may run, and admissions leave
    ``watermark`` blocks free."""
    speculation = config.speculation
    tiers = config.tiers
    making_way = MakingWay(config, kv, watermark)
    admission: Admission = ByRank(max_running, config.max_queued, making_way)
    limits: StepLimits = NoLimits()
    drafts: DraftPolicy = NoDrafts()
    if speculation is None and not tiers:
        return Policies(admission, making_way, limits, drafts, cost=NoCosts())
    cost = StepCost()
    if speculation is not None:
        drafts = Speculation(speculation, cost)
    if tiers:
        limits = TierLimits(tiers, cost, config.block_size)
        admission = TierAdmission(config, kv, making_way, max_running=max_running)
    return Policies(admission, making_way, limits, drafts, cost)
