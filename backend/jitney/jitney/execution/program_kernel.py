# mypy: disable-error-code="no-untyped-def, call-arg, var-annotated"
# Numba infers the types here, from LLVM intrinsics whose first argument Numba itself supplies.
"""The body that runs a list of kernels one after the other, each on all threads of a team.

Between two kernels the threads wait for each other. A thread that waits spins for a moment, since
the others end within microseconds as a rule, and then gives its core away at every turn: on a
machine with other work the thread that is waited for may need that very core.
"""

from typing import Any

import llvmlite.ir as ir
import numpy as np
from numba import types
from numba.extending import intrinsic

from jitney.execution.attention.simd import fetch_add, i32, i64, inner, load_i64, pointer

# Arguments, in units of 8 bytes.
ARRIVED = 0  # threads that have ended a kernel, summed over kernels; 0 at the start
COUNT = 1  # of kernels
KERNELS = 2  # int64 [count, 2]: address of a body and of its arguments
TEAM_SIZE = 3  # address of int omp_get_num_threads(void)
YIELD = 4  # address of int sched_yield(void)
ARGUMENTS = 5

SPINS = 2000


@intrinsic
def call_body(typingctx, body, arguments):
    """Call ``void body(void *)``."""

    def emit(context, builder, signature, args):
        kind = ir.FunctionType(ir.VoidType(), [i64])
        builder.call(builder.inttoptr(args[0], kind.as_pointer()), [args[1]])
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), emit


@intrinsic
def call_int(typingctx, function):
    """Call ``int function(void)``."""

    def emit(context, builder, signature, args):
        kind = ir.FunctionType(i32, [])
        result = builder.call(builder.inttoptr(args[0], kind.as_pointer()), [])
        return builder.sext(result, i64)

    return types.int64(types.int64), emit


@intrinsic
def load_shared(typingctx, address):
    """An int64 that other threads change: what they wrote before it is seen after it."""

    def emit(context, builder, signature, args):
        where: Any = pointer(builder, args[0], i64)
        return builder.load_atomic(where, ordering="acquire", align=8)

    return types.int64(types.int64), emit


@inner
def wait_for_all(args, total, give_way):
    """Arrive, and return when ``total`` arrivals have been counted since the start."""
    fetch_add(args + 8 * ARRIVED)
    spins = np.int64(0)
    while load_shared(args + 8 * ARRIVED) < total:
        spins += 1
        if spins > SPINS:
            call_int(give_way)


@inner
def run_body(args):
    """Call every kernel in order."""
    team = call_int(load_i64(args + 8 * TEAM_SIZE))
    give_way = load_i64(args + 8 * YIELD)
    kernels = load_i64(args + 8 * KERNELS)
    for i in range(load_i64(args + 8 * COUNT)):
        call_body(load_i64(kernels + 16 * i), load_i64(kernels + 16 * i + 8))
        wait_for_all(args, (i + 1) * team, give_way)
