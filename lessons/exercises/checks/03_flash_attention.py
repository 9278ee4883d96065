"""What must be true of exercise 03, and of the script that solves it."""

import tracemalloc

import numpy as np

from minivllm.lab.slow_memory import in_slow_memory
from minivllm.simulate.attention_traffic import flash_traffic


def _rows(rows, keys, head_dim=8, seed=0, spread=1.0):
    draw = np.random.default_rng(seed)
    return draw.standard_normal((rows, keys)) * spread, draw.standard_normal((keys, head_dim))


def _softmax(scores):
    weights = np.exp(scores - scores.max(axis=1, keepdims=True))
    return weights / weights.sum(axis=1, keepdims=True)


def _steps(module, scores, values, cuts):
    """The state after tiles that end at each of `cuts`."""
    state = module.nothing_seen(len(scores), values.shape[1])
    for first, end in zip((0, *cuts), cuts):
        state = module.softmax_step(state, scores[:, first:end], values[first:end])
    return state


def _agrees(found, expected, what):
    found = np.asarray(found, dtype=np.float64)
    assert found.shape == expected.shape, f"{what} has shape {found.shape}, not {expected.shape}"
    assert not np.isnan(found).any(), f"{what} holds NaN"
    error = np.abs(found - expected).max()
    assert error < 1e-4, f"{what} is off by {error:.2g}"


def _attention(q, k, v):
    scores = q.astype(np.float64) @ k.T.astype(np.float64) / np.sqrt(q.shape[1])
    scores[np.triu_indices(len(q), 1)] = -np.inf
    top = scores.max(axis=1)
    return _softmax(scores) @ v, top + np.log(np.exp(scores - top[:, None]).sum(axis=1))


def _vectors(length, head_dim, seed=0):
    return np.random.default_rng(seed).standard_normal((3, length, head_dim)).astype(np.float32)


def check_one_tile_is_the_softmax(module):
    """One tile that holds all the keys gives the softmax of the row, times the values."""
    scores, values = _rows(3, 5)
    output, lse = module.finish(_steps(module, scores, values, (5,)))
    _agrees(output, _softmax(scores) @ values, "the output")
    _agrees(lse, np.log(np.exp(scores).sum(axis=1)), "the logarithm of the sum")


def check_later_tiles_rescale_what_came_before(module):
    """Tiles of 3, 1 and 4 keys whose maximum rises give the softmax of the whole row."""
    scores, values = _rows(4, 8)
    scores += np.arange(8)
    state = _steps(module, scores, values, (3, 4, 8))
    _agrees(state.m, scores.max(axis=1), "m")
    _agrees(state.l, np.exp(scores - scores.max(axis=1, keepdims=True)).sum(axis=1), "l")
    _agrees(module.finish(state)[0], _softmax(scores) @ values, "the output")


def check_maximum_that_came_early_stays(module):
    """Where the first tile holds the largest score, later tiles are measured against it."""
    scores, values = _rows(4, 9)
    scores -= 2.0 * np.arange(9)
    state = _steps(module, scores, values, (2, 5, 9))
    _agrees(state.m, scores.max(axis=1), "m")
    _agrees(module.finish(state)[0], _softmax(scores) @ values, "the output")


def check_large_scores_do_not_overflow(module):
    """Scores of some thousands, of either sign, give finite weights: the maximum is taken off before exp."""
    scores, values = _rows(4, 12, spread=3000.0)
    with np.errstate(over="raise"):
        output, _ = module.finish(_steps(module, scores, values, (4, 8, 12)))
    _agrees(output, _softmax(scores) @ values, "the output")


def check_tile_that_a_row_may_not_see(module):
    """A tile masked as a whole changes nothing, be it the first that a row meets or a later one."""
    scores, values = _rows(2, 12)
    scores[0, :4] = -np.inf  # the first tile of row 0
    scores[1, 4:8] = -np.inf  # the second of row 1
    state = _steps(module, scores, values, (4, 8, 12))
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
    """Results over 6 keys and over 2, made apart and merged in either order, are the result over all 8."""
    scores, values = _rows(5, 8, spread=4.0)
    left = _steps(module, scores[:, :6], values[:6], (3, 6))
    right = _steps(module, scores[:, 6:], values[6:], (2,))
    for merged in (module.merge(left, right), module.merge(right, left)):
        _agrees(merged.m, scores.max(axis=1), "m")
        _agrees(module.finish(merged)[0], _softmax(scores) @ values, "the output")


def check_merge_with_nothing(module):
    """A side that saw no key adds nothing, and two such sides give none: split-KV has empty splits."""
    scores, values = _rows(3, 4)
    state, nothing = _steps(module, scores, values, (4,)), module.nothing_seen(3, 8)
    for merged in (module.merge(state, nothing), module.merge(nothing, state)):
        _agrees(module.finish(merged)[0], _softmax(scores) @ values, "the output")
    _agrees(module.finish(module.merge(nothing, nothing))[0], np.zeros((3, 8)), "the output over no key")


def check_finished_results_merge_too(module):
    """An output and its logarithm are a Partial (m = the logarithm, l = 1): kernels of many heads hand over just that."""
    heads, parts = 2, []
    scores, values = np.random.default_rng(1).standard_normal((heads, 3, 8)) * 3, _rows(1, 8)[1]
    for cut in (slice(0, 5), slice(5, 8)):
        done = [module.finish(_steps(module, one[:, cut], values[cut], (cut.stop - cut.start,))) for one in scores]
        output, lse = (np.stack(part, axis=1) for part in zip(*done))
        parts.append(module.nothing_seen(3, 8)._replace(m=lse, l=np.ones_like(lse), o=output))
    expected = np.stack([_softmax(one) @ values for one in scores], axis=1)
    _agrees(module.finish(module.merge(*parts))[0], expected, "the output")


def check_tiles_give_attention(module):
    """Lengths around a tile, head dims that are no power of two, tiles of unequal size: always causal attention."""
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
        _agrees(output, expected, f"{what} output")
        _agrees(lse, logarithm, f"{what} logarithm of the sums")


def check_no_more_bytes_than_needed(module):
    """It reads K and V once for every tile of queries that sees them, Q once, and writes the output once."""
    vectors, trips = in_slow_memory(*_vectors(100, 16))
    module.tiled_attention(*vectors, 32, 16)
    least = flash_traffic(100, 16, 32, 16, itemsize=4)
    assert trips.read <= least.read, f"it reads {trips.read:,} bytes, and {least.read:,} are enough"
    assert trips.written <= least.written, f"it writes {trips.written:,} bytes, and {least.written:,} are enough"


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
