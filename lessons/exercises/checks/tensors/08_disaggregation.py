"""Check the part of exercise 08 that needs NumPy, torch or Triton, and run the engine with the learner's part."""

import torch

from minivllm.config import Parts
from minivllm_lab.disaggregation.learner_connector import learner_connector, serve_through_both
from minivllm_lab.checks.kernel_trace import trace_kernel
from minivllm_lab.checks.plugged import Plugged


# ---- the kernels, in steps -------------------------------------------------------------------------------------------


def traced(kernel, grid, *arguments, **constants):
    """Trace the kernel; it must stay inside its arguments and have no races."""
    trace = trace_kernel(kernel, grid, *arguments, **constants)
    hint = "Has a place behind the block's end, or a block -1, no mask?"
    assert not trace.out_of_bounds, f"{trace.out_of_bounds[0]}. {hint}"
    assert not trace.races, f"{trace.races[0]}. Does every program write numbers of its own?"
    return trace


def ints(values):
    """Make an int32 tensor."""
    return torch.tensor(list(values), dtype=torch.int32)


def assert_moved(trace, source, target, numbers):
    """Check that each number is read once and written once."""
    read, written = trace.arguments[source].bytes_read, trace.arguments[target].bytes_written
    assert read == 4 * numbers, f"{read:,} bytes of {source} are read, and {4 * numbers:,} are enough"
    assert written == 4 * numbers, f"{written:,} bytes of {target} are written, and {4 * numbers:,} are right"


def assert_own_part(rest):
    """Check that the part of programs that were not launched is unchanged."""
    assert bool((rest == -7.0).all()), "one program copies what another one should: each has BLOCK numbers of its own"


def check_kernel_step_1_one_block(module):
    """Stretch: one block is copied, whole, and nothing beside it."""
    for numbers, block_id, size in ((8, 0, 8), (8, 2, 4), (11, 1, 8), (3, 4_097, 8), (80, 1, 64)):
        cache, staging = torch.randn(5_000, numbers), torch.full((numbers,), -7.0)
        programs = -(-numbers // size)
        trace = traced(
            module.gather_block_kernel, (programs,), staging, cache, ints([block_id])[0].item(), numbers, BLOCK=size
        )
        where = f"block {block_id} of {numbers} numbers, {programs} programs of {size}"
        assert torch.equal(staging, cache[block_id]), f"{where}: other numbers"
        assert_moved(trace, "cache", "staging", numbers)
    cache, staging = torch.randn(4, 11), torch.full((11,), -7.0)
    traced(module.gather_block_kernel, (1,), staging, cache, 1, 11, BLOCK=8)
    assert_own_part(staging[8:])


CASES = ((8, 5, [3, 1]), (11, 6, [5, 0, 2]), (3, 5_000, [4_097]), (16, 7, [6, 1, 4, 3]))


def check_kernel_step_2_gather(module):
    """Stretch: blocks anywhere in the cache come into one piece, block after block, each tensor after tensor."""
    for numbers, num_blocks, block_ids in CASES:
        for tensors in (1, 4):
            cache, staging = (
                torch.randn(tensors, num_blocks, numbers),
                torch.full((len(block_ids), tensors, numbers), -7.0),
            )
            grid = len(block_ids), tensors, -(-numbers // 8)
            trace = traced(module.gather_kernel, grid, staging, cache, ints(block_ids), num_blocks, numbers, BLOCK=8)
            right, where = cache[:, block_ids].transpose(0, 1), f"blocks {block_ids} of {tensors} tensors"
            hint = ""
            if tensors > 1 and torch.equal(staging.view(tensors, len(block_ids), numbers), cache[:, block_ids]):
                hint = ": tensor after tensor; all of a block must stand together"
            assert torch.equal(staging, right), f"{where}: other numbers, or in another order{hint}"
            assert_moved(trace, "cache", "staging", right.numel())
    cache, staging = torch.randn(2, 6, 20), torch.full((3, 2, 20), -7.0)
    traced(module.gather_kernel, (2, 2, 1), staging, cache, ints([5, 0, 2]), 6, 20, BLOCK=16)
    assert torch.equal(staging[:2, :, :16], cache[:, [5, 0], :16].transpose(0, 1)), "parts of 16 numbers: other numbers"
    assert_own_part(staging[2])
    assert_own_part(staging[:, :, 16:])


def check_kernel_step_3_scatter(module):
    """Stretch: the numbers go back into other blocks; where block_ids has -1, nothing is read or written."""
    for numbers, num_blocks, block_ids in (*CASES, (11, 6, [4, -1, 1, -1])):
        for tensors in (1, 4):
            staging, cache = (
                torch.randn(len(block_ids), tensors, numbers),
                torch.full((tensors, num_blocks, numbers), -7.0),
            )
            grid = len(block_ids), tensors, -(-numbers // 8)
            trace = traced(module.scatter_kernel, grid, cache, staging, ints(block_ids), num_blocks, numbers, BLOCK=8)
            wanted = [place for place, block in enumerate(block_ids) if block >= 0]
            right = torch.full_like(cache, -7.0)
            right[:, [block_ids[place] for place in wanted]] = staging[wanted].transpose(0, 1)
            assert torch.equal(cache, right), f"blocks {block_ids} of {tensors} tensors: other numbers, or elsewhere"
            assert_moved(trace, "staging", "cache", len(wanted) * tensors * numbers)
    staging, cache = torch.randn(3, 2, 20), torch.full((2, 6, 20), -7.0)
    traced(module.scatter_kernel, (2, 2, 1), cache, staging, ints([5, 0, 2]), 6, 20, BLOCK=16)
    assert torch.equal(cache[:, [5, 0], :16], staging[:2, :, :16].transpose(0, 1)), "parts of 16 numbers: other numbers"
    assert_own_part(cache[:, 2])
    assert_own_part(cache[:, :, 16:])


# ---- in the engine ---------------------------------------------------------------------------------------------------

PROMPTS = (
    "def add(a, b):\n    return",
    "class Stack:\n    def __init__(self):\n        self.items = []\n\n    def push(self, item):\n        self",
    "class Stack:\n    def __init__(self):\n        self.items = []\n\n    def pop(self):\n        return",
    "import os\n\ndef read(path):\n",
)


def plug(module) -> Plugged:
    """Run two engines, each with the learner's connector beside its scheduler: one computes prompts, one answers."""
    parts = Parts(kv_connector=learner_connector(module.ConnectorScheduler))
    what = "One engine with no connector (ours), and two"
    return Plugged(parts=parts, prompts=PROMPTS, serve=serve_through_both, what=what)
