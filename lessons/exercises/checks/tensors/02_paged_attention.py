"""Check the part of exercise 02 that needs NumPy, torch or Triton, and run the engine with the learner's part."""

import torch

from minivllm.config import Parts
from minivllm.core.policy import SchedulingPolicy
from minivllm_lab.checks.kernel_trace import trace_kernel, KernelTrace, LOAD
from minivllm_lab.checks.plugged import PROMPTS, Plugged

BLOCK_SIZE, WIDTH = 4, 8  # of the kernels' checks; a row is 32 bytes
ROW = 4 * WIDTH


def check_gather_token(module):
    """Step 1: each token's row is copied from the slot that the table names; one entry and one row are read for it."""
    cache, table, wanted = _cached([5, 2, 7], 10)
    out, trace = _gather(module.gather_token_kernel, (10,), 10, cache, table)
    _rows_are(out, cache, wanted, table)
    _stays_inside(trace)
    _each_writes_its_own(trace, {(token,): [token] for token in range(10)})
    _reads(trace, "cache", 10 * ROW, "10 rows")
    _reads(trace, "block_table", 10 * 4, "one entry for each token")
    _takes_other_sizes(module.gather_token_kernel, (5,), [10, 11, 4, 5, 14], [5, 2, 7])


def check_gather_block(module):
    """Step 2: each block is looked up once; of the last one, only the rows that hold a token are copied."""
    for blocks, length in (([5, 2, 7], 10), ([3, 6], 8), ([4], 1)):
        cache, table, wanted = _cached(blocks, length)
        out, trace = _gather(module.gather_block_kernel, (len(blocks),), length, cache, table, length)
        _stays_inside(trace)
        _rows_are(out, cache, wanted, table)
        _each_writes_its_own(trace, {(place,): _rows_of_block(place, length) for place in range(len(blocks))})
        _reads(trace, "cache", length * ROW, f"the rows of {length} tokens", "Are those behind the last token masked?")
        _reads(trace, "block_table", len(blocks) * 4, "one entry for each block")
    _takes_other_sizes(module.gather_block_kernel, (3,), [10, 11, 4, 5, 14], [5, 2, 7], 5)


