"""Check exercise 03 and the script that solves it, and serve requests with its attention."""

import math
import tracemalloc

import numpy as np
import torch

from minivllm.config import Parts
from minivllm.kernels.reshape_and_cache import reshape_and_cache
from minivllm_lab.checks.kernel_trace import trace_kernel
from minivllm_lab.checks.plugged import Plugged
from minivllm_lab.flash_attention.slow_memory import SlowArray, in_slow_memory
from minivllm_lab.flash_attention.attention_traffic import flash_traffic


def _rows(rows, keys, head_dim=8, seed=0, spread=1.0):
    draw = np.random.default_rng(seed)
    return draw.standard_normal((rows, keys)) * spread, draw.standard_normal((keys, head_dim))


def _softmax(scores):
    weights = np.exp(scores - scores.max(axis=1, keepdims=True))
    return weights / weights.sum(axis=1, keepdims=True)


def _steps(module, scores, values, cuts):
    """Return the state after tiles that end at each of `cuts`."""
    state = module.nothing_seen(len(scores), values.shape[1])
    for first, end in zip((0, *cuts), cuts):
        state = module.softmax_step(state, scores[:, first:end], values[first:end])
    return state


def _agrees(found, expected, what, mistakes=()):
    """Compare `found` with `expected`; say by how much it is off, and which usual mistake gives exactly that.

    mistakes: (what comes of it, what to say).
    """
    found = np.asarray(found, dtype=np.float64)
    assert found.shape == expected.shape, f"{what} has shape {found.shape}, not {expected.shape}"
    assert not np.isnan(found).any(), f"{what} holds NaN"
    error = np.abs(found - expected).max()
    if error >= 1e-4:
        known = [words for wrong, words in mistakes if np.abs(found - wrong).max() < 1e-4]
        raise AssertionError(f"{what} is off by {error:.2g}{': ' if known else ''}{known[0] if known else ''}")


def _finite(found, what):
    """Check that the result is finite, where a plain exp of the scores overflows."""
    assert np.isfinite(np.asarray(found)).all(), (
        f"{what} is infinite or NaN with large scores: subtract the running maximum before the exponential"
    )


def _attention(q, k, v, offset=None, scale=None):
    """Compute output and lse in float64; `offset` and `scale` make the usual mistakes."""
    offset = len(k) - len(q) if offset is None else offset
    scores = q.astype(np.float64) @ k.T.astype(np.float64) * (q.shape[1] ** -0.5 if scale is None else scale)
    scores[np.arange(len(k)) > np.arange(len(q))[:, None] + offset] = -np.inf
    top = scores.max(axis=1)
    return _softmax(scores) @ v, top + np.log(np.exp(scores - top[:, None]).sum(axis=1))


def _vectors(length, head_dim, queries=None, seed=0):
    q, k, v = np.random.default_rng(seed).standard_normal((3, length, head_dim)).astype(np.float32)
    return q[length - (queries or length) :], k, v


def check_one_tile_is_the_softmax(module):
    """One tile that holds all the keys gives the softmax of the row, times the values."""
    scores, values = _rows(3, 5)
    output, lse = module.finish(_steps(module, scores, values, (5,)))
    _agrees(output, _softmax(scores) @ values, "the output")
    _agrees(lse, np.log(np.exp(scores).sum(axis=1)), "the lse")


def check_later_tiles_rescale_what_came_before(module):
    """Tiles of 3, 1 and 4 keys whose maximum rises give the softmax of the whole row."""
    scores, values = _rows(4, 8)
    scores += np.arange(8)
    state = _steps(module, scores, values, (3, 4, 8))
    _agrees(state.m, scores.max(axis=1), "m")
    top = np.maximum.accumulate(scores, axis=1)[:, [2, 2, 2, 3, 7, 7, 7, 7]]  # the maximum when each key was added
    never = np.exp(scores - top)
    words = "what was summed under an old maximum was never multiplied by exp(old m - new m)"
    exact = np.exp(scores - scores.max(axis=1, keepdims=True))
    _agrees(state.l, exact.sum(axis=1), "l", [(never.sum(axis=1), words)])
    _agrees(state.o, exact @ values, "o", [(never @ values, f"{words}; o needs it as much as l")])


