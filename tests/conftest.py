"""Kernels in the Triton language run in its interpreter where there is no CUDA device.

Whether a kernel is compiled or interpreted is fixed when Triton, and then the kernel's module, is
imported: so this stands before every other import of the tests. It holds for this process alone.
The environment is left as it was: a server or a compiler that a test starts must behave as it does
for users.
"""

import os


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
