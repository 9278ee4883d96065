"""Check the part of exercise 05 that needs nothing but Python: a page runs these checks, too."""

import builtins
import random
from unittest import mock

from minivllm.core.block_hash import hash_new_full_blocks

ZEROS = bytes(32)


def hash_of(module, parent, tokens, extra_keys=b""):
    """Return the learner's hash, or say what was returned if it is not bytes."""
    block_hash = module.hash_block_tokens(parent, tokens, extra_keys)
    assert isinstance(block_hash, bytes), f"the hash is {type(block_hash).__name__}, not bytes"
    return block_hash


def check_a_hash_has_32_bytes(module):
    """A hash is 32 bytes, the same in every call, whatever it stands for."""
    for parent, tokens in ((ZEROS, [1, 2]), (b"\7" * 32, list(range(16)))):
        block_hash = hash_of(module, parent, tokens)
        raw = len(block_hash) in (32 + 8 * len(tokens), 32 + 4 * len(tokens), 8 * len(tokens), 4 * len(tokens))
        why = "is it the prefix itself? That grows without end" if raw else "SHA-256 gives 32: fewer soon collide"
        assert len(block_hash) == 32, f"a hash of {len(block_hash)} bytes for {len(tokens)} tokens: {why}"
        assert hash_of(module, parent, tokens) == block_hash, "the same block has another hash in the second call"
    columns = set(zip(*(hash_of(module, ZEROS, [n]) for n in range(64)), strict=True))
    varied = sum(len(set(column)) > 8 for column in columns)
    assert varied == 32, (
        f"only {varied} of a hash's 32 bytes say anything of their own: the hash is shorter than it looks"
    )


def check_whole_token_ids_count(module):
    """Two blocks whose tokens differ, by however much, have different hashes."""
    first = hash_of(module, ZEROS, [5, 6, 7])
    for step in (256, 2**15, 2**16, 2**24):
        other = hash_of(module, ZEROS, [5, 6 + step, 7])
        hint = "one user gets the keys of another. Are the ids cut to a byte or two?"
        assert first != other, f"tokens 5, 6, 7 and 5, {6 + step:,}, 7 share a hash: {hint}"
    assert first != hash_of(module, ZEROS, [7, 6, 5]), "tokens 5, 6, 7 and 7, 6, 5 share a hash: the order counts"
    assert first != hash_of(module, ZEROS, [5, 5, 8]), "tokens 5, 6, 7 and 5, 5, 8 share a hash: is it their sum?"
    long, changed = (hash_of(module, ZEROS, [*range(63), last]) for last in (7, 8))
    assert long != changed, "two blocks of 64 tokens that differ in the last one share a hash: all tokens count"
    first, other = hash_of(module, ZEROS, [1, 23]), hash_of(module, ZEROS, [12, 3])
    assert first != other, "tokens 1, 23 and 12, 3 share a hash: are their digits run together?"


def check_the_parent_counts(module):
    """All of the parent's bytes count, and so does the order of the blocks."""
    orders = ([1, 2], [3, 4]), ([3, 4], [1, 2])
    forward, backward = (hash_of(module, hash_of(module, ZEROS, first), second) for first, second in orders)
    assert forward != backward, "tokens 1, 2, 3, 4 and 3, 4, 1, 2 end in the same hash: the order of the blocks counts"
    for place in range(32):
        parents = ZEROS, bytes(place) + b"\1" + bytes(31 - place)
        first, other = (hash_of(module, parent, [1, 2]) for parent in parents)
        assert first != other, (
            f"parents that differ in byte {place} give the same hash: all 32 bytes of the parent count"
        )


def check_another_process_makes_the_same_hash(module):
    """A hash does not come from Python's `hash()`, whose values differ from process to process."""

    def refuse(_):
        raise AssertionError("Python's hash() has other values in another process, and only 8 bytes")

    with mock.patch.object(builtins, "hash", refuse):
        hash_of(module, ZEROS, [1, 2], b"ann")


def check_full_blocks_have_hashes(module):
    """Nine tokens in blocks of 4 have two hashes, and eight of them the same two."""
    hashes = module.block_hashes(list(range(9)), 4)
    assert len(hashes) == 2, f"{len(hashes)} hashes for 9 tokens in blocks of 4"
    assert list(module.block_hashes(list(range(8)), 4)) == list(hashes), "the ninth token is in no full block yet"
    assert list(module.block_hashes([1, 2, 3], 4)) == [], "three tokens fill no block of 4"