def check_gather_all_sequences(module):
    """Stretch: step 3: one launch copies all sequences, each by its own row of the table, to its own rows of out."""
    blocks, lengths = [[5, 2, 7], [3], [8, 1], [6]], [10, 3, 8, 0]
    cache, wanted = _rows(40), []
    table = torch.zeros(4, 3, dtype=torch.int32)
    for sequence, (own, length) in enumerate(zip(blocks, lengths)):
        table[sequence, : len(own)] = torch.tensor(own, dtype=torch.int32)
        wanted += [own[token // BLOCK_SIZE] * BLOCK_SIZE + token % BLOCK_SIZE for token in range(length)]
    starts = torch.tensor([0, 10, 13, 21], dtype=torch.int32)
    out = torch.full((21, WIDTH), torch.nan)
    counts = torch.tensor(lengths, dtype=torch.int32)
    trace = trace_kernel(
        module.gather_cache_kernel, (4, 3), out, starts, cache, table, counts, 3, BLOCK_SIZE=BLOCK_SIZE, WIDTH=WIDTH
    )
    assert not trace.races, f"{trace.races[0]}. Does each sequence begin at its own start?"
    _stays_inside(trace)
    _rows_are(out, cache, wanted, table)
    own = {
        (sequence, place): [int(starts[sequence]) + row for row in _rows_of_block(place, length)]
        for sequence, length in enumerate(lengths)
        for place in range(3)
    }
    _each_writes_its_own(trace, own)
    more = "Programs behind a sequence's last block must not read the null block."
    _reads(trace, "cache", 21 * ROW, "the rows of 21 tokens", more)
    _reads(
        trace, "block_table", len(own) * 4, "one entry for each program", "Look the block up once, not for each token."
    )
    lengths, starts, tables = (
        torch.tensor(x, dtype=torch.int32) for x in ([5, 3], [0, 5], [[5, 2, 7, 0], [3, 1, 0, 0]])
    )
    slots = [10, 11, 4, 5, 14, 6, 7, 2]
    _takes_other_sizes(module.gather_cache_kernel, (2, 4), slots, tables, lengths, 4, starts=starts)


def _rows(slots: int) -> torch.Tensor:
    """Make a cache in which every row is different."""
    return torch.arange(slots * WIDTH, dtype=torch.float32).view(slots, WIDTH) + 1


def _cached(blocks: list[int], length: int) -> tuple[torch.Tensor, torch.Tensor, list[int]]:
    """Make a cache of 10 blocks, a table, and the slots of the sequence's tokens."""
    slots = [blocks[token // BLOCK_SIZE] * BLOCK_SIZE + token % BLOCK_SIZE for token in range(length)]
    return _rows(40), torch.tensor(blocks, dtype=torch.int32), slots


def _gather(kernel, grid: tuple[int, ...], tokens: int, cache, table, *rest) -> tuple[torch.Tensor, KernelTrace]:
    """Return the rows that the kernel wrote (NaN where it wrote none), and what it read."""
    out = torch.full((tokens, WIDTH), torch.nan)
    return out, trace_kernel(kernel, grid, out, cache, table, *rest, BLOCK_SIZE=BLOCK_SIZE, WIDTH=WIDTH)


def _takes_other_sizes(kernel, grid: tuple[int, ...], slots: list[int], table, *rest, starts=None) -> None:
    """Check that it copies the rows of `slots` with blocks of 2 and rows of 16 numbers."""
    cache = torch.arange(20 * 16, dtype=torch.float32).view(20, 16)
    out = torch.full((len(slots), 16), torch.nan)
    given = [out, cache] if starts is None else [out, starts, cache]
    trace_kernel(kernel, grid, *given, torch.as_tensor(table, dtype=torch.int32), *rest, BLOCK_SIZE=2, WIDTH=16)
    assert torch.equal(out, cache[slots]), (
        "with blocks of 2, rows of 16 numbers and a table of another width it copies other rows: "
        "are BLOCK_SIZE, WIDTH and the table's width used, and no number in their place?"
    )


def _rows_are(out: torch.Tensor, cache: torch.Tensor, wanted: list[int], table: torch.Tensor) -> None:
    """Check that row i of out is row wanted[i] of the cache; else say which it is, and which mistake that suggests."""
    wrong = [row for row, slot in enumerate(wanted) if not torch.equal(out[row], cache[slot])]
    if not wrong:
        return
    row = next((row for row in wrong if wanted[row] % BLOCK_SIZE > 1), wrong[0])  # where the mistakes differ most
    slot = wanted[row]
    if out[row].isnan().any():
        raise AssertionError(f"row {row} of out was not written, or not as a whole")
    same = (cache == out[row]).all(dim=1).nonzero().flatten().tolist()
    block = slot // BLOCK_SIZE
    entries = f"blocks of {BLOCK_SIZE}, table {table.tolist()}"
    if not same:
        raise AssertionError(f"row {row} of out is not a row of the cache ({entries}): is a row WIDTH elements long?")
    found = same[0]
    hints = {
        row: "that is the token's own number: the table is not used",
        block: "that is the block's number, not a slot",
    }
    hints[block * BLOCK_SIZE] = "that is the block's first slot: the place in the block is missing"
    hints[block + slot % BLOCK_SIZE] = "a block begins at block * BLOCK_SIZE"
    hint = hints.get(found, "is it the right entry of the right row of the table?")
    raise AssertionError(f"row {row} of out comes from slot {found}, not {slot} ({entries}): {hint}")


def _stays_inside(trace: KernelTrace) -> None:
    assert not trace.out_of_bounds, f"{trace.out_of_bounds[0]}. Is the last block masked, in the load and in the store?"
    assert not trace.races, trace.races[0]


def _rows_of_block(place: int, length: int) -> list[int]:
    """Count the tokens in a sequence's block number `place`."""
    return list(range(length))[place * BLOCK_SIZE : (place + 1) * BLOCK_SIZE]


def _each_writes_its_own(trace: KernelTrace, own: dict[tuple[int, ...], list[int]]) -> None:
    """Check that each program wrote its own rows of out and no others."""
    for program, rows in own.items():
        writes = [a for a in trace.accesses if a.kind != LOAD and (a.argument, a.program) == ("out", program)]
        found = sorted({int(element) // WIDTH for access in writes for element in access.elements})
        name = program if len(program) > 1 else program[0]
        assert found == rows, (
            f"program {name} writes rows {found} of out, and its own are {rows}: "
            "each program does its part, and not the others' too"
        )


def _reads(trace: KernelTrace, name: str, most: int, what: str, hint: str = "") -> None:
    """Check that the kernel read no more than `most` bytes of an argument."""
    read = trace.arguments[name].bytes_read
    assert read <= most, f"{read} bytes of {name} were read, {most} are enough: {what}. {hint}".strip()


def plug(module) -> Plugged:
    """Serve with your pool, which has so few blocks that many requests wait for others to end."""

    class Pool(module.BlockPool):
        """Adds to the exercise's pool what the engine also needs. Nothing is cached, so nothing is evicted."""

        def __init__(self, num_gpu_blocks: int, enable_caching: bool) -> None:
            assert not enable_caching, "the exercise's pool knows no hashes"
            super().__init__(num_gpu_blocks)
            self.num_usable_blocks = num_gpu_blocks - 1

        def get_usage(self) -> float:
            return 1 - self.get_num_free_blocks() / self.num_usable_blocks

        def evict_blocks(self, blocks) -> None:
            pass

        def reset_prefix_cache(self) -> bool:
            return self.get_num_free_blocks() == self.num_usable_blocks

    def says(llm) -> dict[str, object]:
        return {"would run if each reserved 256 slots": 40 * 16 // 256}

    return Plugged(
        parts=Parts(policy=SchedulingPolicy(block_pool=Pool)),
        engine_args={"enable_prefix_caching": False, "num_gpu_blocks_override": 41, "max_num_seqs": 128},
        prompts=PROMPTS * 18,
        max_tokens=12,
        says=says,
    )
