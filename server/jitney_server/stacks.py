"""The size of the server's stacks, and which requests end the server all the same.

The server's HTTP library copies the whole body of some requests onto the stack of a thread. With a
usual stack, a large body ends the server. So ``launch`` starts it with large ones.
"""

import resource
from pathlib import Path

STACK_BYTES = 128 << 20
"""Stack of each of the server's threads, if this process's hard limit allows it.

A form takes twice its length of the stack. JSON takes 67 to 134 bytes for each level of nesting.
Memory is used only as far as a thread uses its stack. The limit is not higher still, because the
kernel keeps that much of the address space free: a much higher one would move everything else."""
_STACK_BYTES_IF_COUNTED = 8 << 20
"""The same on a system where a stack counts as memory in use, whether it is used or not."""
_OVERCOMMIT = Path("/proc/sys/vm/overcommit_memory")
_NO_OVERCOMMIT = "2"
"""In that file: memory counts as used as soon as it is asked for."""


def stack_bytes() -> int:
    """The stack of each thread of a program that ``launch`` starts, in bytes."""
    soft, hard = resource.getrlimit(resource.RLIMIT_STACK)
    stack = _STACK_BYTES_IF_COUNTED if _counts_unused_memory() else STACK_BYTES
    # If the user has set a larger limit, it stays. Not "unlimited": the C library would give
    # threads 2 MiB then.
    if soft != resource.RLIM_INFINITY:
        stack = max(stack, soft)
    if hard != resource.RLIM_INFINITY:
        stack = min(stack, hard)
    return stack


def _counts_unused_memory() -> bool:
    """Whether memory counts as used as soon as it is asked for."""
    if resource.getrlimit(resource.RLIMIT_AS)[0] != resource.RLIM_INFINITY:
        return True
    try:
        return _OVERCOMMIT.read_text(encoding="ascii").strip() == _NO_OVERCOMMIT
    except OSError:
        return False


def risk_of_large_requests() -> str:
    """In words, which requests end a server although its stacks are large, if no proxy stands
    before it. Measured with tritonserver 2.51."""
    stack = stack_bytes()
    return (
        f"a form (application/x-www-form-urlencoded) of over {stack // 2 >> 20} MiB, or JSON "
        f"nested more than {stack // 134:,} deep, may end this server"
    )
