"""Attention over paged latents: every form against float64, on ragged batches over a cache full
of poison.
"""

from dataclasses import dataclass

import pytest
import torch
from kernels.harness import (
    DTYPES,
    assert_close,
    assert_compiles,
    assert_twin,
    each_twin,
    gather_paged,
    poisoned_caches,
    reference_attention,
    start_locations,
    trace_launches,
)

from minivllm.kernels import mla_attention as module
from minivllm.kernels.attention_arguments import MLAArguments
from minivllm.kernels.attention_configurations import Configuration
from minivllm.kernels.attention_launch import padded
from minivllm.kernels.cpu import mla_calls
from minivllm.kernels.mla_attention import (
    MOST_HEADS,
    concat_and_cache_mla,
    concat_and_cache_mla_kernel,
    launch_triton,
    mla_attention,
    mla_attention_kernel,
    mla_configurations,
)
from minivllm.platforms.triton_utils import tl, triton
from minivllm_lab.aot import TARGETS
from minivllm_lab.kernel_trace import trace_kernel

BLOCK = 16
pytestmark = pytest.mark.filterwarnings("ignore:invalid value")  # NumPy, on rows that no query has
UNTOUCHED = -7.0

# (queries, keys) of each sequence. A decode has one query, a prefill as many as keys, a chunk or a
# verification fewer.
MIXED = [(0, 7), (1, 33), (17, 17), (5, 40), (0, 0), (1, 1), (0, 1), (1, BLOCK + 1)]


@dataclass
class Step:
    """The arguments of `mla_attention`, the tensor it should write to, and the values expected
    there.
    """

    arguments: tuple
    scale: float
    rank: int
    out: torch.Tensor
    lengths: list[tuple[int, int]]

    def on(self, device):
        tensors = tuple(tensor.to(device) for tensor in self.arguments)
        return Step(tensors, self.scale, self.rank, self.out.to(device).clone(), self.lengths)

    def attend(self, backend, **options):
        return mla_attention(
            *self.arguments, self.scale, kv_lora_rank=self.rank, out=self.out, backend=backend, **options
        )

    def expected(self):
        """Return the expected output with one KV head, whose keys are whole rows of the cache and
        whose values are their first `rank` numbers.
        """
        q, cache, starts, _, table = self.arguments
        result = self.out.double().fill_(UNTOUCHED)
        for row, (queries, keys) in enumerate(self.lengths):
            if queries:
                first = int(starts[row])
                rows = gather_paged(cache, table, row, keys).unsqueeze(1)
                attended = reference_attention(q[first : first + queries], rows, rows, self.scale)
                result[first : first + queries] = attended[..., : self.rank]
        return result


def make(lengths, rank=48, rope=16, heads=8, block_size=BLOCK, dtype=torch.float32, padding=3, seed=0):
    """Return a step with `padding` tokens of no sequence. Slots that hold no key of any sequence
    are NaN.
    """
    torch.manual_seed(seed)
    queries, keys = [length for length, _ in lengths], [length for _, length in lengths]
    table, (cache,) = poisoned_caches(keys, block_size, (rank + rope,), dtype=dtype, seed=seed)
    q = torch.randn(sum(queries) + padding, heads, rank + rope).to(dtype)
    out = torch.full((len(q), heads, rank), UNTOUCHED, dtype=dtype)
    tensors = (q, cache, start_locations(queries), torch.tensor(keys, dtype=torch.int32), table)
    return Step(tensors, (rank + rope) ** -0.5, rank, out, lengths)


# ---- the kernel ----------------------------------------------------------------------------------


@pytest.mark.parametrize(("rank", "rope", "heads"), [(56, 8, 5), (32, 8, 1), (40, 24, 16), (64, 16, 21)], ids=str)
def test_all_kinds_of_steps_in_one_launch(device, rank, rope, heads):
    step = make(MIXED, rank, rope, heads)
    result = step.on(device).attend("triton", num_kv_splits=1)
    assert_close(result, step.expected())


@pytest.mark.parametrize("block_size", [1, 5, 64])
def test_any_block_size(device, block_size):
    step = make([(1, 65), (7, 30), (18, 18)], block_size=block_size)
    assert_close(step.on(device).attend("triton", num_kv_splits=1), step.expected())


def test_splits_of_which_some_are_empty(device):
    step = make([(1, 70), (1, 5), (3, 40), (0, 3)], rank=56, rope=8, heads=18)
    assert_close(step.on(device).attend("triton", num_kv_splits=4), step.expected())


def test_extreme_scores_neither_overflow_nor_vanish(device):
    step = make([(1, 40), (12, 12)])
    step.arguments[0].mul_(1e3)
    assert_close(step.on(device).attend("triton", num_kv_splits=1), step.expected())


@pytest.mark.parametrize("dtype", DTYPES)
def test_kernel_and_twin_are_alike(device, dtype):
    step = make(MIXED[:4], dtype=dtype)
    kernel, twin = step.on(device).attend("triton", num_kv_splits=1), step.on("cpu").attend("cpu")
    assert_twin(kernel, twin)
    assert_close(twin, step.expected())


# ---- the forms of the twin -----------------------------------------------------------------------


twin = each_twin(mla_calls)


@pytest.mark.usefixtures("twin")
@pytest.mark.parametrize(("rank", "rope"), [(48, 16), (56, 8), (40, 10)])
def test_the_twin_is_right(rank, rope):
    for lengths in (MIXED, [(1, 300), (70, 200)]):
        step = make(lengths, rank, rope)
        assert_close(step.attend("cpu"), step.expected())


