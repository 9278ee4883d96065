"""Check the part of exercise 02 that needs nothing but Python: a page runs these checks, too."""

import random


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
