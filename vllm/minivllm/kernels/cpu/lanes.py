"""Vectors of sixteen floats for numba, used by the CPU's attention, matrix products and
element-wise passes.

numba does not vectorize attention's short loops (a head has 32 to 128 elements, and it cannot rule
out that the sums it writes alias the keys it reads), so these functions are explicit: `Lanes` is
LLVM's <16 x float>, which LLVM splits to the processor's vector width. Arrays are one-dimensional,
without bounds checks; they hold float32, bfloat16 as uint16 (the upper half of a float32), float16
as int16, int8, or, as uint8, 4-bit integers from −8 to 7 stored with an offset of 8, two per byte,
low nibble first; an index counts numbers there too, not bytes.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import numba.extending
from llvmlite import ir
from llvmlite.binding import get_host_cpu_features, initialize_native_asmparser
from numba import types
from numba.core import cgutils, config
from numba.extending import models, register_model

# It returns numba functions, which a type checker cannot see through.
intrinsic: Any = numba.extending.intrinsic

WIDTH = 16
TILE_ROWS = 6  # of `multiply_tile`
_FLOATS = ir.VectorType(ir.FloatType(), WIDTH)
_INTS = ir.VectorType(ir.IntType(32), WIDTH)
_HALF, _BYTE = ir.HalfType(), ir.IntType(8)
_STORED = {types.float32: ir.FloatType(), types.int8: _BYTE, types.int16: _HALF, types.uint16: ir.IntType(16)}


class _LanesType(types.Type):
    def __init__(self) -> None:
        super().__init__(name="Lanes")


Lanes = _LanesType()


@register_model(_LanesType)
class _LanesModel(models.PrimitiveModel):
    def __init__(self, manager, kind) -> None:
        super().__init__(manager, kind, _FLOATS)


def _address(context, builder, array_type, array, index, kind):
    """Return a pointer to `kind` at `index` of an array."""
    data = context.make_array(array_type)(context, builder, array).data
    element = context.get_data_type(array_type.dtype)
    start = builder.gep(builder.bitcast(data, element.as_pointer()), [index], source_etype=element)
    return builder.bitcast(start, kind.as_pointer())


def _load(context, builder, array_type, array, index, count):
    """Load `count` numbers, starting at `index`, as floats."""
    if array_type.dtype == types.uint8:
        return _load_nibbles(context, builder, array_type, array, index, count)
    floats = ir.VectorType(ir.FloatType(), count)
    kind = ir.VectorType(_STORED[array_type.dtype], count)
    size = array_type.dtype.bitwidth // 8
    numbers = builder.load(_address(context, builder, array_type, array, index, kind), align=size, typ=kind)
    if array_type.dtype == types.float32:
        return numbers
    if array_type.dtype == types.int8:
        return builder.sitofp(numbers, floats)
    if array_type.dtype == types.int16:
        return builder.fpext(numbers, floats)
    # A bfloat16 is the upper half of a float32.
    wide = ir.VectorType(ir.IntType(32), count)
    bits = builder.shl(builder.zext(numbers, wide), ir.Constant(wide, [16] * count))
    return builder.bitcast(bits, floats)


def _load_nibbles(context, builder, array_type, array, index, count):
    """Load `count` integers of 4 bits, starting at an even `index`, as floats."""
    kind = ir.VectorType(ir.IntType(8), count // 2)
    both = ir.VectorType(ir.IntType(8), count)
    at = builder.lshr(index, index.type(1))
    pairs = builder.load(_address(context, builder, array_type, array, at, kind), align=1, typ=kind)
    low = builder.and_(pairs, ir.Constant(kind, [15] * (count // 2)))
    high = builder.lshr(pairs, ir.Constant(kind, [4] * (count // 2)))
    # The low halves are the even numbers, the high ones the odd: take them in turns.
    order = [number // 2 + number % 2 * (count // 2) for number in range(count)]
    integers = builder.shuffle_vector(low, high, ir.Constant(ir.VectorType(ir.IntType(32), count), order))
    integers = builder.sub(integers, ir.Constant(both, [8] * count))
    return builder.sitofp(integers, ir.VectorType(ir.FloatType(), count))


def _shuffle(builder, first, second, order):
    return builder.shuffle_vector(first, second, ir.Constant(ir.VectorType(ir.IntType(32), WIDTH), order))


def _call(builder, name, *lanes):
    """Call LLVM's own function `name` on Lanes."""
    kind = ir.FunctionType(_FLOATS, [_FLOATS] * len(lanes))
    function = cgutils.get_or_insert_function(builder.module, kind, f"llvm.{name}.v{WIDTH}f32")
    return builder.call(function, lanes)