# ---- writing -------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", ["cpu", "triton"])
@pytest.mark.parametrize("slot_dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("tokens", [0, 1, 11])
def test_every_token_lands_in_its_slot_and_padding_nowhere(device, backend, slot_dtype, tokens):
    if device.type == "cuda" and backend == "cpu":
        return
    fused = torch.randn(tokens + 2, 100, device=device)
    latent, k_rope = fused[:, 3:59], fused[:, 70:78]
    cache = torch.full((4, 5, 64), UNTOUCHED, device=device)
    slots = torch.randperm(20, device=device)[:tokens].to(slot_dtype)
    slots[::4] = -1
    expected = cache.clone()
    for token, slot in enumerate(slots.tolist()):
        if slot >= 0:
            expected[slot // 5, slot % 5] = torch.cat((latent[token], k_rope[token]))
    concat_and_cache_mla(latent, k_rope, cache, slots, backend=backend)
    assert_twin(cache, expected, scale=0)


# ---- traced, compiled, refused -------------------------------------------------------------------


@pytest.mark.interpreted
@pytest.mark.parametrize("heads", [8, MOST_HEADS, 2 * MOST_HEADS])
def test_a_latent_is_read_once_for_all_heads_of_a_program_as_key_and_as_value(heads, monkeypatch):
    traces = trace_launches(monkeypatch, module, "mla_attention_kernel")
    step = make([(1, 70), (1, 33)], heads=heads, padding=0)
    arguments = MLAArguments(*step.arguments, step.scale, step.rank)
    launch_triton(step.out, arguments, 1, Configuration(16, 32, 4, 1))
    assert_close(step.out, step.expected())
    trace = traces["mla_attention_kernel"]
    keys, width = 70 + 33, 64
    assert trace.arguments["cache"].bytes_read_once == keys * width * 4
    assert trace.arguments["cache"].bytes_read == keys * width * 4 * triton.cdiv(heads, MOST_HEADS)
    assert trace.arguments["q"].bytes_read == step.arguments[0].nbytes
    assert trace.bytes_written == trace.bytes_written_once == step.out.nbytes


@pytest.mark.interpreted
def test_writing_moves_each_byte_once():
    latent, k_rope, slots = torch.randn(6, 48), torch.randn(6, 16), torch.tensor([3, -1, 9, 1, 0, 11])
    cache = torch.zeros(4, 5, 64)
    constants = {"BLOCK_SIZE": 5, "RANK": 48, "ROPE": 16, "PADDED_RANK": 64, "PADDED_ROPE": 16}
    trace = trace_kernel(
        concat_and_cache_mla_kernel, (6,), latent, k_rope, cache, slots, 48, 16, cache.stride(0), **constants
    )
    assert not trace.races
    assert not trace.out_of_bounds
    assert trace.bytes_written == trace.bytes_written_once == 5 * 64 * 4
    assert trace.bytes_read == 5 * 64 * 4 + slots.nbytes


def compiled_arguments(rank, rope, heads, splits, dtype, configuration):
    pointer = {2: "*bf16", 4: "*fp32"}[dtype.itemsize]
    width = rank + rope
    return {
        **dict.fromkeys(("out", "q", "cache"), pointer),
        **dict.fromkeys(("query_start_loc", "seq_lens", "block_table"), "*i32"),
        **dict.fromkeys(("partial_acc", "partial_stats"), "*fp32" if splits > 1 else pointer),
        "num_seqs": 7, "num_splits": splits, "scale": 0.125, "q_stride": heads * width, "out_stride": heads * rank,
        "block_stride": 16 * width, "table_stride": 7, "DOT_TYPE": tl.bfloat16 if dtype.itemsize == 2 else tl.float32,
        "OFFSET_TYPE": tl.int32, "HEADS": heads, "RANK": rank, "ROPE": rope, "PADDED_RANK": padded(rank),
        "PADDED_ROPE": padded(rope), "BLOCK_SIZE": 16, "BLOCK_H": min(16, triton.next_power_of_2(heads)),
        "BLOCK_M": configuration.block_m, "TILE": configuration.tile, "SPLIT": splits > 1,
    }  # fmt: skip


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("splits", [1, 8])
def test_deepseeks_shape_compiles_and_spills_nothing(target, splits):
    for configuration in mla_configurations(target, 2):
        arguments = compiled_arguments(512, 64, 128, splits, torch.bfloat16, configuration)
        options = {"num_warps": configuration.num_warps, "num_stages": configuration.num_stages}
        assert_compiles(mla_attention_kernel, arguments, options, targets=(target,), tensor_core=True, load_bytes=16)


def test_writing_and_fp32_compile_everywhere():
    strides = {"latent_stride": 576, "k_rope_stride": 3072, "block_stride": 16 * 576}
    shape = {"BLOCK_SIZE": 16, "RANK": 512, "ROPE": 64, "PADDED_RANK": 512, "PADDED_ROPE": 64}
    pointers = {**dict.fromkeys(("latent", "k_rope", "cache"), "*bf16"), "slot_mapping": "*i64"}
    assert_compiles(concat_and_cache_mla_kernel, {**pointers, **strides, **shape}, {"num_warps": 1})
    for target in TARGETS:
        (configuration,) = mla_configurations(target, 4)
        arguments = compiled_arguments(128, 64, 16, 1, torch.float32, configuration)
        options = {"num_warps": configuration.num_warps, "num_stages": configuration.num_stages}
        assert_compiles(mla_attention_kernel, arguments, options, targets=(target,))
