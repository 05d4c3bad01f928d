"""Vectors in functions that numba compiles: what registers hold, as a type with a few operations.

numba turns loops into vectors only where it can show that this changes nothing, which isn't so in products of small
matrices. Each operation here is a function of vectors that becomes one or a few instructions. Arrays are read and
written by the place of a number in memory, in the order of the array's rows, without a check.
"""

from __future__ import annotations

import math
from typing import Any

from llvmlite import binding, ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic, models, register_model


def _vector_bytes() -> int:
    features = binding.get_host_cpu_features()
    return 64 if features.get("avx512f") else 32 if features.get("avx") else 16


VECTOR_BYTES = _vector_bytes()


class Vector(types.Type):
    """The numbers of a register, for numba."""

    def __init__(self, dtype: Any) -> None:
        self.dtype = dtype
        self.lanes = VECTOR_BYTES * 8 // dtype.bitwidth
        super().__init__(name=f"Vector({dtype}, {self.lanes})")


@register_model(Vector)
class _VectorModel(models.PrimitiveModel):
    def __init__(self, manager: Any, vector: Vector) -> None:
        super().__init__(manager, vector, ir.VectorType(manager.lookup(vector.dtype).get_value_type(), vector.lanes))


def _constant(form: ir.VectorType, value: float) -> ir.Constant:
    return ir.Constant(form, [value] * form.count)


def _repeated(builder: Any, value: Any, form: ir.VectorType) -> Any:
    """A number in all lanes."""
    undefined = ir.Constant(form, ir.Undefined)
    first = builder.insert_element(undefined, value, ir.Constant(ir.IntType(32), 0))
    return builder.shuffle_vector(first, undefined, _constant(ir.VectorType(ir.IntType(32), form.count), 0))


def _address(context: Any, builder: Any, array: Any, given: Any, form: Any) -> Any:
    """Where a number of an array lies, given the values of both and the type of what is there."""
    data = context.make_array(array)(context, builder, given[0]).data
    return builder.bitcast(builder.gep(data, [given[1]]), ir.PointerType(form))


