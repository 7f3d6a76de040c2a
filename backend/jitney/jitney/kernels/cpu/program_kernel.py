"""The native call that runs a list of kernels one after the other.

Each kernel runs on all threads of a team, which wait for each other between two kernels. As a rule
the others end within microseconds, so a thread that waits looks again and again. After _SPINS looks
it gives its core away before each further look: on a machine with other work, the thread that it
waits for may need that very core.

A kernel's record in the list is int64 [RECORD_FIELDS]: its arguments (a ``KernelCall``) from the
first field on, and the address of its body in the last::

    field  0         1               2       3 ...                              RECORD_FIELDS - 1
           counter | threads_begun | count | the other arguments ... | unused | body

Called by ``program``, which makes the list.
"""

import ctypes

import llvmlite.ir as ir
import numpy as np
from numba import types

from jitney.kernels.cpu.compiled import reader, record
from jitney.kernels.cpu.emit import I64_BYTES, emitted, i32, i64, pointer
from jitney.kernels.cpu.simd import fetch_add, inner, load_i64

_SPINS = 2000
"""How often a waiting thread looks before it first gives its core away."""
RECORD_FIELDS = 64
"""More than any kernel's arguments have, and 8 whole cache lines."""
COUNTERS = slice(0, 2)
"""The fields ``KernelCall.counter`` and ``threads_begun``, which are 0 when a kernel begins."""
COUNT = 2
"""The field ``KernelCall.count``: how many rows, or items, there are."""
BODY = RECORD_FIELDS - 1
"""The field that holds the address of the kernel's body."""
_RECORD_BYTES = RECORD_FIELDS * I64_BYTES


@record
class ProgramCall(ctypes.Structure):
    """Arguments of :func:`run_body`."""

    arrived: int
    """How many kernels have been ended, summed over all threads: 0 at the start, (number of
    threads) x (number of kernels) at the end."""
    count: int
    """How many kernels there are."""
    kernels: int
    """Address of int64 [count, RECORD_FIELDS]."""
    team_size: int
    """Address of int omp_get_num_threads(void)."""
    give_way: int
    """Address of int sched_yield(void)."""


read_program = reader(ProgramCall)


@emitted(types.void, types.int64, types.int64)
def call_body(builder, body, arguments):
    """Call ``void body(void *)``."""
    kind = ir.FunctionType(ir.VoidType(), [i64])
    function = builder.inttoptr(body, kind.as_pointer())
    builder.call(function, [arguments])


@emitted(types.int64, types.int64)
def call_int(builder, function):
    """Call ``int function(void)``."""
    kind = ir.FunctionType(i32, [])
    result = builder.call(builder.inttoptr(function, kind.as_pointer()), [])
    return builder.sext(result, i64)


@emitted(types.int64, types.int64)
def load_shared(builder, address):
    """An int64 that other threads change. What a thread wrote before it changed the number is seen
    by each thread that has read the number here (acquire)."""
    return builder.load_atomic(pointer(builder, address, i64), ordering="acquire", align=8)


@inner
def wait_for_all(arrived, total, give_way):
    """Count one more arrival, and return when there have been ``total`` since the start."""
    fetch_add(arrived)
    spins = np.int64(0)
    while load_shared(arrived) < total:
        spins += 1
        if spins > _SPINS:
            call_int(give_way)


@inner
def run_body(arguments):
    """Call every kernel in order, each on all threads of the team."""
    call = read_program(arguments)
    arrived = arguments  # the field ``arrived`` is the first one
    team = call_int(call.team_size)
    for i in range(call.count):
        kernel = call.kernels + i * _RECORD_BYTES
        body = load_i64(kernel + BODY * I64_BYTES)
        call_body(body, kernel)
        # All threads have ended kernels 0 to i. The number of arrivals only grows: to reset it
        # between two kernels would need another wait.
        total = (i + 1) * team
        wait_for_all(arrived, total, call.give_way)
