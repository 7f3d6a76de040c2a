"""How our Numba functions emit LLVM code of their own.

Numba has no vector type and leaves vectorization to chance. So the innermost loops of all kernels
are written as LLVM code: a Python function gets a ``builder`` and calls it once for each
instruction. :func:`emitted` makes a Numba function of it, which other Numba functions call.

Read a function of this kind as a template. Its Python code runs while the kernel is compiled. The
kernel itself runs only the instructions that the builder was told. So this template::

    for n in range(2):
        address = offset_by(builder, start, n, VECTOR_BYTES)
        total = builder.fadd(total, load_vector(builder, address, f32x))

emits no loop, but one addition behind the other::

    load 16 float32 at start + 0 * 64;  total = total + these
    load 16 float32 at start + 1 * 64;  total = total + these

A docstring that begins with "IR:" says which code is emitted. In such functions an argument without
an annotation is an IR value (a number that only the kernel will know) or an IR type, and so is a
result.

Called by every module of this folder that holds kernels. It calls nothing of ours.
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import llvmlite.ir as ir
from numba import types
from numba.core import cgutils
from numba.core.registry import cpu_target
from numba.extending import intrinsic, models, register_jitable, register_model

LANES = 16
"""Lanes of a vector. LLVM maps a vector to one register of AVX-512, two of AVX2 or four of NEON."""
UNIT_BYTES = 4
"""Bytes of a unit: what one lane of a vector holds."""
VECTOR_BYTES = LANES * UNIT_BYTES
F32_BYTES = 4
"""Bytes of a float32: a score, a sum, a scale."""
I64_BYTES = 8
"""Bytes of an int64: an address in a list, an index, a counter."""

# --------------------------------------------------------------------------- types

i8 = ir.IntType(8)
i16 = ir.IntType(16)
i32 = ir.IntType(32)
i64 = ir.IntType(64)
f32 = ir.FloatType()

f32x = ir.VectorType(f32, LANES)
i32x = ir.VectorType(i32, LANES)
i16x = ir.VectorType(i16, LANES)
i8x = ir.VectorType(i8, LANES)


class _BFloat(ir.Type):
    """LLVM's bfloat, which llvmlite has no class for. There is one object of it."""

    def _to_string(self) -> str:
        return "bfloat"


bf16 = _BFloat()


class _VectorType(types.Type):
    """Numba's view of ``<16 x float>``."""


vector = _VectorType("f32x16")


@register_model(_VectorType)
class _VectorModel(models.PrimitiveModel):
    def __init__(self, manager: Any, fe_type: Any) -> None:
        super().__init__(manager, fe_type, f32x)


# --------------------------------------------------------------------------- Numba functions

TAG = "tag"
"""In :func:`emitted`: this argument may be any tag (``simd``). ``emit`` gets the tag's type."""


def emitted(result: Any, *arguments: Any, **named: Any) -> Callable[[Callable[..., Any]], Any]:
    """Makes a Numba function of ``emit(builder, *values)``, which emits code and returns its value.

    ``result`` and ``arguments`` are Numba's types. For example::

        @emitted(vector, vector, types.float32)
        def scaled(builder, value, factor):
            return builder.fmul(value, broadcast(builder, factor))

    Another Numba function calls it as ``scaled(x, 2.0)``, or names its arguments, and gets these
    instructions in the place of a call::

        %first = insertelement <16 x float> undef, float 2.0, i32 0
        %every = shufflevector <16 x float> %first, <16 x float> undef, zeroinitializer
        %result = fmul <16 x float> %x, %every

    A function of many arguments gives the types of the first few, and some types by name. All other
    arguments are int64: so an address, a stride or a count needs no type.
    """

    def decorate(emit: Callable[..., Any]) -> Any:
        signature = inspect.signature(emit)
        types_of_emit = _types_of(signature, arguments, named)

        def define(typingctx, *given, **given_by_name):
            # Numba calls this with the types of a caller's arguments, and then ``generate``.
            given_types = _in_order(signature, given, given_by_name)
            converted_types = _converted(types_of_emit, given_types)

            def generate(context, builder, _, values):
                operands = []
                arguments_of_emit = zip(types_of_emit, converted_types, values, strict=True)
                for expected, converted, value in arguments_of_emit:
                    # Of a tag, the type is all there is to know.
                    operands.append(converted if expected is TAG else value)
                emitted_value = emit(builder, *operands)
                if result is types.void:
                    return context.get_dummy_value()
                return emitted_value

            # Numba writes a signature as a call of the result's type.
            signature_of_call = result(*converted_types)
            return signature_of_call, generate

        define.__name__ = emit.__name__
        define.__doc__ = emit.__doc__
        # Numba asks for the names of arguments.
        define.__signature__ = signature  # type: ignore[attr-defined]
        return intrinsic(define)

    return decorate


