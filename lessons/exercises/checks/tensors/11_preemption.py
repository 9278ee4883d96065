"""Check the part of exercise 11 that needs NumPy, torch or Triton, and run the engine with the learner's part."""

import math
from functools import lru_cache

import torch

from minivllm.config import Parts
from minivllm.platforms.triton_utils import tl, triton
from minivllm_lab.engines.inside import core_of
from minivllm_lab.checks.kernel_trace import trace_kernel
from minivllm_lab.checks.plugged import Plugged
from minivllm_lab.preemption.learner_policy import learner_policy


# ---- the kernel ------------------------------------------------------------------------------------------------------

BLOCK, BLOCKS, SLOTS = 8, 9, 6
OUT, BACK = (3, 21), (2, 13)
"""Tensors, and words of a block in each: one shape for the way out, another for the way back."""


@triton.jit
def _place_kernel(addresses, out, staging, words, FIND: tl.constexpr, RECORD: tl.constexpr):
    block, tensor = tl.program_id(0), tl.program_id(1)
    tl.store(RECORD(staging, block, tensor, tl.num_programs(1), words), tl.load(FIND(addresses, tensor, block, words)))
    tl.store(out + block * tl.num_programs(1) + tensor, 1)


@lru_cache(maxsize=2)
def _tensors(shape):
    draw, (tensors, words) = torch.Generator().manual_seed(0), shape
    every = torch.randint(-(2**31), 2**31 - 1, (tensors, BLOCKS, words), generator=draw, dtype=torch.int64).int()
    return [one.clone() for one in every]


def _addresses(tensors):
    return torch.tensor([one.data_ptr() for one in tensors], dtype=torch.int64)


def _named(tensors):
    return {f"tensor {index}": one for index, one in enumerate(tensors)}


def _clean(trace):
    for found in (trace.races, trace.out_of_bounds):
        assert not found, f"{found[0]}. Is it block -1, or a word behind the block's last one?"


def check_the_two_pointers(module):
    """Stretch: a block begins at its tensor's address plus `block * words`; records go by slot, then tensor."""
    for shape in (OUT, BACK):
        count, words = shape
        tensors, staging = _tensors(shape), torch.zeros(BLOCKS, count, words, dtype=torch.int32)
        arguments = _addresses(tensors), torch.zeros(BLOCKS, count, dtype=torch.int32), staging, words
        finders = {"FIND": module.block_of, "RECORD": module.record_of}
        trace = trace_kernel(_place_kernel, (BLOCKS, count), *arguments, reached=_named(tensors), **finders)
        assert not trace.out_of_bounds, f"{trace.out_of_bounds[0]}. An address is in bytes, and `words` are of 4 bytes"
        for block in range(BLOCKS):
            for tensor in range(count):
                found, right = int(staging[block, tensor, 0]), int(tensors[tensor][block, 0])
                where = f"block {block} of tensor {tensor}, slot {block}"
                assert found == right, f"{where}: the first word is {found}, and {right} is right"


def _swapped(module, to_staging):
    blocks, slots, shape = [7, -1, 2, 0], [4, 1, 0, 5], OUT if to_staging else BACK
    count, words = shape
    tensors = [one.clone() if to_staging else torch.zeros_like(one) for one in _tensors(shape)]
    held = torch.zeros(SLOTS) if to_staging else torch.arange(1, SLOTS + 1)
    staging = held.int()[:, None, None].repeat(1, count, words)
    ids = [torch.tensor(one, dtype=torch.int32) for one in (blocks, slots)]
    grid, sizes = (len(blocks), count, -(-words // BLOCK)), {"TO_STAGING": to_staging, "BLOCK": BLOCK}
    given = _addresses(tensors), *ids, staging, words
    trace = trace_kernel(module.swap_kernel, grid, *given, reached=_named(tensors), **sizes)
    return trace, tensors, staging, [(b, s) for b, s in zip(blocks, slots) if b >= 0]


def check_out_to_the_staging_buffer(module):
    """Stretch: each block, in all tensors, goes to its slot; unused slots keep what they had."""
    trace, _, staging, moves = _swapped(module, True)
    _clean(trace)
    expected = torch.zeros_like(staging)
    for block, slot in moves:
        expected[slot] = torch.stack([one[block] for one in _tensors(OUT)])
    for slot in range(SLOTS):
        hint = ". Block -1: nothing moves" if slot == 1 else ""
        assert torch.equal(staging[slot], expected[slot]), f"slot {slot} is not what it should be{hint}"


def check_back_into_the_cache(module):
    """Stretch: back again, each slot goes to its block, in all tensors; other blocks keep what they had."""
    trace, tensors, staging, moves = _swapped(module, False)
    _clean(trace)
    slots = dict(moves)
    for index, tensor in enumerate(tensors):
        for block in range(BLOCKS):
            right = staging[slots[block], index] if block in slots else torch.zeros(BACK[1], dtype=torch.int32)
            assert torch.equal(tensor[block], right), f"block {block} of tensor {index} is not what it should be"


def check_each_word_moves_once(module):
    """Stretch: every word that moves is read once and written once, and nothing else."""
    for to_staging in (True, False):
        trace, _, _, moves = _swapped(module, to_staging)
        right = 4 * len(moves) * math.prod(OUT if to_staging else BACK)
        way = "out" if to_staging else "back"
        assert trace.bytes_written == right, f"{way}: {trace.bytes_written:,} bytes written, and {right:,} are right"
        cache = sum(traffic.bytes_read for name, traffic in trace.arguments.items() if name.startswith("tensor"))
        read = cache if to_staging else trace.arguments["staging"].bytes_read
        assert read == right, f"{way}: {read:,} bytes of keys and values read, and {right:,} are right"


def plug(module) -> Plugged:
    """Run the learner's loop in the engine, by priority, on a pool that is far too small."""
    return Plugged(
        parts=Parts(policy=learner_policy(module.schedule_running, module.resume_at)),
        engine_args={
            "num_gpu_blocks_override": 13, "block_size": 4, "max_model_len": 40, "max_num_batched_tokens": 32,
        },
        max_tokens=20,
        says=lambda llm: {"tokens computed again": core_of(llm).scheduler.num_recomputed_tokens},
    )  # fmt: skip