def check_maximum_that_came_early_stays(module):
    """If the first tile holds the largest score, later tiles are measured against it."""
    scores, values = _rows(4, 9)
    scores -= 2.0 * np.arange(9)
    state = _steps(module, scores, values, (2, 5, 9))
    _agrees(state.m, scores.max(axis=1), "m", [(scores[:, 5:].max(axis=1), "it is the last tile's only")])
    _agrees(module.finish(state)[0], _softmax(scores) @ values, "the output")


def check_large_scores_do_not_overflow(module):
    """Scores of some thousands, of either sign, give finite weights: the maximum is subtracted before exp."""
    scores, values = _rows(4, 12, spread=3000.0)
    with np.errstate(over="raise"):
        output, _ = module.finish(_steps(module, scores, values, (4, 8, 12)))
    _agrees(output, _softmax(scores) @ values, "the output")


def check_tile_that_a_row_may_not_see(module):
    """A tile that is masked as a whole changes nothing, whether it is a row's first or a later one."""
    scores, values = _rows(2, 12)
    scores[0, :4] = -np.inf  # the first tile of row 0
    scores[1, 4:8] = -np.inf  # the second of row 1
    state = _steps(module, scores, values, (4, 8, 12))
    assert not np.isnan(state.l[0]), "row 0 sees nothing of its first tile, and l is NaN: -inf - -inf is not a number"
    _agrees(module.finish(state)[0], _softmax(scores) @ values, "the output")
    blind = _steps(module, np.full((1, 4), -np.inf), values[:4], (2, 4))
    _agrees(module.finish(blind)[0], np.zeros((1, 8)), "the output of a row that sees nothing")
    assert np.isneginf(blind.m).all(), f"m of a row that sees nothing is {blind.m}, not -inf"


def check_step_leaves_the_old_state_alone(module):
    """The state that went in is the same afterwards."""
    scores, values = _rows(2, 4)
    before = _steps(module, scores, values, (4,))
    copies = [part.copy() for part in before]
    module.softmax_step(before, scores + 1, values)
    for name, part, copy in zip("mlo", before, copies):
        assert np.array_equal(part, copy), f"{name} of the old state has changed"


def check_merge_is_attention_over_both(module):
    """Results over 6 keys and over 2, made apart and merged in either order, equal the result over all 8."""
    scores, values = _rows(5, 8, spread=4.0)
    left = _steps(module, scores[:, :6], values[:6], (3, 6))
    right = _steps(module, scores[:, 6:], values[6:], (2,))
    average = (module.finish(left)[0] + module.finish(right)[0]) / 2
    words = "that is the average of both outputs, but 6 keys and 2 keys do not count alike"
    for merged in (module.merge(left, right), module.merge(right, left)):
        output = module.finish(merged)[0]
        _agrees(output, _softmax(scores) @ values, "the output", [(average, words)])
        _agrees(merged.m, scores.max(axis=1), "m")


def check_merge_with_nothing(module):
    """A side that saw no key adds nothing, and two such sides give none: split-KV has empty splits."""
    scores, values = _rows(3, 4)
    state, nothing = _steps(module, scores, values, (4,)), module.nothing_seen(3, 8)
    for merged in (module.merge(state, nothing), module.merge(nothing, state)):
        _agrees(module.finish(merged)[0], _softmax(scores) @ values, "the output")
    _agrees(module.finish(module.merge(nothing, nothing))[0], np.zeros((3, 8)), "the output over no key")


def check_finished_results_merge_too(module):
    """An output and its lse are a Partial (m = the lse, l = 1), which is what kernels of many heads return."""
    heads, parts = 2, []
    scores, values = np.random.default_rng(1).standard_normal((heads, 3, 8)) * 3, _rows(1, 8)[1]
    for cut in (slice(0, 5), slice(5, 8)):
        done = [module.finish(_steps(module, one[:, cut], values[cut], (cut.stop - cut.start,))) for one in scores]
        output, lse = (np.stack(part, axis=1) for part in zip(*done))
        parts.append(module.nothing_seen(3, 8)._replace(m=lse, l=np.ones_like(lse), o=output))
    expected = np.stack([_softmax(one) @ values for one in scores], axis=1)
    _agrees(module.finish(module.merge(*parts))[0], expected, "the output")


