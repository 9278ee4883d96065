"""Vectors of sixteen floats for numba, used by the CPU's attention, matrix products and element-wise passes.

numba does not vectorize attention's short loops (a head has 32 to 128 elements, and it cannot rule out that the sums it
writes alias the keys it reads), so these functions are explicit: `Lanes` is LLVM's <16 x float>, which LLVM splits to
the processor's vector width. Arrays are one-dimensional, without bounds checks; they hold float32, bfloat16 as uint16
(the upper half of a float32), float16 as int16, int8, or, as uint8, 4-bit integers from −8 to 7 stored with an offset
of 8, two per byte, low nibble first; an index counts numbers there too, not bytes.
"""

from __future__ import annotations

import math
from typing import Any

import numba.extending
from llvmlite import ir
from llvmlite.binding import get_host_cpu_features, initialize_native_asmparser
from numba import types
from numba.core import cgutils, config
from numba.extending import models, register_model

intrinsic: Any = numba.extending.intrinsic  # it returns numba functions, which a type checker cannot see through

WIDTH = 16
_FLOATS = ir.VectorType(ir.FloatType(), WIDTH)
_INTS = ir.VectorType(ir.IntType(32), WIDTH)


class _LanesType(types.Type):
    def __init__(self) -> None:
        super().__init__(name="Lanes")


Lanes = _LanesType()


@register_model(_LanesType)
class _LanesModel(models.PrimitiveModel):
    def __init__(self, manager, kind) -> None:
        super().__init__(manager, kind, _FLOATS)


def _address(context, builder, array_type, array, index, kind):
    """Pointer to `kind` at `index` of an array."""
    data = context.make_array(array_type)(context, builder, array).data
    element = context.get_data_type(array_type.dtype)
    start = builder.gep(builder.bitcast(data, element.as_pointer()), [index], source_etype=element)
    return builder.bitcast(start, kind.as_pointer())


def _load(context, builder, array_type, array, index, count):
    """`count` numbers from `index` on, as floats."""
    if array_type.dtype == types.float32:
        kind = ir.VectorType(ir.FloatType(), count)
        return builder.load(_address(context, builder, array_type, array, index, kind), align=4, typ=kind)
    if array_type.dtype == types.int8:
        kind = ir.VectorType(ir.IntType(8), count)
        integers = builder.load(_address(context, builder, array_type, array, index, kind), align=1, typ=kind)
        return builder.sitofp(integers, ir.VectorType(ir.FloatType(), count))
    if array_type.dtype == types.uint8:
        return _load_nibbles(context, builder, array_type, array, index, count)
    if array_type.dtype == types.int16:
        kind = ir.VectorType(ir.HalfType(), count)
        halves = builder.load(_address(context, builder, array_type, array, index, kind), align=2, typ=kind)
        return builder.fpext(halves, ir.VectorType(ir.FloatType(), count))
    kind, wide = ir.VectorType(ir.IntType(16), count), ir.VectorType(ir.IntType(32), count)
    halves = builder.load(_address(context, builder, array_type, array, index, kind), align=2, typ=kind)
    bits = builder.shl(builder.zext(halves, wide), ir.Constant(wide, [16] * count))
    return builder.bitcast(bits, ir.VectorType(ir.FloatType(), count))


