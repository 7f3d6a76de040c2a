"""What every test stands on: kernels that run without a GPU, and how the tests share the cores.

Kernels in the Triton language run in its interpreter where there is no CUDA device. Whether a
kernel is compiled or interpreted is fixed when Triton, and then the kernel's module, is imported:
so this stands before every other import of the tests. It holds for this process alone. The
environment is left as it was: a server or a compiler that a test starts must behave as it does for
users.

`make test` runs three processes. The tests of one file stay in one of them, because they share a
server, a model or compiled kernels; so do the tests of a folder whose files share a server
(tests/order.py).
"""

import os

import pytest
from hypothesis import HealthCheck, settings

from tests import ran_again
from tests.order import ordered, scope_of


def _interpret_kernels() -> None:
    if "TRITON_INTERPRET" in os.environ:
        return  # whoever set it decides, for the processes that tests start too
    import torch

    if torch.cuda.is_available():
        return
    os.environ["TRITON_INTERPRET"] = "1"
    try:
        from triton import knobs
    except ImportError:  # an optional package; tests that need it are skipped
        return
    finally:
        del os.environ["TRITON_INTERPRET"]
    knobs.propagate_env = False  # or the next line would write the variable again
    knobs.runtime.interpret = True
    knobs.propagate_env = True


_interpret_kernels()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items[:] = ordered(items, [item.nodeid for item in items])


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> object:
    """Hands out the tests of a file, or of a folder of TOGETHER, to one process."""
    from xdist.scheduler import LoadScopeScheduling

    class ByServer(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return scope_of(nodeid)

    return ByServer(config, log)


def pytest_configure(config: pytest.Config) -> None:
    ran_again.register(config)
    # How long an example takes depends on what else this machine does. The examples are the same in
    # every run, so that a change is judged by itself: --hypothesis-profile=random looks for more.
    settings.register_profile("random", deadline=None, suppress_health_check=[HealthCheck.too_slow])
    settings.register_profile("same", settings.get_profile("random"), derandomize=True)
    settings.load_profile("same")
    if "PYTEST_XDIST_WORKER" in os.environ:
        import torch

        torch.set_num_threads(1)  # the processes share few cores