def check_tiles_give_attention(module):
    """Lengths around a tile, head dims that are not powers of two, tiles of unequal size: always causal attention."""
    for length, head_dim, block_q, block_k in (
        (1, 4, 16, 16),
        (16, 64, 16, 8),
        (33, 80, 16, 32),
        (50, 5, 7, 3),
        (40, 8, 64, 1),
    ):
        q, k, v = _vectors(length, head_dim)
        output, lse = module.tiled_attention(q, k, v, block_q, block_k)
        expected, logarithm = _attention(q, k, v)
        what = f"with {length} tokens in tiles of {block_q} queries and {block_k} keys, the"
        unscaled, unmasked = _attention(q, k, v, scale=1.0), _attention(q, k, v, offset=length)
        words = "the scores are not divided by sqrt(head_dim)", "every query sees every key, those ahead of it too"
        _agrees(output, expected, f"{what} output", list(zip((unscaled[0], unmasked[0]), words)))
        _agrees(lse, logarithm, f"{what} lse", list(zip((unscaled[1], unmasked[1]), words)))
    q, k, v = _vectors(33, 16)
    q, k = np.round(2 * q) / 2, np.round(2 * k) / 2  # so that float32 holds the scores exactly
    q[:, 0], k[:, 0] = 64, 50  # adds 64 * 50 / sqrt(16) = 800 to each score: beyond exp in float64
    output, lse = module.tiled_attention(q, k, v, 16, 8)
    expected, logarithm = _attention(q, k, v)
    for found, wanted, what in ((output, expected, "the output"), (lse, logarithm, "the lse")):
        _finite(found, what)
        _agrees(found, wanted, f"with scores of about 800, {what}")


def check_queries_are_the_last_positions(module):
    """Fewer queries than keys, as in a decode step or a chunk of a prompt, are at the last positions."""
    for queries, keys, block_q, block_k in ((1, 10, 16, 4), (3, 10, 16, 4), (20, 50, 8, 16), (5, 33, 2, 64)):
        q, k, v = _vectors(keys, 8, queries)
        output, lse = module.tiled_attention(q, k, v, block_q, block_k)
        expected, logarithm = _attention(q, k, v)
        words = (
            f"query 0 stands at position {keys - queries} and sees {keys - queries + 1} keys; yours sees 1. "
            "Did you forget the offset keys - queries?"
        )
        what = f"with {queries} queries over {keys} keys, the"
        _agrees(output, expected, f"{what} output", [(_attention(q, k, v, offset=0)[0], words)])
        _agrees(lse, logarithm, f"{what} lse")


def check_no_more_bytes_than_needed(module):
    """Stretch: it reads K and V once for every tile of queries that sees them, Q once, and writes the output once."""
    vectors, trips = in_slow_memory(*_vectors(100, 16))
    module.tiled_attention(*vectors, 32, 16)
    least = flash_traffic(100, 16, 32, 16, itemsize=4)
    whole = flash_traffic(100, 16, 32, 16, itemsize=4, causal=False)
    hint = ". Does a tile of queries read keys that none of its queries sees?" if trips.read == whole.read else ""
    assert trips.read <= least.read, f"it reads {trips.read:,} bytes, and {least.read:,} are enough{hint}"
    assert trips.read == least.read, (
        f"it slices {trips.read:,} bytes, and cannot do with less than {least.read:,}: an array that is used whole, "
        "or turned into a plain one, is not counted. Slice each tile out of q, k and v themselves"
    )
    assert trips.written <= least.written, f"it writes {trips.written:,} bytes, and {least.written:,} are enough"


class _Sliced(SlowArray):
    """Records the largest number of rows ever taken at once."""

    largest = 0

    def __getitem__(self, index):
        tile = super().__getitem__(index)
        self.largest = max(self.largest, len(tile) if tile.ndim == self.ndim else 1)
        return tile


