"""Ray, for all modules of a run on a cluster: where it is missing, each of them says how to install
it."""

import os

from jitney.errors import InstallationError, install_extra

# Threads of Ray Data would join the cluster again once this process has left it, and would end the
# process if the cluster is gone. Ray reads this, and what follows, when it is imported.
os.environ.setdefault("RAY_ENABLE_AUTO_CONNECT", "0")
# Ray Data divides the CPUs of each node by all runs, a killed one among them until its request
# expires: after 180 s, Ray would say, though a run that lives repeats it every 10 s. Where runs
# outnumber a node's CPUs their share is 0, and a block comes only every 10 s or so. On one CPU,
# after two killed runs, 400 rows took 48 s from the first part to the last, not 8 s.
os.environ.setdefault("RAY_DATA_AUTOSCALING_REQUEST_EXPIRE_TIME_S", "30")
try:
    import ray
    import ray.data as ray_data
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
except ImportError:
    raise InstallationError(f"a job on a cluster needs Ray: {install_extra('ray')}") from None

__all__ = ["NodeAffinitySchedulingStrategy", "ray", "ray_data"]
