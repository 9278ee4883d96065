"""Caches of int8 and fp8: each number is stored as the nearest that the type has, and attention
reads it as such.
"""

import random

import pytest
import torch
from kernels.attention_ahead import assert_fits, compile_attention
from kernels.harness import DTYPES, UNTOUCHED, assert_close, assert_twin, compile_launches, each_twin, random_lengths
from kernels.test_unified_attention import BATCHES, make
from refusals import assert_refused

from minivllm.kernels import reshape_and_cache as cache_module
from minivllm.kernels.attention_configurations import configurations
from minivllm.kernels.cpu import attention_calls, cache_calls
from minivllm.kernels.cpu.cache_calls import quantize
from minivllm.kernels.reshape_and_cache import reshape_and_cache
from minivllm.kernels.unified_attention import unified_attention
from minivllm_lab.aot import TARGETS

pytestmark = pytest.mark.filterwarnings("ignore:divide by zero")  # NumPy, on a head that is all zero
FP8 = torch.float8_e4m3fn
BLOCKS, BLOCK, HEADS = 9, 4, 3


def empty_caches(head_dim, device="cpu"):
    """Return keys, values and their scales, filled with values that no kernel writes."""
    caches = torch.full((2, BLOCKS, BLOCK, HEADS, head_dim), -128, dtype=torch.int8, device=device)
    return [*caches, *torch.full((2, BLOCKS, HEADS, BLOCK), UNTOUCHED, device=device)]


def rows(tokens, head_dim, dtype=torch.float32):
    """Return keys and values as slices of one fused output: one head all zero, one with an outlier."""
    torch.manual_seed(tokens)
    fused = torch.randn(tokens, 3, HEADS, head_dim).to(dtype)
    fused[::3, :, 0] = 0
    fused[1::3, :, 1, 5] = 1e4
    return fused[:, 1], fused[:, 2]


def write(key, value, caches, slots, backend):
    keys, values, key_scales, value_scales = caches
    scales = {"key_scales": key_scales, "value_scales": value_scales}
    reshape_and_cache(key, value, keys, values, slots, **scales, backend=backend)


writing_twin = each_twin(cache_calls)


