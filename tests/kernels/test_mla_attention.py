"""Attention over paged latents: every form against float64, on ragged batches over a cache full
of poison.
"""

import pytest
import torch
from kernels import harness

from minivllm.kernels import mla_attention as module
from minivllm.kernels.attention_arguments import MLAArguments
from minivllm.kernels.cpu import mla_calls
from minivllm.kernels.mla_attention import (
    MOST_HEADS,
    concat_and_cache_mla,
    launch_triton,
    mla_attention,
    mla_configurations,
)
from minivllm.platforms.triton_utils import triton
from minivllm_lab.aot import TARGETS

BLOCK = 16
pytestmark = pytest.mark.filterwarnings("ignore:invalid value")  # NumPy, on rows that no query has

# (queries, keys) of each sequence. A decode has one query, a prefill as many as keys, a chunk or a
# verification fewer.
MIXED = [(0, 7), (1, 33), (17, 17), (5, 40), (0, 0), (1, 1), (0, 1), (1, BLOCK + 1)]


class Step(harness.PagedStep):
    def attend(self, backend, **options):
        rank = self.out.shape[-1]
        return mla_attention(*self.arguments, self.scale, kv_lora_rank=rank, out=self.out, backend=backend, **options)


def make(lengths, rank=48, rope=16, heads=8, **options):
    return harness.make_step(Step, lengths, (heads, rank + rope), (rank + rope,), out_dim=rank, **options)


# ---- the kernel ----------------------------------------------------------------------------------


@pytest.mark.parametrize(("rank", "rope", "heads"), [(56, 8, 5), (32, 8, 1), (40, 24, 16), (64, 16, 21)], ids=str)
def test_all_kinds_of_steps_in_one_launch(device, rank, rope, heads):
    make(MIXED, rank, rope, heads).check_kernel(device)


@pytest.mark.parametrize("block_size", [1, 5, 64])
def test_any_block_size(device, block_size):
    make([(1, 65), (7, 30), (18, 18)], block_size=block_size).check_kernel(device)


def test_splits_of_which_some_are_empty(device):
    make([(1, 70), (1, 5), (3, 40), (0, 3)], rank=56, rope=8, heads=18).check_kernel(device, splits=4)


def test_extreme_scores_neither_overflow_nor_vanish(device):
    step = make([(1, 40), (12, 12)])
    step.arguments[0].mul_(1e3)
    step.check_kernel(device)


@pytest.mark.parametrize("dtype", harness.DTYPES)
def test_kernel_and_twin_are_alike(device, dtype):
    step = make(MIXED[:4], dtype=dtype)
    kernel, twin = step.on(device).attend("triton", num_kv_splits=1), step.on("cpu").attend("cpu")
    harness.assert_twin(kernel, twin)
    harness.assert_close(twin, step.expected())


# ---- the forms of the twin -----------------------------------------------------------------------


twin = harness.each_twin(mla_calls)


@pytest.mark.usefixtures("twin")
@pytest.mark.parametrize(("rank", "rope"), [(48, 16), (56, 8), (40, 10)])
def test_the_twin_is_right(rank, rope):
    for lengths in (MIXED, [(1, 300), (70, 200)]):
        step = make(lengths, rank, rope)
        harness.assert_close(step.attend("cpu"), step.expected())


# ---- writing -------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", ["cpu", "triton"])
@pytest.mark.parametrize("slot_dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("tokens", [0, 1, 11])
def test_every_token_lands_in_its_slot_and_padding_nowhere(device, backend, slot_dtype, tokens):
    if device.type == "cuda" and backend == "cpu":
        return
    fused = torch.randn(tokens + 2, 100, device=device)
    latent, k_rope = fused[:, 3:59], fused[:, 70:78]
    cache = torch.full((4, 5, 64), harness.UNTOUCHED, device=device)
    slots = torch.randperm(20, device=device)[:tokens].to(slot_dtype)
    slots[::4] = -1
    expected = cache.clone()
    for token, slot in enumerate(slots.tolist()):
        if slot >= 0:
            expected[slot // 5, slot % 5] = torch.cat((latent[token], k_rope[token]))
    concat_and_cache_mla(latent, k_rope, cache, slots, backend=backend)
    harness.assert_twin(cache, expected, scale=0)


# ---- traced, compiled, refused -------------------------------------------------------------------


@pytest.mark.interpreted
@pytest.mark.parametrize("heads", [8, MOST_HEADS, 2 * MOST_HEADS])
def test_a_latent_is_read_once_for_all_heads_of_a_program_as_key_and_as_value(heads, monkeypatch):
    traces = harness.trace_launches(monkeypatch, module, "mla_attention_kernel")
    step = make([(1, 70), (1, 33)], heads=heads, padding=0)
    harness.assert_close(step.attend("triton", num_kv_splits=1), step.expected())
    trace = traces["mla_attention_kernel"]
    keys, width = 70 + 33, 64
    assert trace.arguments["cache"].bytes_read_once == keys * width * 4
    assert trace.arguments["cache"].bytes_read == keys * width * 4 * triton.cdiv(heads, MOST_HEADS)
    assert trace.arguments["q"].bytes_read == step.arguments[0].nbytes
    assert trace.bytes_written == trace.bytes_written_once == step.out.nbytes


@pytest.mark.interpreted
def test_writing_moves_each_byte_once(monkeypatch):
    traces = harness.trace_launches(monkeypatch, module, "concat_and_cache_mla_kernel")
    latent, k_rope, slots = torch.randn(6, 48), torch.randn(6, 16), torch.tensor([3, -1, 9, 1, 0, 11])
    cache = torch.zeros(4, 5, 64)
    concat_and_cache_mla(latent, k_rope, cache, slots, backend="triton")
    trace = traces["concat_and_cache_mla_kernel"]
    assert trace.bytes_written == trace.bytes_written_once == 5 * 64 * 4
    assert trace.bytes_read == 5 * 64 * 4 + slots.nbytes


def compile_attention(monkeypatch, target, step, splits=1, **proof):
    """Compile the kernel for a target with each configuration that it may have there."""
    harness.compile_launches(monkeypatch, module, "mla_attention_kernel", targets=(target,), **proof)
    monkeypatch.setattr(module, "combine_splits", lambda *partials: None)
    arguments = MLAArguments(*step.arguments, step.scale, step.out.shape[-1])
    for configuration in mla_configurations(target, step.out.itemsize):
        launch_triton(step.out, arguments, splits, configuration)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("splits", [1, 8])
def test_deepseeks_shape_compiles_and_spills_nothing(monkeypatch, target, splits):
    step = make([(1, 100)] * 7, 512, 64, 128, dtype=torch.bfloat16)
    compile_attention(monkeypatch, target, step, splits, tensor_core=True, load_bytes=16)


@pytest.mark.parametrize("target", TARGETS)
def test_writing_and_fp32_compile_everywhere(monkeypatch, target):
    harness.compile_launches(monkeypatch, module, "concat_and_cache_mla_kernel", targets=(target,))
    with torch.device("meta"):
        latent, cache = torch.empty(7, 512, dtype=torch.bfloat16), torch.empty(9, 16, 576, dtype=torch.bfloat16)
        concat_and_cache_mla(latent, latent[:, :64], cache, torch.arange(7), backend="triton")
    compile_attention(monkeypatch, target, make([(1, 100)] * 7, 128, 64, 16))
