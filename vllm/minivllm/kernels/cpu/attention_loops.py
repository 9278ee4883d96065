"""The CPU counterpart of `unified_attention.py`'s kernel, compiled by numba.

The algorithm is the same: a program takes some positions of one sequence and all heads of one KV
head's group, finds its sequence by the same search, iterates over the keys in tiles, looks up each
key's block in the table, and keeps (peak, total, weighted sum) of the online softmax, in log2
units. The difference is in the vectorization. Rows (position, head) are processed four at a time,
in vectors of sixteen floats:

    scores    lanes are 4 rows × 4 keys: a key is loaded once and used for four rows
    values    lanes are 16 dimensions: a value is loaded once and used for four rows

so a group of four heads reads K and V once, in place. Rows that pad the last four are computed but
not stored. Masked scores are −1e30 instead of −inf: whatever they add before a row's first visible
key is scaled to zero by that key, and −inf − −inf cannot occur.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from minivllm.kernels.cpu.cells import AttentionCells
from minivllm.kernels.cpu.lanes import (
    add,
    exp2_of_difference,
    four_numbers,
    keep_between,
    load,
    load_four,
    load_one,
    max_fours,
    maximum,
    multiply,
    multiply_add,
    prefetch,
    same,
    store,
    sum_fours,
    zero,
)
from minivllm.kernels.cpu.programs import array_at, counter_of, float_of, is_int8, jit, programs, take_number

TILE = 64  # keys at a time: their scores, and in a prefill their K and V, stay in the L1 cache
BLOCK_Q = 16  # positions per program
NOTHING, UNSEEN = np.float32(0.0), np.float32(-1e30)


@jit
def find_sequence(query_start_loc, index, num_seqs):
    """Return the sequence of a query block: the last whose first block, start // BLOCK_Q +
    sequence, is not after it.
    """
    low = 0
    high = num_seqs
    while low < high:
        middle = (low + high) // 2
        if query_start_loc[middle] // BLOCK_Q + middle <= index:
            low = middle + 1
        else:
            high = middle
    return low - 1


@jit
def locate(slots, first, key_end, block_table, place):
    """Write to `slots` the cache offset of each key of the tile at `first`; unused entries repeat
    the last key.

    `place` is (start of the sequence's row in the table, block_size, block_stride, slot_stride,
    start of the head in a block).
    """
    table_at, block_size, block_stride, slot_stride, head_at = place
    count = max(0, min(TILE, key_end - first))
    block = first // block_size
    offset = first - block * block_size
    key = 0
    while key < count:
        # Of the block's first key, for this head.
        at = np.int64(block_table[table_at + block]) * block_stride + offset * slot_stride + head_at
        here = min(block_size - offset, count - key)
        for step in range(here):
            slots[key + step] = at + step * slot_stride
        key += here
        block += 1
        offset = 0
    for key in range(count, TILE):
        slots[key] = slots[max(count - 1, 0)]  # loads in fours may read them; their scores are masked


@jit
def fetch(cache, at, head_dim):
    """Prefetch one key or value."""
    for dim in range(0, head_dim, 16):
        prefetch(cache, at + dim)


@jit
def fill(numbers, count, number):
    """Fill the first `count` numbers, a multiple of 16."""
    for index in range(0, count, 16):
        store(numbers, index, same(number))


@jit
def scale_columns(numbers, scales, count):
    """Multiply 4 rows of scores by the keys' scales, or of weights by the values' scales."""
    for key in range(0, count, 4):
        store(numbers, 4 * key, multiply(load(numbers, 4 * key), load_four(scales, key)))


@jit
def score(scores, queries, at, k_cache, slots, count, head_dim, later, ahead):
    """Compute scores of 4 rows: lane 4 r + n of group key // 4 is row r's score for the group's
    n-th key.

    `ahead`: meanwhile prefetch the keys of the next tile, at `later`. `add_values` does the same
    with the values.
    """
    for key in range(0, count, 4):
        if ahead:
            for near in range(key, key + 4):
                fetch(k_cache, later[near], head_dim)
        a, b, c, d = zero(), zero(), zero(), zero()
        for dim in range(0, head_dim, 4):
            query = load(queries, at + 4 * dim)
            a = multiply_add(query, load_four(k_cache, slots[key] + dim), a)
            b = multiply_add(query, load_four(k_cache, slots[key + 1] + dim), b)
            c = multiply_add(query, load_four(k_cache, slots[key + 2] + dim), c)
            d = multiply_add(query, load_four(k_cache, slots[key + 3] + dim), d)
        store(scores, 4 * key, sum_fours(a, b, c, d))


@jit
def mask(scores, tile, count, positions, oldest, at):
    """Mask the keys after a row's position, and those up to and including its `oldest`."""
    low = load(oldest, at)
    high = load(positions, at)
    for group in range((count + 3) // 4):
        keys = four_numbers(np.float32(tile + 4 * group))
        store(scores, 16 * group, keep_between(load(scores, 16 * group), low, keys, high, np.float32(UNSEEN)))


@jit
def weigh(scores, count, peaks, totals, shrinks, at):
    """Turn scores into weights, exp2(score − peak). Update peak and total; `shrinks` gets the
    old sums' factor.
    """
    peak = load(peaks, at)
    highest = peak
    for group in range((count + 3) // 4):
        highest = maximum(highest, load(scores, 16 * group))
    highest = max_fours(highest)  # over the keys of a row, in all its four lanes
    total = zero()
    for group in range((count + 3) // 4):
        weight = exp2_of_difference(load(scores, 16 * group), highest)
        total = add(total, weight)
        store(scores, 16 * group, weight)
    shrink = exp2_of_difference(peak, highest)
    store(shrinks, 0, shrink)
    store(totals, at, multiply_add(load(totals, at), shrink, total))
    store(peaks, at, highest)


@jit
def add_values(acc, at, weights, shrinks, v_cache, slots, count, head_dim, later, ahead):
    """Shrink acc of 4 rows, [4, head_dim] starting at `at`, and add weight × value of every key."""
    for dim in range(0, head_dim, 16):
        first = at + dim
        a = multiply(load(acc, first), load_one(shrinks, 0))
        b = multiply(load(acc, first + head_dim), load_one(shrinks, 4))
        c = multiply(load(acc, first + 2 * head_dim), load_one(shrinks, 8))
        d = multiply(load(acc, first + 3 * head_dim), load_one(shrinks, 12))
        for key in range(count):
            if ahead:
                prefetch(v_cache, later[key] + dim)
            value = load(v_cache, slots[key] + dim)
            weight = key // 4 * 16 + key % 4
            a = multiply_add(load_one(weights, weight), value, a)
            b = multiply_add(load_one(weights, weight + 4), value, b)
            c = multiply_add(load_one(weights, weight + 8), value, c)
            d = multiply_add(load_one(weights, weight + 12), value, d)
        store(acc, first, a)
        store(acc, first + head_dim, b)
        store(acc, first + 2 * head_dim, c)
        store(acc, first + 3 * head_dim, d)


@jit
def take_rows(q, q_at, q_stride, group, head_dim, rows, bounds, scale, scaled, queries, positions, oldest):
    """Set up a program's rows: `queries` as `score` reads them (4 rows × 4 dimensions), and each
    row's mask bounds. `bounds` are the first position and the window; `scaled` has room for a row.
    """
    first_position, window = bounds
    for row in range((rows + 3) // 4 * 4):
        real = min(row, rows - 1)  # rows of padding repeat the last one
        source = q_at + real // group * q_stride + real % group * head_dim
        target = row // 4 * 4 * head_dim + row % 4 * 4  # rows in fours, dimensions in fours
        for dim in range(0, head_dim, 16):
            store(scaled, dim, multiply(load(q, source + dim), same(scale)))
        for dim in range(head_dim):
            queries[target + dim // 4 * 16 + dim % 4] = scaled[dim]
        for lane in range(4 * row, 4 * row + 4):
            positions[lane] = first_position + real // group
            oldest[lane] = positions[lane] - window


@jit
def put_rows(out, out_at, heads, group, head_dim, rows, acc, totals):
    """Store a program's real rows, each the weighted sum divided by the total."""
    for row in range(rows):
        total = totals[4 * row] + totals[4 * row + 1] + totals[4 * row + 2] + totals[4 * row + 3]
        target = out_at + row // group * heads * head_dim + row % group * head_dim
        share = same(np.float32(1.0) / total)
        for dim in range(0, head_dim, 16):
            store(out, target + dim, multiply(load(acc, row * head_dim + dim), share))


class Program(NamedTuple):
    """Some queries of one sequence, all heads of a group, and the keys they see. With 0 rows, no
    program is left.
    """

    rows: int
    first_token: int
    first_position: int
    key_begin: int
    key_end: int
    sequence: int
    kv_head: int
    place: tuple[int, int, int, int, int]  # for `locate`


@jit
def next_program(cells, query_start_loc, seq_lens):
    """Take the next non-empty program of the grid, late positions first."""
    kv_heads, num_seqs, block_size, window = cells.kv_heads, cells.num_seqs, cells.slots_per_block, cells.sliding_window
    block_stride, slot_stride = cells.block_stride, cells.slot_stride
    group = cells.heads // kv_heads
    query_blocks = query_start_loc[num_seqs] // BLOCK_Q + num_seqs
    while True:
        program = take_number(counter_of(cells))
        if program >= query_blocks * kv_heads:
            return Program(0, 0, 0, 0, 0, 0, 0, (0, block_size, block_stride, slot_stride, 0))
        kv_head = program % kv_heads
        index = query_blocks - 1 - program // kv_heads
        sequence = find_sequence(query_start_loc, index, num_seqs)
        start = query_start_loc[sequence]
        query_len = query_start_loc[sequence + 1] - start
        first_query = (index - start // BLOCK_Q - sequence) * BLOCK_Q
        if first_query >= query_len:  # the grid has room for more blocks than this batch needs
            continue
        rows = min(BLOCK_Q, query_len - first_query) * group
        first_position = seq_lens[sequence] - query_len + first_query
        key_begin = max(0, first_position - window + 1) // TILE * TILE
        key_end = first_position + rows // group
        place = (sequence * cells.table_stride, block_size, block_stride, slot_stride, kv_head * cells.head_stride)
        return Program(rows, start + first_query, first_position, key_begin, key_end, sequence, kv_head, place)


def attend(cells, number, element):
    """Run programs of the grid (tokens // BLOCK_Q + sequences) × kv_heads until none are left.

    While a tile is computed, the next one is prefetched: of the same program, or the first of the
    next program. `number` is the type of queries and output, `element` that of the caches.
    """
    heads, kv_heads, head_dim, num_seqs = cells.heads, cells.kv_heads, cells.head_dim, cells.num_seqs
    q, out = array_at(cells.q, 1, number), array_at(cells.out, 1, number)
    k_cache, v_cache = array_at(cells.k_cache, 1, element), array_at(cells.v_cache, 1, element)
    query_start_loc = array_at(cells.query_start_loc, num_seqs + 1, np.int32)
    seq_lens = array_at(cells.seq_lens, num_seqs, np.int32)
    block_table = array_at(cells.block_table, num_seqs * cells.table_stride, np.int32)
    q_stride = cells.q_stride
    scale, window = float_of(cells.scale), cells.sliding_window

    k_scales, v_scales = array_at(cells.k_scales, 1, np.float32), array_at(cells.v_scales, 1, np.float32)
    scaled = is_int8(element)
    key_scales, value_scales = np.empty(TILE, np.float32), np.empty(TILE, np.float32)

    group = heads // kv_heads
    most_rows = (BLOCK_Q * group + 3) // 4 * 4  # rows are computed in fours
    queries, acc = np.empty(most_rows * head_dim, np.float32), np.empty(most_rows * head_dim, np.float32)
    scratch = np.empty(head_dim, np.float32)
    positions, oldest = np.empty(most_rows * 4, np.float32), np.empty(most_rows * 4, np.float32)
    peaks, totals = np.empty(most_rows * 4, np.float32), np.empty(most_rows * 4, np.float32)
    scores, shrinks = np.empty(4 * TILE, np.float32), np.empty(16, np.float32)
    slots, later, scale_slots = np.empty(TILE, np.int64), np.empty(TILE, np.int64), np.empty(TILE, np.int64)
    slots[0] = later[0] = scale_slots[0] = 0  # all that is read of a tile without keys
    coming = next_program(cells, query_start_loc, seq_lens)
    locate(later, coming.key_begin, coming.key_end, block_table, coming.place)
    while coming.rows:
        program, coming = coming, next_program(cells, query_start_loc, seq_lens)
        rows, key_end, place = program.rows, program.key_end, program.place
        head_at = program.kv_head * group * head_dim
        q_at = program.first_token * q_stride + head_at
        out_at = program.first_token * heads * head_dim + head_at
        bounds = program.first_position, window
        take_rows(q, q_at, q_stride, group, head_dim, rows, bounds, scale, scratch, queries, positions, oldest)
        padded_rows = (rows + 3) // 4 * 4
        fill(acc, padded_rows * head_dim, NOTHING)
        fill(totals, padded_rows * 4, NOTHING)
        fill(peaks, padded_rows * 4, UNSEEN)
        for tile in range(program.key_begin, key_end, TILE):
            slots, later = later, slots  # what was prefetched is now computed
            begin = tile + TILE if tile + TILE < key_end else coming.key_begin
            owner = program if tile + TILE < key_end else coming
            locate(later, begin, owner.key_end, block_table, owner.place)
            count = min(TILE, key_end - tile)
            for key in range(count, TILE):  # `score` and `add_values` fetch the others
                fetch(k_cache, later[key], head_dim)
                fetch(v_cache, later[key], head_dim)
            if scaled:  # the scales are [blocks, kv_heads, block_size]
                scale_place = (place[0], place[1], kv_heads * place[1], np.int64(1), program.kv_head * place[1])
                locate(scale_slots, tile, key_end, block_table, scale_place)
                for key in range(count):
                    key_scales[key] = k_scales[scale_slots[key]]
                    value_scales[key] = v_scales[scale_slots[key]]
            for row in range(0, rows, 4):
                lowest = positions[4 * row]
                highest = positions[4 * row + 12]
                if tile > highest or tile + count <= lowest - window + 1:
                    continue  # none of the four rows sees a key of this tile
                ahead = row == 0  # the first four rows prefetch for all
                score(scores, queries, row * head_dim, k_cache, slots, count, head_dim, later, ahead)
                if scaled:
                    scale_columns(scores, key_scales, count)
                # Most tiles are seen whole by all four rows, and need no mask.
                if tile + (count + 3) // 4 * 4 > lowest + 1 or tile <= highest - window:
                    mask(scores, tile, count, positions, oldest, 4 * row)
                weigh(scores, count, peaks, totals, shrinks, 4 * row)
                if scaled:
                    scale_columns(scores, value_scales, count)
                add_values(acc, row * head_dim, scores, shrinks, v_cache, slots, count, head_dim, later, ahead)
        put_rows(out, out_at, heads, group, head_dim, rows, acc, totals)


programs_for = programs(AttentionCells, attend)