def check_a_hash_stands_for_the_whole_prefix(module):
    """A block whose tokens are equal has another hash where anything before it differs, however far back."""
    first, other = module.block_hashes([1, 2, 3, 4, 5, 6], 2), module.block_hashes([1, 9, 3, 4, 5, 6], 2)
    shared = "tokens 3, 4 follow 1, 2 here and 1, 9 there, and have the same hash. Is the hash before them in it?"
    assert not set(first) & set(other), shared
    again = module.block_hashes([3, 3, 3, 3, 3, 3], 2)
    assert len(set(again)) == 3, "three equal blocks in one text have different prefixes, so different hashes"
    near, far = (module.block_hashes([first, *range(199)], 4) for first in (1, 2))
    assert near[-1] != far[-1], "two texts of 200 tokens that differ in the first have the same last hash"


def check_each_hash_is_made_from_the_one_before(module):
    """A block's hash is `hash_block_tokens` of the hash before it and the block's tokens alone."""
    parent = ZEROS
    for index, block_hash in enumerate(module.block_hashes([1, 2, 3, 4, 5, 6], 2)):
        tokens = [2 * index + 1, 2 * index + 2]
        assert block_hash in (hash_of(module, parent, tokens), hash_of(module, parent, tuple(tokens))), (
            f"block {index} has another hash than hash_block_tokens makes of the hash before it and {tokens}: "
            "do you hash the whole prefix again for each block?"
        )
        parent = block_hash


def check_extra_keys_separate_users(module):
    """No hash is the same with another salt; all are with the same salt."""
    tokens = list(range(12))
    plain, ann, bob = (module.block_hashes(tokens, 4, extra) for extra in (b"", b"ann", b"bob"))
    assert not set(plain) & set(ann) and not set(ann) & set(bob), "users with different salts share a block"
    assert list(module.block_hashes(tokens, 4, b"ann")) == list(ann), "the same salt must give the same hashes"
    for salt, other in ((b"ann", b"anna"), (b"customer 1", b"customer 2"), (b"1 customer", b"2 customer")):
        shared = f"salts {salt.decode()} and {other.decode()} share a hash"
        assert hash_of(module, ZEROS, [1], salt) != hash_of(module, ZEROS, [1], other), shared


def check_hashes_are_equal_where_the_engines_are(module):
    """Two blocks of random prompts have the same hash exactly where the engine's have."""
    draw = random.Random(0)
    ours, engines = [], []
    for _ in range(60):
        tokens, salt = [draw.choice((0, 1, 257)) for _ in range(draw.randint(0, 14))], draw.choice([b"", b"a", b"b"])
        ours += module.block_hashes(tokens, 3, salt)
        hashes: list = []
        hash_new_full_blocks(hashes, tokens, 3, first_block_keys=salt)
        engines += hashes
    assert len(ours) == len(engines), f"{len(ours)} hashes, and the engine has {len(engines)}"
    for i, (learners, engines_hash) in enumerate(zip(ours, engines, strict=True)):
        sharing, expected = [x == learners for x in ours], [x == engines_hash for x in engines]
        assert sharing == expected, f"hash {i} is shared by {sum(sharing)} blocks, the engine's by {sum(expected)}"


def check_the_longest_hit(module):
    """Cached blocks count from the start, whole, and the last token never."""
    hashes = [bytes([n]) * 32 for n in range(1, 5)]
    cases = (
        (17, hashes, 16, ""),
        (16, hashes, 12, "the last token must be computed: its output is the next token"),
        (13, hashes, 12, ""),
        (12, hashes, 8, "the last token must be computed: its output is the next token"),
        (4, hashes, 0, "the last token must be computed: its output is the next token"),
        (3, hashes, 0, ""),
        (17, [hashes[0], *hashes[2:]], 4, "after the first block that is not cached nothing counts"),
        (17, hashes[1:], 0, "after the first block that is not cached nothing counts"),
        (17, [], 0, ""),
    )
    for tokens, cached, expected, why in cases:
        hit = module.find_longest_cache_hit(hashes[: tokens // 4], tokens, 4, set(cached))
        blocks = " Blocks in place of tokens?" if expected and hit == expected // 4 else ""
        case = f"{tokens} tokens in blocks of 4, blocks {[block_hash[0] - 1 for block_hash in cached]} cached"
        assert hit == expected, f"{case}: a hit of {hit}, not {expected}. {why}{blocks}"
