"""Check exercise 02 and the script that solves it, and serve requests with its pool."""

import random

import torch

from minivllm.config import Parts
from minivllm.core.policy import SchedulingPolicy
from minivllm_lab.kernel_trace import LOAD, KernelTrace, trace_kernel
from minivllm_lab.plugged import PROMPTS, Plugged

BLOCK_SIZE, WIDTH = 4, 8  # of the kernels' checks; a row is 32 bytes
ROW = 4 * WIDTH


def _ids(table) -> list[int]:
    return [block.block_id for block in table.blocks]


def _counts(pool) -> list[int]:
    return [block.ref_cnt for block in pool.blocks]


def _refuses(act) -> bool:
    try:
        act()
    except ValueError:
        return True
    return False


def _table(module, tokens: int, blocks: int = 12, block_size: int = 4):
    pool = module.BlockPool(blocks)
    table = module.BlockTable(pool, block_size)
    table.append(tokens)
    return pool, table


def check_slot_mapping(module):
    """A position's slot is block_table[position // block_size] * block_size + position % block_size."""
    found = list(module.slot_mapping([7, 3, 9], [0, 3, 4, 9, 11], 4))
    mistakes = {
        (0, 3, 4, 9, 11): "these are the positions themselves: the table is not used",
        (7, 7, 3, 9, 9): "these are blocks; a slot is counted in tokens",
        (28, 28, 12, 36, 36): "these are the first slots of the blocks; the place in the block is missing",
        (7, 10, 3, 10, 12): "a block begins at block * block_size, not at its own number",
    }
    hint = mistakes.get(tuple(found), "the table is 7, 3, 9 and blocks have 4 slots")
    assert found == [28, 31, 12, 37, 39], f"positions 0, 3, 4, 9, 11 got slots {found}: {hint}"
    assert list(module.slot_mapping([5, 2], [0, 1], 1)) == [5, 2], "with blocks of 1, a slot is a block"


def check_null_block(module):
    """A pool of 5 blocks allocates 4, and never block 0."""
    taken = [block.block_id for block in module.BlockPool(5).get_new_blocks(4)]
    assert sorted(taken) == [1, 2, 3, 4], f"handed out {taken}"


def check_all_or_none(module):
    """If fewer blocks are free than are needed, the pool raises a ValueError and takes none."""
    pool = module.BlockPool(5)
    first = pool.get_new_blocks(2)
    assert [block.ref_cnt for block in first] == [1, 1], "each block has one holder once it is taken"
    assert _refuses(lambda: pool.get_new_blocks(3)), "2 blocks are free, but 3 are needed: raise a ValueError"
    assert pool.get_num_free_blocks() == 2, f"{pool.get_num_free_blocks()} blocks are free after the refusal, not 2"
    assert len(pool.get_new_blocks(2)) == 2


def check_reference_counts(module):
    """A block with two holders is free when both have released it, and not before."""
    pool = module.BlockPool(4)
    blocks = pool.get_new_blocks(2)
    pool.touch(blocks)
    assert [block.ref_cnt for block in blocks] == [2, 2], "two hold each block"
    pool.free_blocks(blocks)
    assert pool.get_num_free_blocks() == 1, "one still holds each block"
    pool.free_blocks(blocks)
    assert pool.get_num_free_blocks() == 3, "nobody holds them any more"


def check_double_free(module):
    """Freeing a block that nobody holds raises a ValueError."""
    pool = module.BlockPool(4)
    blocks = pool.get_new_blocks(1)
    pool.free_blocks(blocks)
    assert _refuses(lambda: pool.free_blocks(blocks)), "the same block was freed twice and nothing was said"
    twice = pool.get_new_blocks(1) * 2
    assert _refuses(lambda: pool.free_blocks(twice)), "a block was freed twice in one call and nothing was said"


def check_order_of_reuse(module):
    """Freed blocks are taken next, in the order in which they were freed."""
    pool = module.BlockPool(8)
    a, b, c = pool.get_new_blocks(3)
    pool.free_blocks([c, a, b])
    found = [block.block_id for block in pool.get_new_blocks(4)]
    wanted = [c.block_id, a.block_id, b.block_id, 4]
    assert found == wanted, f"taken next: {found}, not {wanted}"


def check_blocks_come_on_demand(module):
    """A table takes a block only when a token needs it, and every token has a slot of its own."""
    pool = module.BlockPool(12)
    table, slots = module.BlockTable(pool, 4), []
    for count, blocks in ((1, 1), (3, 1), (1, 2), (0, 2), (8, 4)):
        found, copies = table.append(count)
        slots += found
        assert len(found) == count, f"{len(found)} slots for {count} tokens"
        assert list(copies) == [], "nothing is shared, so nothing is copied"
        assert len(table.blocks) == blocks, f"{len(table.blocks)} blocks for {table.num_tokens} tokens, not {blocks}"
    assert table.num_tokens == 13
    assert len(set(slots)) == 13, "two tokens have the same slot"
    wanted = module.slot_mapping(_ids(table), range(13), 4)
    assert slots == list(wanted), f"slots {slots}, the table says {wanted}"


def check_fork_takes_nothing(module):
    """A fork takes no block; each block of the past has two holders, and the tables are two lists."""
    pool, table = _table(module, 10)
    free = pool.get_num_free_blocks()
    child = table.fork()
    assert pool.get_num_free_blocks() == free, "a fork took blocks"
    assert _ids(child) == _ids(table), "the child has another past"
    assert child.num_tokens == 10
    assert [block.ref_cnt for block in child.blocks] == [2, 2, 2], "two hold each block"
    child.append(5)
    assert len(table.blocks) == 3, "the child grew, and its parent with it"
    assert table.num_tokens == 10