@pytest.mark.parametrize(("head_dim", "dtype"), [*zip((32, 80, 80), DTYPES, strict=True)])
@pytest.mark.usefixtures("writing_twin")
def test_kernel_and_twin_write_the_nearest_integers(device, head_dim, dtype):
    key, value = rows(7, head_dim, dtype)
    slots = torch.randperm(BLOCKS * BLOCK)[:7]
    slots[4] = -1
    kernel, twin = empty_caches(head_dim, device), empty_caches(head_dim)
    write(key.to(device), value.to(device), kernel, slots.to(device), "triton")
    write(key, value, twin, slots, "cpu")
    for mine, other in zip(kernel, twin, strict=True):
        if device.type == "cpu":
            assert_twin(mine, other, scale=0 if mine.dtype == torch.int8 else 1)
        else:  # a product that lies between two integers may go either way where it is rounded once instead of twice
            assert_close(mine.float(), other.float(), torch.float32, scale=1e5 if mine.dtype == torch.int8 else 1)
    for new, cache, scales in ((key, twin[0], twin[2]), (value, twin[1], twin[3])):
        for token, slot in enumerate(slots.tolist()):
            if slot >= 0:
                stored, scale = cache[slot // BLOCK, slot % BLOCK].float(), scales[slot // BLOCK, :, slot % BLOCK]
                row = new[token].float()
                assert_close(scale, row.abs().amax(-1) / 127)
                assert ((stored * scale[:, None] - row).abs() <= scale[:, None] * 0.5001).all()
                assert stored.abs().max() <= 127
        written = sorted(slot for slot in slots.tolist() if slot >= 0)
        others = [slot for slot in range(BLOCKS * BLOCK) if slot not in written]
        assert (cache.view(-1, HEADS, head_dim)[others] == -128).all()
        assert (scales.transpose(1, 2).reshape(-1, HEADS)[others] == UNTOUCHED).all()


@pytest.mark.filterwarnings("ignore:invalid value", "ignore:All-NaN")  # NumPy, in Triton's interpreter
@pytest.mark.parametrize(
    ("form", "cache_dtype"),
    [
        *((form, dtype) for form in ("numba", "torch") for dtype in (torch.float32, torch.int8, FP8)),
        *(("triton", dtype) for dtype in (torch.float32, torch.int8)),
        pytest.param("triton", FP8, marks=pytest.mark.gpu),  # the interpreter itself makes a number of it
    ],
)
def test_what_is_no_number_is_not_read_as_one(device, form, cache_dtype, monkeypatch):
    """Otherwise a broken model's text would look like any other."""
    if form == "numba":
        pytest.importorskip("numba")
    monkeypatch.setattr(cache_calls, "has_numba", lambda: form == "numba")
    key, value = rows(4, 32)
    key[1, 1, 9] = value[2, 0, 31] = torch.nan
    key[3, 2] = torch.nan
    caches = torch.zeros(2, BLOCKS, BLOCK, HEADS, 32).to(cache_dtype)
    scales = torch.zeros(2, BLOCKS, HEADS, BLOCK) if cache_dtype == torch.int8 else (None, None)
    backend, device = ("triton", device) if form == "triton" else ("cpu", "cpu")
    arguments = [None if item is None else item.to(device) for item in (key, value, *caches, torch.arange(4), *scales)]
    reshape_and_cache(*arguments[:5], key_scales=arguments[5], value_scales=arguments[6], backend=backend)
    caches, scales = ([None if tensor is None else tensor.cpu() for tensor in arguments[i : i + 2]] for i in (2, 5))
    for written, cache, scale in ((key, caches[0], scales[0]), (value, caches[1], scales[1])):
        read = cache[0].float() * (1 if scale is None else scale[0].T.unsqueeze(-1))
        assert torch.equal(read.isnan().any(-1), written.isnan().any(-1))


def test_fp8_is_written_and_what_is_too_large_becomes_the_largest(device):
    """The numbers are exact in fp8, because Triton's interpreter, unlike a GPU, rounds some others
    wrongly.
    """
    torch.manual_seed(0)
    numbers = (torch.randn(2, 6, HEADS, 32) * 20).to(FP8).float()
    numbers[:, 1, 1, :4] = torch.tensor([1e5, -1e5, 448.0, -449.0])
    if device.type == "cuda":
        numbers[:, 2:] = torch.randn(2, 4, HEADS, 32) * 20
    for backend in ("triton", "cpu"):
        caches = torch.zeros(2, BLOCKS, BLOCK, HEADS, 32).to(FP8).to(device if backend == "triton" else "cpu")
        key, value = numbers.to(caches.device)
        reshape_and_cache(key, value, *caches, torch.arange(6).to(caches.device) + 7, backend=backend)
        for cache, wanted in zip(caches, numbers, strict=True):
            stored = cache.float().cpu().view(-1, HEADS, 32)
            assert torch.equal(stored[7:13], wanted.clamp(-448, 448).to(FP8).float())
            assert not stored[:7].any()


# ---- attention over them -------------------------------------------------------------------------


def quantized(step):
    """Return the step with int8 caches, poison in unowned slots, and the float64 answer for the
    numbers that the integers stand for.
    """
    q, k_cache, v_cache, *tables = step.arguments
    stored, scales, stand_for = [], [], []
    for cache in (k_cache, v_cache):
        integers, scale = quantize(cache.nan_to_num(0.0))
        owned = ~cache.isnan().any(-1)
        stored.append(torch.where(owned[..., None], integers, 111).to(torch.int8))
        scale = torch.where(owned, scale, torch.nan)
        scales.append(scale.transpose(1, 2).contiguous())
        stand_for.append(stored[-1].double() * scale[..., None])
    step.arguments = (q, *stand_for, *tables)
    return (q, *stored, *tables), scales, step.expected


def check(step, backend, device="cpu", **options):
    arguments, scales, expected = quantized(step)
    splits = options.pop("splits", None)
    arguments = [argument.to(device) for argument in arguments]
    k_scales, v_scales = (scale.to(device) for scale in scales)
    actual = unified_attention(
        *arguments, step.scale, k_scales=k_scales, v_scales=v_scales, out=step.out.to(device), backend=backend,
        num_kv_splits=splits, **options,
    )  # fmt: skip
    assert_close(actual, expected(**options))


@pytest.mark.parametrize(("head_dim", "group"), [(32, 4), (64, 1), (80, 3), (128, 8)])
def test_the_kernel_reads_int8(device, head_dim, group):
    check(make(BATCHES["all kinds"], head_dim, group, kv_heads=1), "triton", device, splits=1)


@pytest.mark.parametrize(
    "options", [{"sliding_window": 9}, {"splits": 8}, {"splits": 3, "sliding_window": 40}], ids=str
)
def test_the_kernel_reads_int8_with_window_cap_and_splits(device, options):
    step = make([(1, 70), (1, 5), (4, 33), (0, 3)], kv_heads=1, block_size=5)
    check(step, "triton", device, **{"splits": 1, **options})


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_the_kernel_reads_int8_in_half_precision(device, dtype):
    check(make(BATCHES["decodes"], kv_heads=1, dtype=dtype), "triton", device, splits=1)


def test_the_kernel_reads_fp8(device):
    step = make(BATCHES["all kinds"])
    q, k_cache, v_cache, *tables = step.arguments
    stored = [cache.to(FP8) for cache in (k_cache, v_cache)]
    step.arguments = (q, *(cache.float() for cache in stored), *tables)
    arguments = [item.to(device) for item in (q, *stored, *tables)]
    result = unified_attention(*arguments, step.scale, out=step.out.to(device), backend="triton", num_kv_splits=1)
    assert_close(result, step.expected())


twin = each_twin(attention_calls)


@pytest.mark.parametrize("seed", range(5))
def test_the_twin_reads_int8(twin, seed):
    draw = random.Random(seed)
    sizes = {"block_size": draw.randint(1, 20), "dtype": draw.choice(DTYPES), "seed": seed}
    lengths = random_lengths(draw, 9, 40, 150)
    step = make(lengths, draw.choice([16, 32, 80]), draw.randint(1, 8), draw.randint(1, 3), **sizes)
    check(step, "cpu", sliding_window=draw.choice([None, 5, 70]))


# ---- compiled ------------------------------------------------------------------------------------


@pytest.mark.parametrize("target", TARGETS)
def test_int8_compiles_everywhere_and_spills_next_to_nothing(target):
    """The fastest tiles on sm_90 spill a few numbers per thread, and take 199 µs where tiles that
    fit take 301.
    """
    for query_rows, splits in ((4, 8), (4096, 1)):
        first = configurations(target, query_rows, 4, 128, 2, 1)[0]
        built = compile_attention(target, first, kv_dtype="int8", splits=splits)
        assert_fits(built, 64 if target == "sm_90" else 0)
        assert built.tensor_core


@pytest.mark.parametrize("target", ["sm_90", "sm_100"])
def test_fp8_compiles_where_there_is_fp8(monkeypatch, target):
    for item in (*configurations(target, 4, 4, 128, 2, 1), *configurations(target, 4096, 4, 128, 2, 1)):
        assert_fits(compile_attention(target, item, kv_dtype="float8_e4m3fn"))
    compile_launches(monkeypatch, cache_module, "reshape_and_cache_kernel", targets=[target])
    with torch.device("meta"):
        key, caches = torch.empty(7, 8, 128, dtype=torch.bfloat16), torch.empty(2, 9, 16, 8, 128, dtype=FP8)
        reshape_and_cache(key, key, *caches, torch.arange(7), backend="triton")


def test_the_quantizing_kernel_compiles(monkeypatch):
    compile_launches(monkeypatch, cache_module, "quantize_and_cache_kernel")
    with torch.device("meta"):
        key, caches = torch.empty(7, 8, 128, dtype=torch.bfloat16), torch.empty(2, 9, 16, 8, 128, dtype=torch.int8)
        write(key, key, (*caches, *torch.empty(2, 9, 8, 16)), torch.arange(7), "triton")


def test_scales_that_do_not_fit_are_refused():
    key, value = rows(3, 32)
    keys, values, key_scales, value_scales = empty_caches(32)
    slots = torch.arange(3)
    assert_refused(r"int8.*scales", reshape_and_cache, key, value, keys, values, slots)
    transposed = (keys, values, key_scales.transpose(1, 2), value_scales)
    assert_refused(r"float32.*\[9, 3, 4\]", write, key, value, transposed, slots, "cpu")
    assert_refused("scales", write, key, value, (keys.float(), values.float(), key_scales, value_scales), slots, "cpu")
    step = make([(1, 5)])
    arguments = quantized(step)[0]
    assert_refused(r"int8.*scales", unified_attention, *arguments, step.scale)
