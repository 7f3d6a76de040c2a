# mypy: disable-error-code="no-untyped-def, call-arg, var-annotated"
# Numba infers the types here, from LLVM intrinsics whose first argument Numba itself supplies.
"""The body that runs a list of kernels one after the other, each on all threads of a team.

Between two kernels the threads wait for each other. A thread that waits spins for a moment, since
the others end within microseconds as a rule, and then gives its core away at every turn: on a
machine with other work the thread that is waited for may need that very core.
"""

import ctypes

import llvmlite.ir as ir
import numpy as np
from numba import types

from jitney.kernels.cpu.records import reader, record
from jitney.kernels.cpu.simd import emitted, fetch_add, i32, i64, inner, load_i64, pointer

SPINS = 2000


@record
class ProgramCall(ctypes.Structure):
    """Arguments of :func:`run_body`."""

    arrived: int
    """Threads that have ended a kernel, summed over kernels: 0 at the start."""
    count: int
    """Of kernels."""
    kernels: int
    """Address of int64 [count, 2]: addresses of a body and of its arguments."""
    team_size: int
    """Address of int omp_get_num_threads(void)."""
    give_way: int
    """Address of int sched_yield(void)."""


read_program = reader(ProgramCall)


@emitted(types.void, types.int64, types.int64)
def call_body(builder, body, arguments):
    """Call ``void body(void *)``."""
    kind = ir.FunctionType(ir.VoidType(), [i64])
    builder.call(builder.inttoptr(body, kind.as_pointer()), [arguments])


@emitted(types.int64, types.int64)
def call_int(builder, function):
    """Call ``int function(void)``."""
    kind = ir.FunctionType(i32, [])
    return builder.sext(builder.call(builder.inttoptr(function, kind.as_pointer()), []), i64)


@emitted(types.int64, types.int64)
def load_shared(builder, address):
    """An int64 that other threads change: what they wrote before it is seen after it."""
    return builder.load_atomic(pointer(builder, address, i64), ordering="acquire", align=8)


@inner
def wait_for_all(arrived, total, give_way):
    """Arrive, and return when ``total`` arrivals have been counted since the start."""
    fetch_add(arrived)
    spins = np.int64(0)
    while load_shared(arrived) < total:
        spins += 1
        if spins > SPINS:
            call_int(give_way)


@inner
def run_body(arguments):
    """Call every kernel in order."""
    call = read_program(arguments)
    team = call_int(call.team_size)
    for i in range(call.count):
        call_body(load_i64(call.kernels + 16 * i), load_i64(call.kernels + 16 * i + 8))
        wait_for_all(arguments, (i + 1) * team, call.give_way)