def check_copy_on_write(module):
    """Stretch: the first to write into a shared, half full block gets its own copy; the last one writes in place."""
    pool, table = _table(module, 10)
    child, before = table.fork(), _ids(table)
    slots, copies = child.append(1)
    assert _ids(table) == before, "the parent's table has changed"
    assert _ids(child)[:2] == before[:2], "full blocks stay shared"
    own = _ids(child)[2]
    assert own != before[2], "the child writes into a block that its parent reads"
    assert list(copies) == [(before[2], own)], f"copies {copies}, not {[(before[2], own)]}"
    assert list(slots) == [own * 4 + 2], "the new token goes into the new block"
    assert table.blocks[2].ref_cnt == 1, "the child has let go of the shared block"
    assert list(table.append(1)) == [[before[2] * 4 + 2], []], "nobody shares the block any more: no copy"


def check_no_token_no_copy(module):
    """`append(0)` writes nothing, so it copies nothing and takes nothing, even after a fork."""
    pool, table = _table(module, 10)
    child = table.fork()
    before = _ids(child), _counts(pool), pool.get_num_free_blocks()
    slots, copies = child.append(0)
    assert list(copies) == [], f"append(0) wants to copy {copies}: no token is written, so the block can stay shared"
    assert list(slots) == [], f"append(0) returned slots {slots}"
    assert (_ids(child), _counts(pool), pool.get_num_free_blocks()) == before, "append(0) changed table or counts"


def check_full_blocks_are_not_copied(module):
    """With a full last block, both go on in new blocks, and nothing is copied."""
    pool, table = _table(module, 8)
    child = table.fork()
    for one in (child, table):
        _, copies = one.append(1)
        assert list(copies) == [], f"copied {copies}, although nobody writes into a full block"
    assert _ids(child)[:2] == _ids(table)[:2]
    assert _ids(child)[2] != _ids(table)[2], "both write into the same new block"


def check_dry_pool_changes_nothing(module):
    """If the pool has too few blocks, append raises, and table, pool and counts are unchanged."""
    pool, table = _table(module, 10, blocks=4)
    child = table.fork()
    for one, tokens in ((table, 1), (child, 3), (child, 9)):
        before = _ids(table), _ids(child), _counts(pool), pool.get_num_free_blocks()
        assert _refuses(lambda one=one, tokens=tokens: one.append(tokens)), f"no block is free for {tokens} more tokens"
        after = _ids(table), _ids(child), _counts(pool), pool.get_num_free_blocks()
        assert after == before, "something changed although append failed"
        assert one.num_tokens == 10, "tokens were counted that have no room"


def check_free_gives_back_in_reverse(module):
    """A freed table is empty, its last block is taken next, and blocks that a fork holds stay."""
    pool, table = _table(module, 12)
    child, ids = table.fork(), _ids(table)
    free = pool.get_num_free_blocks()
    table.free()
    assert (len(table.blocks), table.num_tokens) == (0, 0), "a freed table is empty"
    assert pool.get_num_free_blocks() == free, "blocks were freed that the fork still holds"
    child.free()
    found = [block.block_id for block in pool.get_new_blocks(3)]
    assert found == ids[::-1], f"taken next: {found}, not {ids[::-1]}"


def check_everyone_reads_their_own(module):
    """After 400 random appends, forks and frees, every sequence still reads its own tokens."""
    for block_size in (1, 3, 16):
        _play(module, block_size, random.Random(block_size))


def _play(module, block_size: int, draw: random.Random) -> None:
    """Write sequences of random tokens through slots and copies into one array; read them back after each step."""
    pool, cache = module.BlockPool(40), {}
    tables, texts = [], []
    for step in range(400):
        act = draw.choice(("append", "append", "append", "new", "fork", "free"))
        index = draw.randrange(len(tables)) if tables else None
        if act == "new" or index is None:
            tables.append(module.BlockTable(pool, block_size))
            texts.append([])
        elif act == "fork":
            tables.append(tables[index].fork())
            texts.append(list(texts[index]))
        elif act == "free":
            tables.pop(index).free()
            texts.pop(index)
        else:
            new = [draw.randrange(1000) for _ in range(draw.randrange(2 * block_size))]
            _write(tables[index], texts[index], new, cache, block_size)
        for table, text in zip(tables, texts):
            slots = module.slot_mapping(_ids(table), range(len(text)), block_size)
            assert [cache[slot] for slot in slots] == text, f"step {step}: a sequence reads what another one wrote"
        held = sum(len(set(_ids(table))) for table in tables)
        assert sum(_counts(pool)) == held, f"step {step}: {sum(_counts(pool))} references counted, {held} there are"
        assert pool.get_num_free_blocks() == sum(count == 0 for count in _counts(pool)[1:]), (
            f"step {step}: books are off"
        )


def _write(table, text: list, new: list, cache: dict, block_size: int) -> None:
    try:
        slots, copies = table.append(len(new))
    except ValueError:
        return
    for source, target in copies:
        for place in range(block_size):
            cache[target * block_size + place] = cache.get(source * block_size + place)
    cache.update(zip(slots, new))
    text += new


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
