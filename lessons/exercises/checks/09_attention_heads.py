"""Check the part of exercise 09 that needs nothing but Python: a page runs these checks, too."""

from itertools import product


# ---- ranks -----------------------------------------------------------------------------------------------------------

SIZES = [(tp, n) for tp, n in product(range(1, 17), range(1, 17)) if n % tp == 0 or tp % n == 0]
SIZES += [(8, 128), (32, 32), (64, 8)]


def held_by(rank, tp, num_kv_heads):
    """Return the KV heads that the rank's query heads read, by counting lcm-many query heads."""
    heads = num_kv_heads * tp
    asked = range(rank * heads // tp, (rank + 1) * heads // tp)
    return sorted({head // tp for head in asked})


def check_each_rank_keeps_its_share(module):
    """With as many KV heads as ranks, or more, every head is kept once."""
    for tp, heads in SIZES:
        if heads >= tp:
            for rank in range(tp):
                compare_ranks(module, rank, tp, heads)


def check_heads_are_replicated(module):
    """With more ranks than KV heads, each rank keeps one, which its query heads read."""
    for tp, heads in SIZES:
        if tp > heads:
            for rank in range(tp):
                compare_ranks(module, rank, tp, heads)


def compare_ranks(module, rank, tp, heads):
    """Check that the rank keeps what its query heads read."""
    found, expected = module.kv_heads_of_rank(rank, tp, heads), held_by(rank, tp, heads)
    assert isinstance(found, list), f"it returns {type(found).__name__}, not a list"
    assert all(type(head) is int for head in found), f"it returns {found}; the numbers of heads are whole numbers"
    hint = ""
    if found == [rank % heads] and tp > heads:
        hint = f": its query heads are neighbours of those of rank {rank - 1}, and ask the same KV head"
    elif set(found) > set(expected):
        hint = ": it keeps heads that its query heads never ask"
    elif found == list(range(rank, heads, tp)) and tp < heads:
        hint = ": a rank's query heads are neighbours, so its KV heads are, too"
    assert found == expected, f"rank {rank} of {tp}, {heads} KV heads: it keeps {found}, and asks {expected}{hint}"


def check_uneven_divisions_are_refused(module):
    """Six KV heads on four ranks, or four on six, raise ValueError."""
    for tp, heads in ((4, 6), (6, 4), (3, 8), (5, 2), (8, 12)):
        for rank in range(tp):
            try:
                found = module.kv_heads_of_rank(rank, tp, heads)
            except ValueError:
                continue
            where = f"{heads} KV heads on {tp} ranks cannot be divided evenly"
            raise AssertionError(f"{where}; for rank {rank} it returns {found}")
