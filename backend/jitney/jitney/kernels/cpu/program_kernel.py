"""The native call that runs a list of kernels one after the other.

Each kernel runs on all threads of a team, which wait for each other between two kernels. A thread
that waits spins for a moment, since the others end within microseconds as a rule, and then gives
its core away at every turn: on a machine with other work the thread that is waited for may need
that very core.

A kernel's row in the list is int64 [ROW_FIELDS]: its arguments from the first field on, and the
address of its body in the last::

    | counter | threads | count | what is the kernel's own ...        | body |

Called by ``program``, which makes the list.
"""

import ctypes

import llvmlite.ir as ir
import numpy as np
from numba import types

from jitney.kernels.cpu.compiled import reader, record
from jitney.kernels.cpu.emit import emitted, i32, i64, pointer
from jitney.kernels.cpu.simd import fetch_add, inner, load_i64

_SPINS = 2000
"""How often a thread looks before it gives its core away."""
ROW_FIELDS = 64
"""More than any kernel's arguments have, and 8 whole cache lines."""
COUNT = 2
"""The field ``KernelCall.count``: how many rows, or items, there are."""
_ROW_BYTES = 8 * ROW_FIELDS
_BODY = 8 * (ROW_FIELDS - 1)


@record
class ProgramCall(ctypes.Structure):
    """Arguments of :func:`run_body`."""

    arrived: int
    """Threads that have ended a kernel, summed over kernels: 0 at the start."""
    count: int
    """Of kernels."""
    kernels: int
    """Address of int64 [count, ROW_FIELDS]."""
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
    by whoever has read the number here (acquire)."""
    return builder.load_atomic(pointer(builder, address, i64), ordering="acquire", align=8)


@inner
def wait_for_all(arrived, total, give_way):
    """Arrive, and return when ``total`` arrivals have been counted since the start."""
    fetch_add(arrived)
    spins = np.int64(0)
    while load_shared(arrived) < total:
        spins += 1
        if spins > _SPINS:
            call_int(give_way)


@inner
def run_body(arguments):
    """Call every kernel in order, each on all threads of the team."""
    arrived = arguments  # the address of the record is that of its first field
    call = read_program(arguments)
    team = call_int(call.team_size)
    for i in range(call.count):
        row = call.kernels + _ROW_BYTES * i
        call_body(load_i64(row + _BODY), row)
        # The number of arrivals only grows, so it needs no reset between two kernels.
        wait_for_all(arrived, (i + 1) * team, call.give_way)