def check_one_tile_of_keys_at_a_time(module):
    """Over 16,384 keys, it never takes more than a tile of keys, and never keeps a row of scores."""
    keys, block_k = 16384, 64
    q, k, v = _vectors(keys, 8, queries=16)
    k, v = k.view(_Sliced), v.view(_Sliced)
    tracemalloc.start()
    try:
        module.tiled_attention(q, k, v, 16, block_k)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    largest = max(k.largest, v.largest)
    assert largest <= block_k, (
        f"it takes {largest:,} keys at once, with tiles of {block_k}: that many do not fit on a chip. "
        "Is block_k used, and is there a softmax_step for each tile?"
    )
    assert peak < 2**18, (
        f"it keeps {peak:,} bytes, and a tile of 16 × {block_k} scores has 4,096: a row of {keys:,} scores must never "
        "exist as a whole. Take a softmax_step for each tile, and forget its scores"
    )


def check_no_matrix_of_all_scores(module):
    """1,024 tokens in tiles of 64 allocate less than a quarter of the T × T matrix."""
    vectors = _vectors(1024, 16)
    module.tiled_attention(*vectors, 64, 64)
    tracemalloc.start()
    try:
        module.tiled_attention(*vectors, 64, 64)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 1024 * 1024, f"it allocates {peak:,} bytes at its peak; the scores alone would be {4 * 1024 * 1024:,}"


# ---- the kernels -----------------------------------------------------------------------------------------------------


def _clean(trace, read, written, at_once):
    """Check for races, accesses outside the arrays, too many bytes, and loads of more than `at_once` elements."""
    assert not trace.out_of_bounds, trace.out_of_bounds[0]
    assert not trace.races, trace.races[0]
    largest = max(len(access.elements) for access in trace.accesses)
    assert largest <= at_once, f"it loads {largest:,} elements at once, and a tile has {at_once:,}: is BLOCK used?"
    assert trace.bytes_read <= read, f"it reads {trace.bytes_read:,} bytes, and {read:,} are enough"
    assert trace.bytes_written <= written, f"it writes {trace.bytes_written:,} bytes, and {written:,} are enough"


def _tensors(rows, keys, head_dim=16, large=False):
    """Make scores [rows, keys] whose maximum rises from tile to tile, values, and both as tensors.

    large: float32 holds the exp of no score, nor of what the last ones exceed the first tile's by.
    """
    scores, values = _rows(rows, keys, head_dim, spread=2.0)
    scores = (scores + (200 + 8 * np.arange(keys) if large else np.arange(keys) / 4)).astype(np.float32)
    values = values.astype(np.float32)
    return scores, values, torch.from_numpy(scores.copy()), torch.from_numpy(values.copy())


def check_kernel_1_sums_a_row(module):
    """Stretch: row_sums_kernel: m and l of each row over tiles, every score read once."""
    for rows, keys, block, large in ((3, 32, 8, False), (2, 16, 16, False), (1, 64, 4, False), (2, 32, 8, True)):
        scores, _, given, _ = _tensors(rows, keys, large=large)
        m, l = torch.full((2, rows), math.nan)
        trace = trace_kernel(module.row_sums_kernel, (rows,), m, l, given, KEYS=keys, BLOCK=block)
        tiles = scores.reshape(rows, -1, block)
        tops = np.maximum.accumulate(tiles.max(axis=2), axis=1)
        never = np.exp(tiles - tops[:, :, None]).sum(axis=(1, 2))
        what = f"with {keys} keys in tiles of {block},"
        if large:
            _finite(l, f"{what} l")
        _agrees(m, scores.max(axis=1), f"{what} m", [(tiles[:, -1].max(axis=1), "it is the last tile's only")])
        words = "the sum so far was not multiplied by exp(old m - new m)"
        _agrees(l, np.exp(scores - scores.max(axis=1, keepdims=True)).sum(axis=1), f"{what} l", [(never, words)])
        _clean(trace, 4 * rows * keys, 8 * rows, block)