@intrinsic
def number(_: Any, array: Any, index: Any) -> Any:
    """array[index] without numba's check for places that count from the end, which takes longer than a product."""

    def code(context: Any, builder: Any, signature: Any, given: Any) -> Any:
        place = _address(context, builder, array, given, context.get_value_type(array.dtype))
        return builder.load(place, align=array.dtype.bitwidth // 8)

    return array.dtype(array, types.intp), code


@intrinsic
def store_number(_: Any, array: Any, index: Any, number: Any) -> Any:
    """array[index] = number"""

    def code(context: Any, builder: Any, signature: Any, given: Any) -> Any:
        place = _address(context, builder, array, given, context.get_value_type(array.dtype))
        builder.store(given[2], place, align=array.dtype.bitwidth // 8)
        return context.get_dummy_value()

    return types.none(array, types.intp, array.dtype), code


@intrinsic
def load(_: Any, array: Any, index: Any) -> Any:
    """The vector that begins at array[index]."""
    vector = Vector(array.dtype)

    def code(context: Any, builder: Any, signature: Any, given: Any) -> Any:
        place = _address(context, builder, array, given, context.get_value_type(vector))
        return builder.load(place, align=array.dtype.bitwidth // 8)

    return vector(array, types.intp), code


@intrinsic
def store(_: Any, array: Any, index: Any, vector: Any) -> Any:
    """array[index : index + lanes] = vector"""

    def code(context: Any, builder: Any, signature: Any, given: Any) -> Any:
        place = _address(context, builder, array, given, context.get_value_type(vector))
        builder.store(given[2], place, align=array.dtype.bitwidth // 8)
        return context.get_dummy_value()

    return types.none(array, types.intp, vector), code


def _prefetching(write: int) -> Any:
    """A function of an array and an index: the cache line is wanted soon. The index may lie behind the array."""

    @intrinsic
    def apply(_: Any, array: Any, index: Any) -> Any:
        def code(context: Any, builder: Any, signature: Any, given: Any) -> Any:
            place, number = _address(context, builder, array, given, ir.IntType(8)), ir.IntType(32)
            form = ir.FunctionType(ir.VoidType(), [place.type, number, number, number])
            prefetch = cgutils.get_or_insert_function(builder.module, form, "llvm.prefetch.p0")
            builder.call(prefetch, [place, *(ir.Constant(number, x) for x in (write, 2, 1))])
            return context.get_dummy_value()

        return types.none(array, types.intp), code

    return apply


will_read, will_write = _prefetching(0), _prefetching(1)


@intrinsic
def repeat(_: Any, number: Any) -> Any:
    """A vector with the number in all lanes."""
    vector = Vector(number)

    def code(context: Any, builder: Any, signature: Any, given: Any) -> Any:
        return _repeated(builder, given[0], context.get_value_type(vector))

    return vector(number), code


@intrinsic
def add_times(_: Any, total: Any, number: Any, vector: Any) -> Any:
    """total + number * vector"""

    def code(context: Any, builder: Any, signature: Any, given: Any) -> Any:
        factor = _repeated(builder, given[1], context.get_value_type(vector))
        return builder.fadd(given[0], builder.fmul(factor, given[2]))

    return vector(vector, vector.dtype, vector), code


def _binary(operation: str) -> Any:
    @intrinsic
    def apply(_: Any, a: Any, b: Any) -> Any:
        def code(context: Any, builder: Any, signature: Any, given: Any) -> Any:
            return getattr(builder, operation)(*given)

        return a(a, b), code

    return apply


plus, minus, times = _binary("fadd"), _binary("fsub"), _binary("fmul")


@intrinsic
def larger(_: Any, a: Any, b: Any) -> Any:
    """The larger number of each lane; where one is NaN, either."""

    def code(context: Any, builder: Any, signature: Any, given: Any) -> Any:
        return builder.select(builder.fcmp_ordered(">", *given), *given)

    return a(a, a), code


@intrinsic
def only_lanes(_: Any, vector: Any, begin: Any, end: Any, other: Any) -> Any:
    """The vector, with the number `other` in the lanes before `begin` and from `end` on."""

    def code(context: Any, builder: Any, signature: Any, given: Any) -> Any:
        form = context.get_value_type(vector)
        numbers = ir.VectorType(ir.IntType(64), form.count)
        lanes = ir.Constant(numbers, [*range(form.count)])
        after = builder.icmp_signed(">=", lanes, _repeated(builder, given[1], numbers))
        before = builder.icmp_signed("<", lanes, _repeated(builder, given[2], numbers))
        return builder.select(builder.and_(after, before), given[0], _repeated(builder, given[3], form))

    return vector(vector, types.int64, types.int64, vector.dtype), code


def _across(combine: Any) -> Any:
    """A function of a vector: its lanes combined, each half with the other."""

    @intrinsic
    def apply(_: Any, vector: Any) -> Any:
        def code(context: Any, builder: Any, signature: Any, given: Any) -> Any:
            (x,) = given
            while x.type.count > 1:
                half = x.type.count // 2
                lanes = (ir.Constant(ir.VectorType(ir.IntType(32), half), [*range(i, i + half)]) for i in (0, half))
                x = combine(builder, *(builder.shuffle_vector(x, x, places) for places in lanes))
            return builder.extract_element(x, ir.Constant(ir.IntType(32), 0))

        return vector.dtype(vector), code

    return apply


largest_lane = _across(lambda builder, a, b: builder.select(builder.fcmp_ordered(">", a, b), a, b))
sum_of_lanes = _across(lambda builder, a, b: builder.fadd(a, b))


@intrinsic
def exp(_: Any, vector: Any) -> Any:
    """e to the power of each lane, up to 0 or a little more; 0 where that isn't a normal number.

    x = n log 2 + r with a whole n and |r| <= log(2) / 2. e^r is the Taylor series, whose next term is below half of the
    last bit. 2^n is written as a number's exponent.
    """
    mantissa, bias, lowest, terms = (23, 127, -87.33, 7) if vector.dtype == types.float32 else (52, 1023, -708.39, 13)

    def code(context: Any, builder: Any, signature: Any, given: Any) -> Any:
        (x,) = given
        form = context.get_value_type(vector)
        whole = ir.VectorType(ir.IntType(vector.dtype.bitwidth), form.count)

        def plus_times(a: Any, b: Any, c: float) -> Any:
            return builder.fadd(a, builder.fmul(b, _constant(form, c)))

        # A number that is added and subtracted again leaves the nearest whole one, which also is in its last bits.
        large = _constant(form, 1.5 * 2.0**mantissa)
        shifted = plus_times(large, x, 1 / math.log(2))
        n = builder.fsub(shifted, large)
        high = round(math.log(2) * 2**12) / 2**12  # few digits, so that n * high is exact
        low = math.log(2) - high + 2.319046813846300e-17  # with the digits of log(2) that a float64 lacks
        r = plus_times(plus_times(x, n, -high), n, -low)
        power = _constant(form, 1.0)
        for term in range(terms, 0, -1):
            factor = builder.fmul(r, _constant(form, 1 / term))
            power = builder.fadd(_constant(form, 1.0), builder.fmul(power, factor))
        exponent = builder.add(builder.bitcast(shifted, whole), _constant(whole, bias))
        scale = builder.bitcast(builder.shl(exponent, _constant(whole, mantissa)), form)
        is_zero = builder.fcmp_ordered("<", x, _constant(form, lowest))
        return builder.select(is_zero, _constant(form, 0.0), builder.fmul(power, scale))

    return vector(vector), code