def _load_nibbles(context, builder, array_type, array, index, count):
    """`count` integers of 4 bits, from an even `index` on, as floats."""
    kind, both = ir.VectorType(ir.IntType(8), count // 2), ir.VectorType(ir.IntType(8), count)
    at = builder.lshr(index, index.type(1))
    pairs = builder.load(_address(context, builder, array_type, array, at, kind), align=1, typ=kind)
    low = builder.and_(pairs, ir.Constant(kind, [15] * (count // 2)))
    high = builder.lshr(pairs, ir.Constant(kind, [4] * (count // 2)))
    order = [number // 2 + number % 2 * (count // 2) for number in range(count)]
    integers = builder.shuffle_vector(low, high, ir.Constant(ir.VectorType(ir.IntType(32), count), order))
    integers = builder.sub(integers, ir.Constant(both, [8] * count))
    return builder.sitofp(integers, ir.VectorType(ir.FloatType(), count))


def _shuffle(builder, first, second, order):
    return builder.shuffle_vector(first, second, ir.Constant(ir.VectorType(ir.IntType(32), WIDTH), order))


def _call(builder, name, *lanes):
    """LLVM's own function `name` on Lanes."""
    kind = ir.FunctionType(_FLOATS, [_FLOATS] * len(lanes))
    function = cgutils.get_or_insert_function(builder.module, kind, f"llvm.{name}.v{WIDTH}f32")
    return builder.call(function, lanes)


def _constant(number: float):
    return ir.Constant(_FLOATS, [number] * WIDTH)


def has_wide_registers() -> bool:
    """Whether a vector fits one register (of which there are then 32); otherwise it takes two or four."""
    return _compiles_for("avx512f")


def has_products_of_pairs() -> bool:
    """Whether there is a multiply-add of bfloat16 pairs."""
    return _compiles_for("avx512bf16")


def _compiles_for(feature: str) -> bool:
    """Whether numba uses a feature: the processor's, unless `NUMBA_CPU_FEATURES` lists others."""
    wanted = config.CPU_FEATURES  # pyright: ignore[reportAttributeAccessIssue]
    if wanted is None:
        return get_host_cpu_features().get(feature, False)
    return f"+{feature}" in wanted.split(",")


@intrinsic
def load(typing_context, array, index):
    """Sixteen numbers of `array` from `index` on."""

    def generate(context, builder, signature, arguments):
        return _load(context, builder, array, *arguments, WIDTH)

    return Lanes(array, types.intp), generate


@intrinsic
def load_four(typing_context, array, index):
    """Four numbers of `array` from `index` on, four times over: abcd abcd abcd abcd."""

    def generate(context, builder, signature, arguments):
        four = _load(context, builder, array, *arguments, 4)
        return _shuffle(builder, four, four, [lane % 4 for lane in range(WIDTH)])

    return Lanes(array, types.intp), generate


@intrinsic
def load_one(typing_context, array, index):
    """One number of `array`, in all lanes."""

    def generate(context, builder, signature, arguments):
        one = _load(context, builder, array, *arguments, 1)
        return _shuffle(builder, one, one, [0] * WIDTH)

    return Lanes(array, types.intp), generate


@intrinsic
def store(typing_context, array, index, lanes):
    """Write sixteen numbers to `array`, of float32 or bfloat16, from `index` on."""

    def generate(context, builder, signature, arguments):
        values, start, lanes = arguments
        numbers, size = _as_element(builder, array, lanes)
        builder.store(numbers, _address(context, builder, array, values, start, numbers.type), align=size)
        return context.get_dummy_value()

    return types.void(array, types.intp, Lanes), generate


@intrinsic
def store_some(typing_context, array, index, lanes, count):
    """As `store`, but the first `count` of the sixteen only."""

    def generate(context, builder, signature, arguments):
        values, start, lanes, count = arguments
        numbers, size = _as_element(builder, array, lanes)
        place = _address(context, builder, array, values, start, numbers.type)
        lane = ir.Constant(_INTS, list(range(WIDTH)))
        wanted = builder.icmp_signed("<", lane, _same(builder, builder.trunc(count, ir.IntType(32)), _INTS))
        kind = ir.FunctionType(ir.VoidType(), [numbers.type, place.type, ir.IntType(32), wanted.type])
        name = f"llvm.masked.store.v{WIDTH}{'i16' if size == 2 else 'f32'}.p0"
        builder.call(
            cgutils.get_or_insert_function(builder.module, kind, name), [numbers, place, ir.IntType(32)(size), wanted]
        )
        return context.get_dummy_value()

    return types.void(array, types.intp, Lanes, types.intp), generate


def _as_element(builder, array, lanes):
    """Floats converted to the array's type, float32 or bfloat16, and the bytes per element."""
    return (_to_bfloat16(builder, lanes), 2) if array.dtype == types.uint16 else (lanes, 4)


def _to_bfloat16(builder, floats):
    """The upper halves, rounded to nearest, ties to even; NaN stays NaN."""
    bits, sixteen = builder.bitcast(floats, _INTS), ir.Constant(_INTS, [16] * WIDTH)
    odd = builder.and_(builder.lshr(bits, sixteen), ir.Constant(_INTS, [1] * WIDTH))
    rounded = builder.add(builder.add(bits, ir.Constant(_INTS, [0x7FFF] * WIDTH)), odd)
    nan = builder.fcmp_unordered("uno", floats, floats)
    rounded = builder.select(nan, ir.Constant(_INTS, [0x7FC00000] * WIDTH), rounded)
    return builder.trunc(builder.lshr(rounded, sixteen), ir.VectorType(ir.IntType(16), WIDTH))


@intrinsic
def store_sums(typing_context, array, index, lanes):
    """Write four floats to `array` from `index` on, the n-th being the sum of lanes n, n + 4, n + 8 and n + 12."""

    def generate(context, builder, signature, arguments):
        values, start, floats = arguments
        for count in (8, 4):  # add the upper half to the lower
            low, high = (
                builder.shuffle_vector(floats, floats, ir.Constant(ir.VectorType(ir.IntType(32), count), order))
                for order in (list(range(count)), list(range(count, 2 * count)))
            )
            floats = builder.fadd(low, high)
        kind = ir.VectorType(ir.FloatType(), 4)
        builder.store(floats, _address(context, builder, array, values, start, kind), align=4)
        return context.get_dummy_value()

    return types.void(array, types.intp, Lanes), generate


@intrinsic
def prefetch(typing_context, array, index):
    """Prefetch the cache line that holds `index`."""

    def generate(context, builder, signature, arguments):
        place = _address(context, builder, array, *arguments, ir.IntType(8))
        word = ir.IntType(32)
        kind = ir.FunctionType(ir.VoidType(), [place.type, word, word, word])
        function = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
        builder.call(function, [place, word(0), word(2), word(1)])  # for reading, keep in all levels, data cache
        return context.get_dummy_value()

    return types.void(array, types.intp), generate


@intrinsic
def zero(typing_context):
    """Zero in all lanes."""
    return Lanes(), lambda context, builder, signature, arguments: _constant(0.0)


@intrinsic
def add(typing_context, first, second):
    """first + second."""
    return Lanes(Lanes, Lanes), lambda context, builder, signature, arguments: builder.fadd(*arguments)


@intrinsic
def subtract(typing_context, first, second):
    """first − second."""
    return Lanes(Lanes, Lanes), lambda context, builder, signature, arguments: builder.fsub(*arguments)


@intrinsic
def multiply(typing_context, first, second):
    """first × second."""
    return Lanes(Lanes, Lanes), lambda context, builder, signature, arguments: builder.fmul(*arguments)


@intrinsic
def multiply_add(typing_context, first, second, third):
    """first × second + third, rounded once."""
    return Lanes(Lanes, Lanes, Lanes), lambda context, builder, signature, arguments: _call(builder, "fma", *arguments)


@intrinsic
def maximum(typing_context, first, second):
    """The larger of each pair."""

    def generate(context, builder, signature, arguments):
        return _call(builder, "maxnum", *arguments)

    return Lanes(Lanes, Lanes), generate


@intrinsic
def exp2_of_difference(typing_context, first, second):
    """2 ** (first − second), within 2e-7 of it, for differences up to 0; below −126 it stays at 2 ** −126."""

    def generate(context, builder, signature, arguments):
        return _exp2(builder, _call(builder, "maxnum", builder.fsub(*arguments), _constant(-126.0)))

    return Lanes(Lanes, Lanes), generate


@intrinsic
def sigmoid(typing_context, lanes):
    """1 / (1 + e ** −number), within 3e-7 of it."""

    def generate(context, builder, signature, arguments):
        power = builder.fmul(arguments[0], _constant(-1.0 / math.log(2)))
        power = _call(builder, "minnum", _call(builder, "maxnum", power, _constant(-126.0)), _constant(126.0))
        return builder.fdiv(_constant(1.0), builder.fadd(_constant(1.0), _exp2(builder, power)))

    return Lanes(Lanes), generate


_LN2_SERIES = [math.log(2) ** n / math.factorial(n) for n in range(7)]


def _exp2(builder, power):
    """2 ** power, for powers from −126 to 126."""
    whole = _call(builder, "floor", builder.fadd(power, _constant(0.5)))
    rest = builder.fsub(power, whole)  # −0.5 to 0.5, where six terms of the series suffice
    result = _constant(_LN2_SERIES[-1])
    for coefficient in reversed(_LN2_SERIES[:-1]):
        result = _call(builder, "fma", result, rest, _constant(coefficient))
    exponent = builder.shl(builder.fptosi(whole, _INTS), ir.Constant(_INTS, [23] * WIDTH))
    return builder.bitcast(builder.add(builder.bitcast(result, _INTS), exponent), _FLOATS)


@intrinsic
def sum_fours(typing_context, a, b, c, d):
    """Lane 4 r + n of the result is the sum of lanes 4 r to 4 r + 3 of the n-th argument."""

    def generate(context, builder, signature, arguments):
        def sum_pairs(first, second):  # per four lanes: (first's two sums of two, second's two)
            even, odd = _by_fours([0, 2], [0, 2]), _by_fours([1, 3], [1, 3])
            return builder.fadd(_shuffle(builder, first, second, even), _shuffle(builder, first, second, odd))

        a, b, c, d = arguments
        return sum_pairs(sum_pairs(a, b), sum_pairs(c, d))

    return Lanes(Lanes, Lanes, Lanes, Lanes), generate


def _by_fours(of_first: list[int], of_second: list[int]) -> list[int]:
    """The shuffle that takes, in each group of four lanes, these of the first vector and these of the second."""
    return [four + lane for four in range(0, WIDTH, 4) for lane in [*of_first, *(WIDTH + n for n in of_second)]]


@intrinsic
def sum_lanes(typing_context, lanes):
    """The sum of all sixteen."""

    def generate(context, builder, signature, arguments):
        (floats,) = arguments
        for distance in (8, 4, 2, 1):
            floats = builder.fadd(floats, _shuffle(builder, floats, floats, [lane ^ distance for lane in range(WIDTH)]))
        return builder.extract_element(floats, ir.IntType(32)(0))

    return types.float32(Lanes), generate


@intrinsic
def max_fours(typing_context, lanes):
    """The maximum of each group of four lanes, in all four of them."""

    def generate(context, builder, signature, arguments):
        (largest,) = arguments
        for distance in (1, 2):
            order = [lane ^ distance for lane in range(WIDTH)]
            largest = _call(builder, "maxnum", largest, _shuffle(builder, largest, largest, order))
        return largest

    return Lanes(Lanes), generate


def _same(builder, number, kind=_FLOATS):
    single = builder.insert_element(ir.Constant(kind, ir.Undefined), number, ir.IntType(32)(0))
    return _shuffle(builder, single, single, [0] * WIDTH)


@intrinsic
def same(typing_context, number):
    """A float32 in all lanes."""
    return Lanes(types.float32), lambda context, builder, signature, arguments: _same(builder, arguments[0])


@intrinsic
def four_numbers(typing_context, first):
    """first, first + 1, first + 2, first + 3, four times over."""

    def generate(context, builder, signature, arguments):
        steps = ir.Constant(_FLOATS, [float(lane % 4) for lane in range(WIDTH)])
        return builder.fadd(_same(builder, arguments[0]), steps)

    return Lanes(types.float32), generate


@intrinsic
def keep_between(typing_context, lanes, low, number, high, other):
    """`lanes` where low < number <= high, elsewhere the float `other`."""

    def generate(context, builder, signature, arguments):
        lanes, low, number, high, other = arguments
        inside = builder.and_(builder.fcmp_ordered("<", low, number), builder.fcmp_ordered("<=", number, high))
        return builder.select(inside, lanes, _same(builder, other))

    return Lanes(Lanes, Lanes, Lanes, Lanes, types.float32), generate


@numba.extending.intrinsic(prefer_literal=True)
def multiply_tile(typing_context, sums, sums_at, x, x_at, width, panel, panel_at, bias, bias_at, columns, rows):
    """sums [rows, columns × 16] = bias + rows of x, `width` numbers each, × a panel [width, columns × 16].

    `columns` and `rows` must be constants: each sum of a tile is a variable of its own, to be kept in a register. x and
    the panel are both float32 or both bfloat16; bfloat16 needs an even `width` and a panel of pairs,
    [width / 2, columns × 16, 2], which the processor multiplies and adds two at a time (AVX512-BF16).
    """
    if not (isinstance(columns, types.IntegerLiteral) and isinstance(rows, types.IntegerLiteral)):
        return None
    num_columns, num_rows = columns.literal_value, rows.literal_value
    if panel.dtype == types.float32:
        step, kind, one, add_products = 1, _FLOATS, ir.FloatType(), _add_products
    else:
        step, kind, one, add_products = 2, _INTS, ir.IntType(32), _add_products_of_pairs

    def generate(context, builder, signature, arguments):
        sums_value, sums_start, x_value, x_start, depth, panel_value, panel_start, bias_value, bias_start, *_ = (
            arguments
        )
        integer = depth.type

        def plus(start, offset):
            return builder.add(start, integer(offset) if isinstance(offset, int) else offset)

        def read(array, value, at, kind):
            return builder.load(_address(context, builder, array, value, at, kind), align=4, typ=kind)

        first = [read(bias, bias_value, plus(bias_start, column * WIDTH), _FLOATS) for column in range(num_columns)]
        totals = [[cgutils.alloca_once_value(builder, start) for start in first] for _ in range(num_rows)]
        starts = [plus(x_start, builder.mul(depth, integer(row))) for row in range(num_rows)]
        with cgutils.for_range(builder, builder.sdiv(depth, integer(step))) as loop:
            line = plus(panel_start, builder.mul(loop.index, integer(step * num_columns * WIDTH)))
            weights = [read(panel, panel_value, plus(line, step * c * WIDTH), kind) for c in range(num_columns)]
            place = builder.mul(loop.index, integer(step))
            for start, row in zip(starts, totals, strict=True):
                number = _same(builder, read(x, x_value, plus(start, place), one), kind)
                for weight, total in zip(weights, row, strict=True):
                    builder.store(add_products(builder, number, weight, builder.load(total)), total)
        for index, total in enumerate(total for row in totals for total in row):
            address = _address(context, builder, sums, sums_value, plus(sums_start, index * WIDTH), _FLOATS)
            builder.store(builder.load(total), address, align=4)
        return context.get_dummy_value()

    integers = types.intp
    given = (sums, integers, x, integers, integers, panel, integers, bias, integers, columns, rows)
    return types.void(*given), generate


def _add_products(builder, first, second, total):
    return _call(builder, "fma", first, second, total)


def _add_products_of_pairs(builder, first, second, total):
    """Add in each lane the products of two bfloat16 pairs. LLVM has an intrinsic for it; llvmlite lacks its type."""
    initialize_native_asmparser()
    kind = ir.FunctionType(_FLOATS, [_FLOATS, _INTS, _INTS])
    return builder.asm(kind, "vdpbf16ps $3, $2, $0", "=v,0,v,v", [total, first, second], side_effect=False)
