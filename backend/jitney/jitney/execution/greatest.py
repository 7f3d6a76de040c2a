# mypy: disable-error-code="no-untyped-def, call-arg"
# Numba infers the types here, from LLVM intrinsics whose first argument Numba itself supplies.
"""The greatest logit of every row, on the CPU: all that a batch of greedy requests asks for.

torch reads a vocabulary in bfloat16 one element at a time. Floats compare like integers once the
bits of negative ones are turned over, and integers are compared a register at a time; NaNs then
stand at the two ends.

Imported only where Numba is.
"""

from typing import Any

import numpy as np
import torch
from numba import carray, int16, int32, njit, types
from numba.extending import intrinsic
from torch import Tensor

from jitney.execution.attention.openmp import team_runner
from jitney.execution.attention.simd import fetch_add, load_i64
from jitney.execution.compiled import compile_body, source_version

# Arguments of the body, in units of 8 bytes.
COUNTER = 0  # rows taken so far; 0 at the start
ROWS = 1
DATA = 2  # address of the first row
STRIDE = 3  # bytes from row to row
WIDTH = 4
INFINITY = 5  # its bits
PLACES = 6  # address of int64 [rows]
FINITE = 7  # address of bool [rows]
ARGUMENTS = 8

_BLOCK = 1024
_INFINITY = {torch.bfloat16: 0x7F80, torch.float16: 0x7C00, torch.float32: 0x7F800000}


class CpuGreatest:
    """Finds the greatest logits in tensors of one dtype on torch's threads. One per engine."""

    def __init__(self, dtype: torch.dtype) -> None:
        """Raises KeyError for a dtype other than bfloat16, float16 and float32."""
        self.dtype = dtype
        self._infinity = _INFINITY[dtype]
        version = source_version("greatest.py", "attention/simd.py")
        find = _of_int32 if dtype == torch.float32 else _of_int16

        def body(arguments: int) -> None:
            if version != 0:
                find(arguments)

        self._function = compile_body(body)  # owns the code
        self._run = team_runner()

    def __call__(self, logits: Tensor) -> tuple[list[int], list[int]]:
        """A :data:`sampler.Greatest`."""
        assert logits.device.type == "cpu"
        assert logits.dtype == self.dtype
        assert logits.stride(1) == 1
        rows, width = logits.shape
        places, finite = np.empty(rows, np.int64), np.empty(rows, np.bool_)
        arguments = np.array(
            [
                0, rows, logits.data_ptr(), logits.stride(0) * logits.element_size(), width,
                self._infinity, places.ctypes.data, finite.ctypes.data,
            ],
            np.int64,
        )  # fmt: skip
        threads = min(rows, torch.get_num_threads())
        self._run(self._function.address, arguments.ctypes.data, threads)
        broken = [] if finite.all() else np.flatnonzero(~finite).tolist()
        return places.tolist(), broken


@intrinsic
def _pointer(typingctx, address):
    """An address as a pointer, for Numba's carray."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.inttoptr(args[0], context.get_value_type(types.voidptr))

    return types.voidptr(types.intp), emit


def _make_find(integer: Any, dtype: Any, magnitude: int) -> Any:
    """The body for floats of one width. ``magnitude`` has all bits but the sign."""
    # Numba widens what it computes with integers: the conversions here let LLVM keep them narrow.
    sign_shift = magnitude.bit_length()
    least = -magnitude - 1

    @njit(error_model="numpy", boundscheck=False)
    def turn(x):
        """Bits to a number that sorts like the float, and back."""
        return integer(x ^ integer(integer(x >> sign_shift) & integer(magnitude)))

    @njit(error_model="numpy", boundscheck=False)
    def place_of(bits, wanted):
        for begin in range(0, bits.size, _BLOCK):
            end = min(begin + _BLOCK, bits.size)
            found = False
            for i in range(begin, end):
                found |= bits[i] == wanted
            if found:
                for i in range(begin, end):
                    if bits[i] == wanted:
                        return i
        return 0

    @njit(error_model="numpy", boundscheck=False)
    def find(arguments):
        rows, width = load_i64(arguments + 8 * ROWS), load_i64(arguments + 8 * WIDTH)
        data, stride = load_i64(arguments + 8 * DATA), load_i64(arguments + 8 * STRIDE)
        infinity = load_i64(arguments + 8 * INFINITY)
        places = carray(_pointer(load_i64(arguments + 8 * PLACES)), (rows,), np.int64)
        finite = carray(_pointer(load_i64(arguments + 8 * FINITE)), (rows,), np.bool_)
        while True:
            row = fetch_add(arguments + 8 * COUNTER)
            if row >= rows:
                return
            bits = carray(_pointer(data + row * stride), (width,), dtype)
            high, low = integer(least), integer(magnitude)
            for i in range(width):
                key = turn(bits[i])
                high = key if key > high else high
                low = key if key < low else low
            is_nan = low < -infinity - 1  # one whose sign is set: the least of all
            finite[row] = -infinity - 1 < high < infinity and not is_nan
            places[row] = place_of(bits, turn(low if is_nan else high))

    return find


_of_int16 = _make_find(int16, np.int16, 0x7FFF)
_of_int32 = _make_find(int32, np.int32, 0x7FFFFFFF)
