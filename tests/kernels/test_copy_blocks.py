"""Blocks of all regions to a staging buffer and back: against torch's own indexing, byte for
byte.
"""

import pytest
import torch
from kernels.harness import assert_compiles, assert_twin

from minivllm.kernels.copy_blocks import CHUNK_BYTES, BlockRegions, copy_regions_kernel, gather_blocks, scatter_blocks
from minivllm.platforms.triton_utils import tl
from minivllm_lab.aot import TARGETS
from minivllm_lab.checks.kernel_trace import trace_kernel

BLOCKS = 11


def random_bytes(shape, dtype, device="cpu"):
    """Return a tensor of random bytes, which may be NaN or no valid number of its type."""
    wide = torch.randint(0, 256, (*shape[:-1], shape[-1] * dtype.itemsize), dtype=torch.uint8)
    return wide.view(dtype).to(device)


def cache(block_size, dtype, layers=2, heads=2, dim=16, device="cpu"):
    """Return the regions of a cache: K and V of each layer, and their scales where it is int8."""
    shapes = [((BLOCKS, block_size, heads, dim), dtype)] * 2
    if dtype == torch.int8:
        shapes += [((BLOCKS, heads, block_size), torch.float32)] * 2
    torch.manual_seed(block_size)
    return [random_bytes(*shape, device=device) for _ in range(layers) for shape in shapes]


def as_bytes(tensor):
    return tensor.contiguous().view(torch.uint8).flatten(1)


def staged_by_hand(tensors, blocks, slots, capacity):
    """Return the staging buffer after a gather into zeros."""
    records = [torch.zeros(capacity, as_bytes(tensor).shape[1], dtype=torch.uint8) for tensor in tensors]
    for record, tensor in zip(records, tensors, strict=True):
        record[slots] = as_bytes(tensor.cpu())[blocks]
    return torch.cat(records, 1).flatten()


def ids(numbers, device, dtype=torch.int32):
    return torch.tensor(numbers, dtype=dtype, device=device)


SHAPES = [(1, torch.float32, 16), (5, torch.bfloat16, 3), (16, torch.int8, 16), (3, torch.int8, 1), (7, torch.uint8, 5)]


each_case = pytest.mark.parametrize(
    ("block_size", "dtype", "dim", "blocks"),
    [(*shape, blocks) for shape in SHAPES for blocks in ([], [4], [9, 0, 4, 10])],
    ids=str,
)


def check_there_and_back(tensors, blocks, backend):
    """Gather blocks to slots in another order, and scatter them into an empty cache."""
    regions = BlockRegions.of(tensors)
    device = tensors[0].device
    slots = list(range(1, len(blocks) + 1))[::-1]
    staging = torch.zeros((len(blocks) + 2) * regions.record_bytes, dtype=torch.uint8, device=device)
    places = (ids(blocks, device), staging, ids(slots, device))
    gather_blocks(regions, *places, backend=backend)
    assert_twin(staging, staged_by_hand(tensors, blocks, slots, len(blocks) + 2), scale=0)
    emptied = [torch.zeros_like(tensor) for tensor in tensors]
    scatter_blocks(BlockRegions.of(emptied), *places, backend=backend)
    for before, result in zip(tensors, emptied, strict=True):
        expected = torch.zeros_like(as_bytes(before.cpu()))
        expected[blocks] = as_bytes(before.cpu())[blocks]
        assert torch.equal(as_bytes(result.cpu()), expected)


@each_case
def test_there_and_back(device, block_size, dtype, dim, blocks):
    check_there_and_back(cache(block_size, dtype, dim=dim, device=device), blocks, "triton")


@each_case
def test_there_and_back_on_the_cpu(block_size, dtype, dim, blocks):
    pytest.importorskip("numba")
    check_there_and_back(cache(block_size, dtype, dim=dim), blocks, "cpu")


