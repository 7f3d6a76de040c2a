"""Ray, for all modules of a run on a cluster: where it is missing, each of them says how to install
it."""

import os

from jitney.errors import InstallationError, install_extra

# Threads of Ray Data would join the cluster again once this process has left it, and would end the
# process if the cluster is gone. Ray reads this when it is imported.
os.environ.setdefault("RAY_ENABLE_AUTO_CONNECT", "0")
try:
    import ray
    import ray.data as ray_data
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
except ImportError:
    raise InstallationError(f"a job on a cluster needs Ray: {install_extra('ray')}") from None

__all__ = ["NodeAffinitySchedulingStrategy", "ray", "ray_data"]
