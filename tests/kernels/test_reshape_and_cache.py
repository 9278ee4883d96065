"""Writing the paged cache: what lands in which slot, and that nothing else changes."""

import pytest
import torch
from kernels.harness import DTYPES, assert_twin, awkward_lengths, compile_launches, each_twin
from refusals import assert_refused

from minivllm.kernels import reshape_and_cache as module
from minivllm.kernels.cpu import cache_calls
from minivllm.kernels.reshape_and_cache import reshape_and_cache

BLOCK_SIZES = (1, 5, 16)


def make(tokens, block_size, kv_heads=2, head_dim=80, dtype=torch.float32, blocks=9, device="cpu"):
    """Return keys and values as slices of one fused output, caches full of −7, and a separate slot
    for every token.
    """
    torch.manual_seed(tokens)
    width = kv_heads * head_dim
    fused = torch.randn(tokens, 3 * width).to(dtype).to(device)
    key, value = (fused[:, start : start + width].view(tokens, kv_heads, head_dim) for start in (width, 2 * width))
    caches = torch.full((2, blocks, block_size, kv_heads, head_dim), -7.0, dtype=dtype, device=device)
    slots = torch.randperm(blocks * block_size)[:tokens].to(device)
    return key, value, caches[0], caches[1], slots


def written_by_hand(key, value, key_cache, value_cache, slots):
    """Return the caches after writing token by token."""
    key_cache, value_cache = key_cache.clone(), value_cache.clone()
    for token, slot in enumerate(slots.tolist()):
        if slot >= 0:
            block, offset = divmod(slot, key_cache.shape[1])
            key_cache[block, offset], value_cache[block, offset] = key[token], value[token]
    return key_cache, value_cache


@pytest.mark.parametrize("block_size", BLOCK_SIZES)
@pytest.mark.parametrize("padded", [False, True], ids=["full", "padded"])
def test_every_token_lands_in_its_slot_and_padding_nowhere(device, block_size, padded):
    for tokens in awkward_lengths(4)[: 4 if block_size == 1 else None]:
        key, value, key_cache, value_cache, slots = make(tokens, block_size, device=device)
        if padded:
            slots[::2] = -1
        expected = written_by_hand(key, value, key_cache, value_cache, slots)
        reshape_and_cache(key, value, key_cache, value_cache, slots, backend="triton")
        assert_twin(key_cache, expected[0], scale=0)
        assert_twin(value_cache, expected[1], scale=0)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("slot_dtype", [torch.int32, torch.int64])
def test_kernel_and_twin_write_alike(device, dtype, slot_dtype):
    key, value, *caches, slots = make(11, 16, kv_heads=3, dtype=dtype, device=device)
    slots = slots.to(slot_dtype)
    slots[5] = -1
    twins = [cache.cpu() for cache in caches] if device.type == "cuda" else [cache.clone() for cache in caches]
    reshape_and_cache(key, value, *caches, slots, backend="triton")
    reshape_and_cache(key.cpu(), value.cpu(), *twins, slots.cpu(), backend="cpu")
    for kernel, twin in zip(caches, twins, strict=True):
        assert_twin(kernel, twin, scale=0)


@pytest.mark.parametrize("head_dim", [3, 16, 20])
@pytest.mark.parametrize("dtype", DTYPES)
def test_many_tokens_of_any_width(head_dim, dtype):
    key, value, *caches, slots = make(333, 5, kv_heads=1, head_dim=head_dim, dtype=dtype, blocks=90)
    slots[::7] = -1
    expected = written_by_hand(key, value, *caches, slots)
    reshape_and_cache(key, value, *caches, slots, backend="cpu")
    assert all(map(torch.equal, caches, expected))


@pytest.mark.parametrize("backend", ["cpu", pytest.param("triton", marks=pytest.mark.interpreted)])
def test_caches_that_are_interleaved_in_one_tensor(backend):
    key, value, _, _, slots = make(7, 4)
    both = torch.zeros(9, 2, 4, 2, 80)  # a block's K and V side by side
    key_cache, value_cache = both[:, 0], both[:, 1]
    expected = written_by_hand(key, value, key_cache, value_cache, slots)
    reshape_and_cache(key, value, key_cache, value_cache, slots, backend=backend)
    assert torch.equal(key_cache, expected[0])
    assert torch.equal(value_cache, expected[1])


def test_fewer_slots_than_tokens_leave_the_rest_unwritten():
    key, value, key_cache, value_cache, slots = make(6, 4)
    expected = written_by_hand(key, value, key_cache, value_cache, slots[:4])
    reshape_and_cache(key, value, key_cache, value_cache, slots[:4])
    assert torch.equal(key_cache, expected[0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_kernel_compiles_with_wide_loads(monkeypatch, dtype):
    built = compile_launches(monkeypatch, module, "reshape_and_cache_kernel", load_bytes=8)
    key, value, *caches, slots = make(7, 16, kv_heads=8, head_dim=128, dtype=dtype, device="meta")
    reshape_and_cache(key, value, *caches, slots, backend="triton")
    assert max(built["reshape_and_cache_kernel"]["sm_90"].loads) == 16


twin = each_twin(cache_calls)


@pytest.mark.usefixtures("twin")
@pytest.mark.parametrize("cache_dtype", [torch.float32, torch.int8])
def test_a_slot_beyond_the_cache_writes_to_no_foreign_memory(cache_dtype):
    key, value, *_ = make(3, 4)
    memory = torch.full((2, 9, 4, 2, 80), 7).to(cache_dtype)
    scales = torch.ones(2, 3, 2, 4) if cache_dtype == torch.int8 else (None, None)
    for wrong in (12, 13, 35):
        slots = torch.tensor([0, wrong, -1])
        with pytest.raises(IndexError, match=r"not in the cache|out of bounds"):
            reshape_and_cache(
                key, value, memory[0, :3], memory[1, :3], slots, key_scales=scales[0], value_scales=scales[1]
            )
        assert (memory[:, 3:].float() == 7).all()


def test_one_token_with_one_head_may_come_from_any_strides():
    """The strides do not matter there, and `contiguous` changes nothing."""
    heads = torch.randn(1, 2, 8)
    key, value = (heads[:, index : index + 1].contiguous() for index in (0, 1))
    assert key.stride(1) == 8
    odd = heads[:, ::2]
    assert odd.stride(1) != 8
    assert odd.is_contiguous()
    caches = torch.zeros(2, 3, 4, 1, 8)
    reshape_and_cache(odd, value, *caches, torch.tensor([5]))
    assert torch.equal(caches[0, 1, 1], key[0])
    assert torch.equal(caches[1, 1, 1], value[0])
    apart = torch.randn(2, 1, 16)[:, :, ::2]
    two = torch.tensor([5, 6])
    assert_refused("contiguous", reshape_and_cache, apart, torch.randn(2, 1, 8), *caches, two)


def test_input_that_cannot_work_is_refused():
    key, value, key_cache, value_cache, slots = make(3, 4)
    into = (key_cache, value_cache, slots)
    assert_refused("kv_heads, head_dim", reshape_and_cache, key[:, :1], value[:, :1], *into)
    assert_refused(r"\b4\b.*\b3\b", reshape_and_cache, key, value, *into[:2], torch.arange(4))
    assert_refused(r"float32.*bfloat16", reshape_and_cache, key, value.bfloat16(), *into)
    assert_refused(r"backend.*gpu", reshape_and_cache, key, value, *into, backend="gpu")