def check_kernel_2_adds_the_values(module):
    """Stretch: row_output_kernel: the softmax times the values, every score and value read once by a row."""
    cases = (3, 32, 8, 16, False), (2, 16, 16, 32, False), (1, 64, 4, 8, False), (2, 32, 8, 16, True)
    for rows, keys, block, head_dim, large in cases:
        scores, values, *given = _tensors(rows, keys, head_dim, large)
        out = torch.full((rows, head_dim), math.nan)
        trace = trace_kernel(module.row_output_kernel, (rows,), out, *given, KEYS=keys, HEAD_DIM=head_dim, BLOCK=block)
        undivided = np.exp(scores - scores.max(axis=1, keepdims=True)) @ values
        words = "it is o; the output is o / l"
        what = f"with {keys} keys in tiles of {block}, the output"
        if large:
            _finite(out, what)
        _agrees(out, _softmax(scores) @ values, what, [(undivided, words)])
        _clean(trace, 4 * rows * keys * (1 + head_dim), 4 * rows * head_dim, block * head_dim)


def check_kernel_3_masks(module):
    """Stretch: causal_rows_kernel: rows at the last positions, a ragged last tile, and no unseen key is loaded."""
    small = [(*sizes, False) for sizes in ((10, 10, 4), (3, 10, 4), (1, 7, 8), (4, 33, 16), (2, 16, 8))]
    for rows, keys, block, large in (*small, (2, 33, 8, True)):
        scores, values, given, weights = _tensors(rows, keys, large=large)
        first = keys - rows
        seen = np.arange(keys) <= first + np.arange(rows)[:, None]
        given[torch.from_numpy(~seen)] = math.nan
        out = torch.full((rows, values.shape[1]), math.nan)
        constants = {"HEAD_DIM": values.shape[1], "BLOCK": block}
        trace = trace_kernel(module.causal_rows_kernel, (rows,), out, given, weights, rows, keys, **constants)
        without = _softmax(np.where(np.arange(keys) <= np.arange(rows)[:, None], scores, -np.inf)) @ values
        words = f"row 0 stands at position {first} and sees {first + 1} keys; yours sees 1. Where is keys - rows?"
        what = f"with {rows} rows over {keys} keys in tiles of {block}, the output"
        if large:
            _finite(out, what)
        assert not out.isnan().any(), f"{what} holds NaN: scores that a row may not see were used"
        _agrees(out, _softmax(np.where(seen, scores, -np.inf)) @ values, what, [(without, words)])
        _clean(trace, int(seen.sum()) * 4 * (1 + values.shape[1]), out.nbytes, block * values.shape[1])


# ---- in the engine ---------------------------------------------------------------------------------------------------

TILE = 16
"""Queries and keys a tile in the engine."""


def plug(module):
    """Serve with the learner's `tiled_attention`, for each request and head, over gathered blocks."""

    class TiledAttention:
        """Serves as the engine's attention: it is called with the caches, and bound to each step's tables."""

        def __init__(self, kv_caches, scale, sliding_window):
            self.kv_caches = kv_caches

        def of_step(self, metadata):
            def attend(layer_index, q, k, v):
                keys, values, *_ = self.kv_caches[layer_index]
                reshape_and_cache(k, v, keys, values, metadata.slot_mapping)
                return _attend(module, q, keys, values, metadata)

            return attend

    return Plugged(parts=Parts(attention=TiledAttention), max_tokens=8)


def _attend(module, q, keys, values, metadata):
    """Attend each request's rows of q [tokens, heads, head_dim] to its keys and values, gathered by block table."""
    starts, group = metadata.query_start_loc.tolist(), q.shape[1] // keys.shape[2]
    out = torch.zeros_like(q)
    for request, length in enumerate(metadata.seq_lens.tolist()):
        blocks = metadata.block_table[request, : -(-length // keys.shape[1])].long()
        rows = slice(starts[request], starts[request + 1])
        its_keys, its_values = (cache[blocks].flatten(0, 1)[:length].numpy() for cache in (keys, values))
        for head in range(q.shape[1]):
            at = head // group
            output, _ = module.tiled_attention(q[rows, head].numpy(), its_keys[:, at], its_values[:, at], TILE, TILE)
            out[rows, head] = torch.from_numpy(np.asarray(output, dtype=np.float32))
    return out