def _types_of(
    signature: inspect.Signature, arguments: Sequence[Any], named: Mapping[str, Any]
) -> list[Any]:
    """The type of each argument of an ``emit`` behind its builder: see :func:`emitted`."""
    _, *names = signature.parameters
    assert len(arguments) <= len(names)
    types_by_name = dict(zip(names, arguments, strict=False))
    types_by_name.update(named)
    unknown = types_by_name.keys() - set(names)
    assert not unknown
    return [types_by_name.get(name, types.int64) for name in names]


def _in_order(
    signature: inspect.Signature, given: Sequence[Any], given_by_name: Mapping[str, Any]
) -> Sequence[Any]:
    """The types of a caller's arguments, in the order of the parameters behind the builder."""
    builder = None
    bound = signature.bind(builder, *given, **given_by_name)
    return bound.args[1:]


def _converted(expected_types: Sequence[Any], given_types: Sequence[Any]) -> list[Any]:
    """The types that a caller's arguments are converted to: those that ``emit`` expects. A tag is
    not converted, so its type is the one given."""
    converted_types = []
    for expected, given in zip(expected_types, given_types, strict=True):
        converted_types.append(given if expected is TAG else expected)
    return converted_types


def host_has(feature: str) -> bool:
    """Whether the processor that Numba compiles for has ``feature``, by LLVM's name."""
    _, _, features = cpu_target.target_context.codegen().magic_tuple()
    return f"+{feature}" in features.split(",")


def call_llvm(builder, name: str, result, args: Sequence[Any], **options):
    """IR: a call of an LLVM intrinsic by its full name."""
    kind = ir.FunctionType(result, [a.type for a in args])
    function = builder.module.declare_intrinsic(name, fnty=kind)
    return builder.call(function, args, **options)


# --------------------------------------------------------------------------- whole numbers
# Python and compiled code call these. Compiled code gets the statement itself, not a call.