def _constant(number: float):
    return ir.Constant(_FLOATS, [number] * WIDTH)


def has_wide_registers() -> bool:
    """Return whether a vector fits one register (of which there are then 32); otherwise it takes
    two or four.
    """
    return _compiles_for("avx512f")


def has_products_of_pairs() -> bool:
    """Return whether the processor multiplies and adds pairs of bfloat16 numbers."""
    return _compiles_for("avx512bf16")


def _compiles_for(feature: str) -> bool:
    """Return whether numba uses a feature: the processor's, unless `NUMBA_CPU_FEATURES` lists
    others.
    """
    listed = config.CPU_FEATURES  # pyright: ignore[reportAttributeAccessIssue]
    if listed is None:
        return get_host_cpu_features().get(feature, False)
    return f"+{feature}" in listed.split(",")


def _on_lanes(build: Callable[..., Any]) -> Any:
    """Make a function for numba of `build(builder, *arguments)`, which emits code for Lanes and
    float32 numbers.
    """

    @functools.wraps(build)
    def typed(typing_context, *kinds):
        def generate(context, builder, signature, arguments):
            return build(builder, *arguments)

        # Numba converts what is not Lanes to a float32.
        return Lanes(*(kind if kind is Lanes else types.float32 for kind in kinds)), generate

    return intrinsic(typed)


def _loader(count: int) -> Any:
    """Make a function for numba that loads `count` numbers of an array, starting at an index,
    repeated to fill all lanes.
    """

    def load(typing_context, array, index):
        def generate(context, builder, signature, arguments):
            numbers = _load(context, builder, array, *arguments, count)
            return _shuffle(builder, numbers, numbers, [lane % count for lane in range(WIDTH)])

        return Lanes(array, types.intp), generate

    return intrinsic(load)


load = _loader(WIDTH)
load_four = _loader(4)  # abcd abcd abcd abcd
load_one = _loader(1)