def test_without_slots_blocks_lie_in_their_order(device):
    """This includes a block that occurs twice, ids of either type, and a layer that occurs twice."""
    tensor = random_bytes((BLOCKS, 4, 6), torch.float16, device)
    regions = BlockRegions.of([tensor, tensor])
    for dtype in (torch.int32, torch.int64):
        staging = torch.zeros(3 * regions.record_bytes, dtype=torch.uint8, device=device)
        gather_blocks(regions, ids([5, 2, 5], device, dtype), staging, backend="triton")
        assert_twin(staging, staged_by_hand([tensor, tensor], [5, 2, 5], [0, 1, 2], 3), scale=0)


def test_keys_and_values_interleaved_in_one_tensor(device):
    """The stride between blocks is then larger than a block, and the bytes in between keep their
    values.
    """
    both = random_bytes((BLOCKS, 2, 4, 8), torch.bfloat16, device)
    keys, values = both[:, 0], both[:, 1]
    staging = torch.zeros(2 * 64, dtype=torch.uint8, device=device)
    gather_blocks(BlockRegions.of([values]), ids([7, 3], device), staging, backend="triton")
    assert torch.equal(staging.cpu(), as_bytes(values[[7, 3]].cpu()).flatten())
    before = both.cpu().clone()
    scatter_blocks(BlockRegions.of([keys]), ids([0, 1], device), staging, backend="triton")
    before[:2, 0] = before[[7, 3], 1]
    assert torch.equal(as_bytes(both.cpu()), as_bytes(before))


def test_regions_larger_than_a_program(device):
    big, small = random_bytes((3, 2 * CHUNK_BYTES + 48), torch.uint8, device), random_bytes((3, 8), torch.int32, device)
    regions = BlockRegions.of([big, small])
    assert regions.unit == 16
    staging = torch.zeros(2 * regions.record_bytes, dtype=torch.uint8, device=device)
    gather_blocks(regions, ids([2, 1], device), staging, backend="triton")
    assert_twin(staging, staged_by_hand([big, small], [2, 1], [0, 1], 2), scale=0)


@pytest.mark.interpreted
@pytest.mark.parametrize("gather", [True, False])
def test_every_byte_is_read_once_and_written_once(gather):
    tensors = cache(16, torch.int8, dim=32)
    regions = BlockRegions.of(tensors)
    blocks = ids([3, 8, 5], "cpu")
    staging = torch.zeros(3 * regions.record_bytes, dtype=torch.uint8)
    constants = {"GATHER": gather, "WORD": tl.int32, "WORD_BYTES": 4, "UNIT": 16, "CHUNK": 512}
    trace = trace_kernel(
        copy_regions_kernel, (3, len(tensors), 1), *(regions.table, blocks, None, staging, regions.record_bytes),
        reached={f"region {index}": tensor for index, tensor in enumerate(tensors)}, **constants,
    )  # fmt: skip
    ids_and_table = trace.programs * (4 + 4 * 8)
    assert trace.bytes_read == staging.numel() + ids_and_table
    assert trace.bytes_written == trace.bytes_written_once == staging.numel()
    assert not trace.races
    assert not trace.out_of_bounds


def compiled(gather, word, unit, targets=TARGETS):
    pointers = {"table": "*i64", "blocks": "*i64", "slots": None, "staging": "*u8", "record": 65536}
    size = min(unit, 4)
    constants = {"GATHER": gather, "WORD": word, "WORD_BYTES": size, "UNIT": unit}
    arguments = {**pointers, **constants, "CHUNK": CHUNK_BYTES // size}
    return assert_compiles(copy_regions_kernel, arguments, targets=targets).values()


@pytest.mark.parametrize("gather", [True, False])
def test_compiled_for_every_target_with_16_byte_loads(gather):
    for code in compiled(gather, tl.int32, 16):
        assert code.loads.get(16), f"{code.target} loads {dict(code.loads)}"
        assert code.registers <= 64


@pytest.mark.parametrize(("word", "unit"), [(tl.int32, 4), (tl.int16, 2), (tl.int8, 1)])
def test_addresses_that_are_less_aligned_are_loaded_piece_by_piece(word, unit):
    (code,) = compiled(True, word, unit, targets=("sm_90",))
    assert code.loads.get(unit, 0) > 16
    assert 16 not in code.loads