@register_jitable(inline="always")
def ceil_div(count, size):
    """How many pieces of ``size`` are needed for ``count``: their quotient, rounded up."""
    return -(-count // size)


@register_jitable(inline="always")
def round_up(count, size):
    """The next multiple of ``size`` that is not below ``count``."""
    return -(-count // size) * size


# --------------------------------------------------------------------------- numbers and addresses


def constant(kind, number: float):
    """IR: a constant; of a vector type, in every lane."""
    if isinstance(kind, ir.VectorType):
        return ir.Constant(kind, [number] * kind.count)
    return ir.Constant(kind, number)


def pointer(builder, address, to):
    """IR: an integer address as a pointer to type ``to``."""
    return builder.inttoptr(address, to.as_pointer())


def offset_by(builder, address, count, size=1):
    """IR: ``address`` + count * size. Count and size are Python numbers or 64-bit values."""
    if isinstance(count, int):
        count = constant(i64, count)
    if isinstance(size, int):
        size = constant(i64, size)
    return builder.add(address, builder.mul(count, size))


def prefetch_line(builder, address) -> None:
    """IR: prefetch the cache line at ``address`` into the second-level cache."""
    where = pointer(builder, address, i8)
    read = constant(i32, 0)
    second_level = constant(i32, 2)
    data = constant(i32, 1)
    operands = [where, read, second_level, data]
    call_llvm(builder, "llvm.prefetch.p0", ir.VoidType(), operands)


def stack_memory(builder, size: int):
    """IR: the address of so many bytes on the stack, in whole cache lines."""
    # Numba fills the array with zeros, by one store for each element. So the elements are vectors:
    # for 16,384 bytes these are 256 stores, where elements of a byte would need 16,384.
    vectors = ceil_div(size, VECTOR_BYTES)
    memory = cgutils.alloca_once(builder, ir.ArrayType(f32x, vectors))
    memory.align = 64
    return builder.ptrtoint(memory, i64)


# --------------------------------------------------------------------------- vectors


def load_vector(builder, address, kind=i32x):
    """IR: 16 lanes of four bytes each."""
    return builder.load(pointer(builder, address, kind), align=4)


def store_vector(builder, value, address) -> None:
    """IR: 16 lanes of four bytes each."""
    builder.store(value, pointer(builder, address, value.type), align=4)


def broadcast(builder, scalar):
    """IR: ``scalar`` in every lane."""
    base = ir.Constant(ir.VectorType(scalar.type, LANES), ir.Undefined)
    first = builder.insert_element(base, scalar, constant(i32, 0))
    zeros = constant(i32x, 0)
    return builder.shuffle_vector(first, base, zeros)


def load_broadcast(builder, address, kind=i32):
    """IR: the four bytes at ``address``, as a number of the type ``kind``, in every lane."""
    scalar = builder.load(pointer(builder, address, kind), align=4)
    return broadcast(builder, scalar)


def fused_multiply_add(builder, a, b, c):
    """IR: a * b + c of vectors of float32, rounded once."""
    return call_llvm(builder, "llvm.fma.v16f32", f32x, [a, b, c])


# --------------------------------------------------------------------------- bfloat16
# A bfloat16 is the upper half of the float32 of the same value.

_HIGH_HALF = -0x10000
"""A mask: the upper 16 bits of an int32 are 1, the lower 16 are 0."""


def widen_low(builder, bits):
    """IR: bfloat16 in the lower half of a 32-bit integer, or of 16 lanes of these, as float32."""
    to = f32x if bits.type == i32x else f32
    moved = builder.shl(bits, constant(bits.type, 16))
    return builder.bitcast(moved, to)


def widen_high(builder, bits):
    """IR: bfloat16 in the upper halves of 16 lanes, as float32."""
    high_halves = builder.and_(bits, constant(i32x, _HIGH_HALF))
    return builder.bitcast(high_halves, f32x)


def round_to_bf16(builder, value):
    """IR: float32, one number or 16 lanes, rounded to bfloat16, whose bits are given as int16. Ties
    go to even, and a NaN stays one.

    LLVM has an instruction for it (``fptrunc``). If the processor has none, LLVM calls a library
    function, which is not linked here.
    """
    is_vector = value.type == f32x
    bits_32 = i32x if is_vector else i32
    bits_16 = i16x if is_vector else i16
    bits = builder.bitcast(value, bits_32)
    # The upper 16 bits are kept, the lower 16 are cut off. 0x8000 is a tie: half of the last bit
    # that is kept. If the lower bits are above 0x8000, adding 0x7FFF carries into the upper ones.
    # If the upper part is odd, 1 more is added: then exactly 0x8000 carries, too.
    odd = builder.and_(builder.lshr(bits, constant(bits_32, 16)), constant(bits_32, 1))
    rounded = builder.add(bits, builder.add(odd, constant(bits_32, 0x7FFF)))
    # A NaN might become infinite by that: it is replaced by the usual one.
    is_nan = builder.fcmp_unordered("uno", value, value)
    kept = builder.select(is_nan, constant(bits_32, 0x7FC00000), rounded)
    return builder.trunc(builder.lshr(kept, constant(bits_32, 16)), bits_16)
