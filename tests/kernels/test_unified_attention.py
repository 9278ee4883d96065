"""The one attention: every form against float64, on ragged batches over a cache full of poison
where no request reads.
"""

import itertools
import math
import random

import pytest
import torch
from kernels import harness
from kernels.attention_ahead import assert_fits, compile_attention, compile_combine
from refusals import assert_refused

from minivllm.kernels.attention_configurations import automatic_splits, configurations
from minivllm.kernels.cpu import attention_calls
from minivllm.kernels.unified_attention import unified_attention
from minivllm_lab.aot import TARGETS

BLOCK = 16
pytestmark = pytest.mark.filterwarnings("ignore:invalid value")  # NumPy, on rows that no query has

# (queries, keys) of each sequence. A decode has one query, a prefill as many as keys, a chunk or a
# verification fewer.
BATCHES = {
    "decodes": [(1, 1), (1, BLOCK - 1), (1, BLOCK), (1, BLOCK + 1), (1, 70)],
    "prefills": [(1, 1), (BLOCK - 1, BLOCK - 1), (BLOCK + 1, BLOCK + 1), (35, 35)],
    "all kinds": [(0, 7), (1, 33), (20, 20), (5, 64), (0, 0), (17, 50), (1, 32), (0, 1)],
}


class Step(harness.PagedStep):
    def attend(self, backend, **options):
        return unified_attention(*self.arguments, self.scale, out=self.out, backend=backend, **options)


def make(lengths, head_dim=32, group=4, kv_heads=2, **options):
    caches = [(kv_heads, head_dim)] * 2
    return harness.make_step(Step, lengths, (group * kv_heads, head_dim), *caches, **options)


# ---- the kernel ----------------------------------------------------------------------------------


@pytest.mark.parametrize("head_dim", harness.HEAD_DIMS)
def test_all_kinds_of_steps_in_one_launch(device, head_dim):
    make(BATCHES["all kinds"], head_dim, group=3, kv_heads=2 if head_dim == 80 else 1).check_kernel(device)
    if head_dim == 80:
        make(BATCHES["decodes"], head_dim, kv_heads=1).check_kernel(device)
        make(BATCHES["prefills"], head_dim, kv_heads=1).check_kernel(device)


@pytest.mark.parametrize(("splits", "window"), [(1, None), (3, None), (2, 20)])
def test_a_step_that_is_known_to_be_decodes(device, splits, window):
    step = make([(1, 1), (1, BLOCK + 1), (0, 9), (1, 50), (0, 0)], group=5, kv_heads=2)
    step.check_kernel(device, splits=splits, sliding_window=window, max_query_len=1)


@pytest.mark.parametrize("group", harness.GROUPS)
def test_any_group(device, group):
    make([(1, 20), (9, 9), (6, 37)], group=group, kv_heads=1).check_kernel(device)


@pytest.mark.parametrize("block_size", [1, 5, 8, 64])
def test_any_block_size(device, block_size):
    make([(1, 65), (7, 30), (33, 33)], block_size=block_size, kv_heads=1).check_kernel(device)


@pytest.mark.parametrize("window", [1, 7, 33, 1000])
def test_a_sliding_window(device, window):
    make(BATCHES["all kinds"], kv_heads=1).check_kernel(device, sliding_window=window)


@pytest.mark.parametrize(("splits", "window"), [(2, None), (3, 40), (8, 1)])
def test_splits_of_which_some_are_empty(device, splits, window):
    step = make([(1, 100), (1, 5), (4, 38), (0, 3), (9, 9)], head_dim=80, kv_heads=1)
    step.check_kernel(device, splits=splits, sliding_window=window)