@intrinsic
def store(typing_context, array, index, lanes):
    """Write sixteen numbers to `array`, of float32 or bfloat16, starting at `index`."""

    def generate(context, builder, signature, arguments):
        values, start, floats = arguments
        numbers = _to_bfloat16(builder, floats) if array.dtype == types.uint16 else floats
        place = _address(context, builder, array, values, start, numbers.type)
        builder.store(numbers, place, align=array.dtype.bitwidth // 8)
        return context.get_dummy_value()

    return types.void(array, types.intp, Lanes), generate


def _to_bfloat16(builder, floats):
    """Return the upper halves, rounded to nearest, ties to even; NaN stays NaN."""
    bits = builder.bitcast(floats, _INTS)
    sixteen = ir.Constant(_INTS, [16] * WIDTH)
    # Adding half of the last place, less one where that place is even, rounds when the lower half
    # is cut off.
    odd = builder.and_(builder.lshr(bits, sixteen), ir.Constant(_INTS, [1] * WIDTH))
    rounded = builder.add(builder.add(bits, ir.Constant(_INTS, [0x7FFF] * WIDTH)), odd)
    nan = builder.fcmp_unordered("uno", floats, floats)
    rounded = builder.select(nan, ir.Constant(_INTS, [0x7FC00000] * WIDTH), rounded)
    return builder.trunc(builder.lshr(rounded, sixteen), ir.VectorType(ir.IntType(16), WIDTH))


@intrinsic
def dot_rows(typing_context, x, starts, weights, at, stride, count):
    """Multiply rows of x, `count` numbers from each of the `starts` on, with four rows of `weights`,
    the first at `at` and `stride` apart. Return four Lanes for each row of x, for `store_dots`.
    """

    def generate(context, builder, signature, arguments):
        x_value, starts_value, weights_value, first, step, depth = arguments
        rows = cgutils.unpack_tuple(builder, starts_value, starts.count)
        lines = [builder.add(first, builder.mul(step, step.type(line))) for line in range(4)]
        totals = [[cgutils.alloca_once_value(builder, _constant(0.0)) for _ in lines] for _ in rows]
        with cgutils.for_range(builder, builder.sdiv(depth, depth.type(WIDTH))) as loop:
            k = builder.mul(loop.index, depth.type(WIDTH))
            factors = [_load(context, builder, weights, weights_value, builder.add(line, k), WIDTH) for line in lines]
            for row, sums in zip(rows, totals, strict=True):
                numbers = _load(context, builder, x, x_value, builder.add(row, k), WIDTH)
                for factor, total in zip(factors, sums, strict=True):
                    builder.store(_multiply_add(builder, numbers, factor, builder.load(total)), total)
        lanes = [builder.load(total) for sums in totals for total in sums]
        return context.make_tuple(builder, signature.return_type, lanes)

    result = types.UniTuple(Lanes, 4 * starts.count)
    return result(x, starts, weights, types.intp, types.intp, types.intp), generate


@intrinsic
def store_dots(typing_context, array, index, stride, dots):
    """Sum up each of the Lanes that `dot_rows` has returned: write four floats for each row of x to
    `array`, the first row's starting at `index`, and the rows `stride` apart.
    """

    def generate(context, builder, signature, arguments):
        values, start, step, lanes = arguments
        lanes = cgutils.unpack_tuple(builder, lanes, dots.count)
        for row in range(dots.count // 4):
            floats = _sum_fours(builder, *lanes[4 * row : 4 * row + 4])
            for count in (8, 4):  # add the upper half to the lower
                low, high = (
                    builder.shuffle_vector(floats, floats, ir.Constant(ir.VectorType(ir.IntType(32), count), order))
                    for order in (list(range(count)), list(range(count, 2 * count)))
                )
                floats = builder.fadd(low, high)
            at = builder.add(start, builder.mul(step, step.type(row)))
            place = _address(context, builder, array, values, at, floats.type)
            builder.store(floats, place, align=4)
        return context.get_dummy_value()

    return types.void(array, types.intp, types.intp, dots), generate


@intrinsic
def prefetch(typing_context, array, index):
    """Prefetch the cache line that holds `index`."""

    def generate(context, builder, signature, arguments):
        place = _address(context, builder, array, *arguments, ir.IntType(8))
        word = ir.IntType(32)
        kind = ir.FunctionType(ir.VoidType(), [place.type, word, word, word])
        function = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
        # For reading, into all levels, of the data cache.
        builder.call(function, [place, word(0), word(2), word(1)])
        return context.get_dummy_value()

    return types.void(array, types.intp), generate


@_on_lanes
def zero(builder):
    """Return zero in all lanes."""
    return _constant(0.0)


@_on_lanes
def add(builder, first, second):
    """Return first + second."""
    return builder.fadd(first, second)


@_on_lanes
def subtract(builder, first, second):
    """Return first − second."""
    return builder.fsub(first, second)


@_on_lanes
def multiply(builder, first, second):
    """Return first × second."""
    return builder.fmul(first, second)


def _multiply_add(builder, first, second, third):
    """Return first × second + third, rounded once."""
    return _call(builder, "fma", first, second, third)


def _maximum(builder, first, second):
    """Return the larger of each pair."""
    return _call(builder, "maxnum", first, second)


multiply_add = _on_lanes(_multiply_add)
maximum = _on_lanes(_maximum)


@_on_lanes
def exp2_of_difference(builder, first, second):
    """Return 2 ** (first − second), within 2e-7, for differences up to 0; below −126 it stays at
    2 ** −126.
    """
    return _exp2(builder, _maximum(builder, builder.fsub(first, second), _constant(-126.0)))


@_on_lanes
def sigmoid(builder, lanes):
    """Return 1 / (1 + e ** −number), within 3e-7 of it."""
    power = builder.fmul(lanes, _constant(-1.0 / math.log(2)))
    # Beyond these powers of two the exponent would not fit a float32.
    power = _call(builder, "minnum", _maximum(builder, power, _constant(-126.0)), _constant(126.0))
    return builder.fdiv(_constant(1.0), builder.fadd(_constant(1.0), _exp2(builder, power)))


_LN2_SERIES = [math.log(2) ** n / math.factorial(n) for n in range(7)]


def _exp2(builder, power):
    """Return 2 ** power, for powers from −126 to 126."""
    whole = _call(builder, "floor", builder.fadd(power, _constant(0.5)))
    rest = builder.fsub(power, whole)  # −0.5 to 0.5, where six terms of the series suffice
    result = _constant(_LN2_SERIES[-1])
    for coefficient in reversed(_LN2_SERIES[:-1]):
        result = _multiply_add(builder, result, rest, _constant(coefficient))
    exponent = builder.shl(builder.fptosi(whole, _INTS), ir.Constant(_INTS, [23] * WIDTH))
    return builder.bitcast(builder.add(builder.bitcast(result, _INTS), exponent), _FLOATS)


def _sum_fours(builder, a, b, c, d):
    """Return in lane 4 r + n the sum of lanes 4 r to 4 r + 3 of the n-th argument."""

    def sum_pairs(first, second):  # per four lanes: (first's two sums of two, second's two)
        even = _by_fours([0, 2], [0, 2])
        odd = _by_fours([1, 3], [1, 3])
        return builder.fadd(_shuffle(builder, first, second, even), _shuffle(builder, first, second, odd))

    return sum_pairs(sum_pairs(a, b), sum_pairs(c, d))


sum_fours = _on_lanes(_sum_fours)


def _by_fours(of_first: list[int], of_second: list[int]) -> list[int]:
    """Return the shuffle that takes, in each group of four lanes, these of the first vector and
    these of the second.
    """
    return [four + lane for four in range(0, WIDTH, 4) for lane in [*of_first, *(WIDTH + n for n in of_second)]]


@intrinsic
def sum_lanes(typing_context, lanes):
    """Return the sum of all sixteen."""

    def generate(context, builder, signature, arguments):
        (floats,) = arguments
        for distance in (8, 4, 2, 1):
            floats = builder.fadd(floats, _shuffle(builder, floats, floats, [lane ^ distance for lane in range(WIDTH)]))
        return builder.extract_element(floats, ir.IntType(32)(0))

    return types.float32(Lanes), generate


@_on_lanes
def max_fours(builder, largest):
    """Return in each lane the maximum of its group of four."""
    for distance in (1, 2):
        order = [lane ^ distance for lane in range(WIDTH)]
        largest = _maximum(builder, largest, _shuffle(builder, largest, largest, order))
    return largest


def _same(builder, number, kind=_FLOATS):
    single = builder.insert_element(ir.Constant(kind, ir.Undefined), number, ir.IntType(32)(0))
    return _shuffle(builder, single, single, [0] * WIDTH)


@_on_lanes
def same(builder, number):
    """Return a float32 in all lanes."""
    return _same(builder, number)


@_on_lanes
def four_numbers(builder, first):
    """Return first, first + 1, first + 2, first + 3, four times over."""
    steps = ir.Constant(_FLOATS, [float(lane % 4) for lane in range(WIDTH)])
    return builder.fadd(_same(builder, first), steps)


@_on_lanes
def keep_between(builder, lanes, low, number, high, other):
    """Return `lanes` where low < number <= high, elsewhere the float `other`."""
    above = builder.fcmp_ordered("<", low, number)
    inside = builder.and_(above, builder.fcmp_ordered("<=", number, high))
    return builder.select(inside, lanes, _same(builder, other))


@numba.extending.intrinsic(prefer_literal=True)
def multiply_tile(typing_context, sums, sums_at, x, x_at, width, panel, panel_at, bias, bias_at, columns, rows):
    """Write bias + up to `TILE_ROWS` rows of x, `width` numbers each, × a panel [width, columns ×
    16] to sums [rows, columns × 16].

    `columns` must be a constant, and each number of rows has a loop of its own: each sum of a tile
    is a variable, to be kept in a register. x and the panel are both float32 or both bfloat16;
    bfloat16 needs an even `width` and a panel of pairs, [width / 2, columns × 16, 2]. Some
    processors multiply and add a pair at once (AVX512-BF16); on others the halves of a pair become
    float32 one after the other.
    """
    if not isinstance(columns, types.IntegerLiteral):
        return None
    num_columns = columns.literal_value
    if panel.dtype == types.float32:
        step, kind, single, halves, add_products = 1, _FLOATS, ir.FloatType(), (_whole,), _multiply_add
    else:  # a pair of bfloat16 numbers is moved as one 32-bit integer
        step, kind, single, halves, add_products = 2, _INTS, ir.IntType(32), (_lower, _upper), _multiply_add
        if has_products_of_pairs():
            halves, add_products = (_whole,), _add_products_of_pairs

    def generate(context, builder, signature, arguments):
        sums_value, sums_start, x_value, x_start, depth, panel_value, panel_start, *rest = arguments
        bias_value, bias_start, _, rows_value = rest
        integer = depth.type

        def plus(start, offset):
            return builder.add(start, integer(offset) if isinstance(offset, int) else offset)

        def read(array, value, at, kind):
            return builder.load(_address(context, builder, array, value, at, kind), align=4, typ=kind)

        def multiply(num_rows):
            first = [read(bias, bias_value, plus(bias_start, column * WIDTH), _FLOATS) for column in range(num_columns)]
            totals = [[cgutils.alloca_once_value(builder, start) for start in first] for _ in range(num_rows)]
            starts = [plus(x_start, builder.mul(depth, integer(row))) for row in range(num_rows)]
            with cgutils.for_range(builder, builder.sdiv(depth, integer(step))) as loop:
                line = plus(panel_start, builder.mul(loop.index, integer(step * num_columns * WIDTH)))
                weights = [read(panel, panel_value, plus(line, step * c * WIDTH), kind) for c in range(num_columns)]
                place = builder.mul(loop.index, integer(step))
                for half in halves:
                    factors = [half(builder, weight) for weight in weights]
                    for start, row in zip(starts, totals, strict=True):
                        number = half(builder, read(x, x_value, plus(start, place), single))
                        lanes = _same(builder, number, factors[0].type)
                        for factor, total in zip(factors, row, strict=True):
                            builder.store(add_products(builder, lanes, factor, builder.load(total)), total)
            for index, total in enumerate(total for row in totals for total in row):
                address = _address(context, builder, sums, sums_value, plus(sums_start, index * WIDTH), _FLOATS)
                builder.store(builder.load(total), address, align=4)

        for num_rows in range(1, TILE_ROWS + 1):
            with builder.if_then(builder.icmp_signed("==", rows_value, integer(num_rows))):
                multiply(num_rows)
        return context.get_dummy_value()

    integers = types.intp
    signature = (sums, integers, x, integers, integers, panel, integers, bias, integers, columns, integers)
    return types.void(*signature), generate


def _whole(builder, numbers):
    return numbers


def _lower(builder, pairs):
    """Return the first bfloat16 of each pair as a float32, or vectors of both."""
    sixteen = pairs.type(16) if isinstance(pairs.type, ir.IntType) else ir.Constant(_INTS, [16] * WIDTH)
    return builder.bitcast(builder.shl(pairs, sixteen), _floats_like(pairs))


def _upper(builder, pairs):
    """Return the second bfloat16 of each pair as a float32, or vectors of both."""
    ones = 0xFFFF0000
    mask = pairs.type(ones) if isinstance(pairs.type, ir.IntType) else ir.Constant(_INTS, [ones] * WIDTH)
    return builder.bitcast(builder.and_(pairs, mask), _floats_like(pairs))


def _floats_like(pairs):
    return ir.FloatType() if isinstance(pairs.type, ir.IntType) else _FLOATS


def _add_products_of_pairs(builder, first, second, total):
    """Add in each lane the products of two bfloat16 pairs. LLVM has an intrinsic for it;
    llvmlite lacks its type.
    """
    initialize_native_asmparser()
    kind = ir.FunctionType(_FLOATS, [_FLOATS, _INTS, _INTS])
    return builder.asm(kind, "vdpbf16ps $3, $2, $0", "=v,0,v,v", [total, first, second], side_effect=False)