@pytest.mark.filterwarnings("ignore:All-NaN")
@pytest.mark.parametrize("first", [0, 64, 128], ids="from key {}".format)
def test_a_split_of_nothing_but_nan_is_not_forgotten(device, first):
    step = make([(1, 150)], padding=0)
    places = torch.arange(first, min(first + 64, 150))
    step.arguments[1][step.arguments[5][0][places // BLOCK].long(), places % BLOCK, 0] = torch.nan
    result = step.on(device).attend("triton", num_kv_splits=3).isnan().all(-1)
    assert result.tolist() == [[True] * 4 + [False] * 4]


@pytest.mark.parametrize("seed", range(3))
def test_random_steps(device, seed):
    draw = random.Random(seed)
    sizes = {"block_size": draw.randint(4, 20), "seed": seed}
    step = make(harness.random_lengths(draw, 5, 25, 40), 32, draw.randint(1, 8), draw.randint(1, 2), **sizes)
    step.check_kernel(device, splits=draw.randint(1, 4), sliding_window=draw.choice([None, draw.randint(1, 50)]))


def test_extreme_scores_neither_overflow_nor_vanish(device):
    step = make([(1, 40), (12, 12)])
    step.arguments[0].mul_(1e3)
    step.check_kernel(device)


def test_queries_that_are_a_slice_of_a_fused_output(device):
    step = make([(1, 20), (9, 30)], padding=0).on(device)
    expected = step.attend("triton", num_kv_splits=1)
    q = step.arguments[0]
    fused = torch.cat([torch.full_like(q, torch.nan), q, torch.full_like(q, torch.nan)], dim=1)
    sliced = unified_attention(fused[:, 8:16], *step.arguments[1:], step.scale, backend="triton", num_kv_splits=1)
    assert torch.equal(sliced, expected)


@pytest.mark.parametrize("dtype", harness.DTYPES)
def test_kernel_and_twin_are_alike(device, dtype):
    step = make(BATCHES["all kinds"], head_dim=64, kv_heads=1, dtype=dtype)
    kernel, twin = step.on(device).attend("triton", num_kv_splits=1), step.on("cpu").attend("cpu")
    harness.assert_twin(kernel, twin)


# ---- the forms of the twin -----------------------------------------------------------------------


twin = harness.each_twin(attention_calls)


@pytest.mark.parametrize(("head_dim", "group"), [(32, 8), (64, 3), (80, 1), (80, 4), (128, 4), (128, 8)])
def test_the_twin_is_right(twin, head_dim, group):
    for batch in BATCHES.values():
        step = make(batch, head_dim, group)
        harness.assert_close(step.attend("cpu"), step.expected())


@pytest.mark.parametrize("window", [1, 9, 33])
def test_the_twin_with_a_window(twin, window):
    step = make([*BATCHES["all kinds"], (70, 200), (1, 300)], block_size=5)
    step.arguments[0].mul_(4)
    harness.assert_close(step.attend("cpu", sliding_window=window), step.expected(sliding_window=window))


@pytest.mark.parametrize("threads", [1, 2])
def test_the_twin_gives_the_same_on_any_number_of_threads(twin, threads):
    step = make(BATCHES["all kinds"] * 5)
    with harness.on_threads(threads):
        result = step.attend("cpu")
    harness.assert_close(result, step.expected())


@pytest.mark.parametrize("dtype", harness.DTYPES)
def test_the_twin_in_any_type(twin, dtype):
    step = make(BATCHES["all kinds"], dtype=dtype)
    harness.assert_close(step.attend("cpu"), step.expected())


@pytest.mark.parametrize("options", [{}, {"sliding_window": 9}], ids=str)
def test_what_there_was_before_is_right_too(options):
    for batch in BATCHES.values():
        step = make(batch, head_dim=80, group=3)
        harness.assert_close(step.attend("naive", **options), step.expected(**options))


# ---- which configuration -------------------------------------------------------------------------


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("rows", [4, 4096], ids=["decode", "prefill"])
def test_every_configuration_spills_nothing_and_the_first_multiplies_matrices_and_loads_16_bytes(target, rows):
    choices = configurations(target, rows, 4, 128, 2)
    for choice in choices:
        assert_fits(compile_attention(target, choice))
    decode = {"splits": 8, "single": True} if rows == 4 else {}
    built = assert_fits(compile_attention(target, choices[0], **decode))
    assert built.tensor_core
    assert max(built.loads) == 16


@pytest.mark.parametrize(
    ("target", "options"),
    [
        ("sm_80", {"sliding_window": 4096}),
        ("sm_90", {"head_dim": 80, "group": 7}),
        ("sm_100", {"wide_offsets": True}),
        ("gfx942", {"dtype": "float32", "head_dim": 64}),
    ],
    ids=str,
)
def test_its_variants_spill_nothing(target, options):
    padded = 64 if options.get("head_dim") == 64 else 128
    choices = configurations(target, 4096, options.get("group", 4), padded, 4 if "dtype" in options else 2)
    assert_fits(compile_attention(target, choices[0], **options))


def test_the_combination_of_splits_compiles():
    for target in TARGETS:
        assert_fits(compile_combine(target))


@pytest.mark.parametrize("target", TARGETS)
def test_every_configuration_holds_a_group_and_is_a_power_of_two(target):
    sizes = itertools.product([1, 4, 16, 17, 33, 4096], [1, 3, 8, 71], [32, 128, 256])
    for (rows, group, padded_dim), (size, cache_size) in itertools.product(sizes, [(2, 2), (2, 1), (4, 4), (4, 1)]):
        choices = configurations(target, rows, group, padded_dim, size, cache_size)
        assert choices
        for choice in choices:
            assert choice.block_m >= max(16, group)
            assert math.log2(choice.block_m).is_integer()


def test_splits_fill_the_device_and_are_never_too_short():
    assert automatic_splits(programs=8, keys=32768, wanted=264) == 33
    assert automatic_splits(programs=8, keys=600, wanted=264) == 2
    assert automatic_splits(programs=8, keys=100, wanted=264) == 1
    assert automatic_splits(programs=5000, keys=32768, wanted=264) == 1
    assert automatic_splits(programs=0, keys=10**6, wanted=264) == 128


@pytest.mark.gpu
def test_the_splits_that_a_gpu_chooses_give_the_same():
    step = make([(1, 3000)], head_dim=128, group=4, kv_heads=8, dtype=torch.bfloat16).on("cuda")
    whole = step.attend("triton", num_kv_splits=1).clone()
    harness.assert_close(step.attend("triton"), whole, scale=2)


@pytest.mark.gpu
def test_caches_beyond_two_thousand_million_elements():
    blocks, shape = 2**31 // (BLOCK * 8 * 128) + 2, (BLOCK, 8, 128)
    caches = torch.zeros(2, blocks, *shape, dtype=torch.float16, device="cuda")
    step = make([(1, 30)], head_dim=128, kv_heads=8, dtype=torch.float16).on("cuda")
    q, k_cache, v_cache, starts, lengths, _ = step.arguments
    last = torch.tensor([[blocks - 1, blocks - 2]], dtype=torch.int32, device="cuda")
    for far, near in zip(caches, (k_cache, v_cache), strict=True):
        far[last[0].long()] = near[step.arguments[5][0].long()]
    result = unified_attention(q, caches[0], caches[1], starts, lengths, last, step.scale)
    harness.assert_close(result[:1], step.expected()[:1])


# ---- input ---------------------------------------------------------------------------------------


def test_nothing_to_attend():
    step = make([], padding=2)
    assert (step.attend("cpu") == harness.UNTOUCHED).all()
    step = make([(0, 5), (0, 0)], padding=0)
    assert step.attend("cpu").shape == (0, 8, 32)


def change(step, index, tensor):
    return (*step.arguments[:index], tensor, *step.arguments[index + 1 :])


def test_input_that_cannot_work_is_refused():
    step = make([(1, 20), (2, 5)], padding=0)
    q, k_cache, _, starts, lengths, table = step.arguments
    wrong = {
        "heads a multiple of kv_heads": change(step, 0, q[:, :7]),
        "must have the same shape": change(step, 2, k_cache[:-1]),
        "must have the same dtype": change(step, 0, q.bfloat16()),
        "query_start_loc": change(step, 3, starts[:-1]),
        "seq_lens must be int32": change(step, 4, lengths.long()),
        "last dimension of block_table": change(step, 5, table.repeat_interleave(2, 1)[:, ::2]),
    }
    for about, arguments in wrong.items():
        assert_refused(about, unified_attention, *arguments, step.scale)
    for about, options in {
        "sliding_window": {"sliding_window": 0},
        "unknown backend": {"backend": "cuda"},
    }.items():
        assert_refused(about, unified_attention, *step.arguments, step.scale, **options)
    assert_refused("scale must be greater than 0", unified_attention, *step.arguments, 0.0)
