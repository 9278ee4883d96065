"""Check the part of exercise 09 that needs NumPy, torch or Triton, and run the engine with the learner's part."""

import math
from collections.abc import Callable, Sequence

import torch

from minivllm.config import Parts
from minivllm.kernels.reshape_and_cache import reshape_and_cache
from minivllm.platforms.triton_utils import triton
from minivllm_lab.checks.kernel_trace import trace_kernel
from minivllm_lab.checks.numbers_made import numbers_made
from minivllm_lab.checks.plugged import Plugged

TOLERANCE = 1e-4

# ---- what is right, and what the usual mistakes give -----------------------------------------------------------------


def attention(q, keys, values, *, head=None, offset=None, scale=None):
    """Compute grouped attention in float64; `head`, `offset` and `scale` make the usual mistakes."""
    (queries, heads, head_dim), (positions, kv_heads, _) = q.shape, keys.shape
    head = head or (lambda h: h // (heads // kv_heads))
    offset = positions - queries if offset is None else offset
    q, keys, values, out = q.double(), keys.double(), values.double(), torch.empty_like(q, dtype=torch.float64)
    ahead = torch.arange(positions) > torch.arange(queries)[:, None] + offset
    for h in range(heads):
        scores = q[:, h] @ keys[:, head(h)].T * (head_dim**-0.5 if scale is None else scale)
        out[:, h] = scores.masked_fill(ahead, -math.inf).softmax(-1) @ values[:, head(h)]
    return out


def latent(q_nope, q_rope, latents, k_rope, w_uk, w_uv, *, width=None, rotary=True, into_values=True):
    """Compute latent attention in float64 with keys and values made; `width` and the rest make the usual mistakes."""
    q_nope, q_rope, latents, k_rope, w_uk, w_uv = (x.double() for x in (q_nope, q_rope, latents, k_rope, w_uk, w_uv))
    scores = torch.einsum("hn,phn->hp", q_nope, torch.einsum("pr,hnr->phn", latents, w_uk))
    scores = scores + q_rope @ k_rope.T if rotary else scores
    weights = (scores / math.sqrt(width or q_nope.shape[1] + q_rope.shape[1])).softmax(-1)
    return torch.einsum("hp,phv->hv", weights, torch.einsum("pr,hvr->phv", latents, w_uv))


def agrees(found, expected, what, mistakes=()):
    """Compare `found` with `expected`; say by how much it is off, and which usual mistake gives exactly that.

    mistakes: (what comes of it, what to say).
    """
    assert isinstance(found, torch.Tensor), f"{what} is {type(found).__name__}, not a tensor"
    assert found.shape == expected.shape, f"{what} has shape {list(found.shape)}, not {list(expected.shape)}"
    found = found.double()
    assert not found.isnan().any(), f"{what} holds NaN"
    error = (found - expected).abs().max().item()
    if error >= TOLERANCE:
        known = [words for wrong, words in mistakes if (found - wrong).abs().max() < TOLERANCE]
        raise AssertionError(f"{what} is off by {error:.2g}{': ' if known else ''}{known[0] if known else ''}")


def leaves(act: Callable[..., torch.Tensor], given: Sequence[torch.Tensor], names: str) -> torch.Tensor:
    """Return what `act(*given)` returns, and check that `given` is unchanged; `names` are its names, in order."""
    before = [x.clone() for x in given]
    found = act(*given)
    changed = [name for name, x, old in zip(names.split(), given, before) if not torch.equal(x, old)]
    assert not changed, f"{changed[0]} is not what it was before the call: it must not be changed in place"
    return found


def vectors(queries, positions, heads, kv_heads, head_dim, seed=0):
    """Make random q, keys and values in float32."""
    draw = torch.Generator().manual_seed(seed)
    shapes = (queries, heads, head_dim), (positions, kv_heads, head_dim), (positions, kv_heads, head_dim)
    return [torch.randn(shape, generator=draw) for shape in shapes]


# ---- groups ----------------------------------------------------------------------------------------------------------


def check_heads_of_a_group_ask_the_same_keys(module):
    """One query over many positions works with a KV head for each query head, for several, or for all of them."""
    for heads, kv_heads, head_dim in ((4, 4, 8), (6, 2, 5), (6, 3, 16), (8, 1, 4), (1, 1, 8)):
        q, keys, values = vectors(1, 9, heads, kv_heads, head_dim, seed=heads + kv_heads)
        expected = attention(q, keys, values)
        mistakes = [(attention(q, keys, values, scale=1.0), "the scores are not divided by sqrt(head_dim)")]
        if 1 < kv_heads < heads:
            words = f"head 1 asks KV head 1; neighbours share: it is h // {heads // kv_heads}, not h % {kv_heads}"
            mistakes.append((attention(q, keys, values, head=lambda h, n=kv_heads: h % n), words))
        found = leaves(module.grouped_attention, (q, keys, values), "q keys values")
        agrees(found, expected, f"with {heads} heads on {kv_heads} KV heads, the output", mistakes)


def check_queries_stand_at_the_last_positions(module):
    """No query of a prompt, a chunk or drafts sees a later position."""
    for queries, positions in ((7, 7), (3, 10), (2, 300), (1, 1100)):
        q, keys, values = vectors(queries, positions, 6, 2, 8, seed=queries)
        all_seen, first = (attention(q, keys, values, offset=offset) for offset in (positions, 0))
        mistakes = [(all_seen, "every query sees every key, those ahead of it too")]
        if queries < positions:
            words = f"query 0 stands at position {positions - queries}, not at 0. Where is positions - queries?"
            mistakes.append((first, words))
        what = f"with {queries} queries over {positions} positions, the output"
        found = leaves(module.grouped_attention, (q, keys, values), "q keys values")
        agrees(found, attention(q, keys, values), what, mistakes)


def check_large_scores_do_not_overflow(module):
    """Scores of some thousands give finite weights, and the output has q's dtype, bfloat16 too."""
    q, keys, values = vectors(2, 9, 4, 2, 8)
    q *= 1000
    found = module.grouped_attention(q, keys, values)
    agrees(found, attention(q, keys, values), "with scores of some thousands, the output")
    low, falling = torch.full_like(q, 4096.0), torch.zeros_like(keys)
    falling[..., 0] = -8.0 - torch.arange(9.0)[:, None]
    found, expected = (act(low, falling, values) for act in (module.grouped_attention, attention))
    agrees(found, expected, "with scores from -11,000 down, the output")
    doubled = module.grouped_attention(q.double(), keys.double(), values.double())
    assert doubled.dtype == torch.float64, f"float64 goes in, and {doubled.dtype} comes out"
    low = [x.bfloat16() for x in vectors(2, 9, 4, 2, 8)]
    found = module.grouped_attention(*low)
    assert found.dtype == torch.bfloat16, f"bfloat16 goes in, and {found.dtype} comes out"
    off = float((found.double() - attention(*low)).abs().max())
    assert off < 0.05, f"in bfloat16 the output is off by {off:.2g}"


def check_keys_are_not_copied_for_each_head(module):
    """With eight heads on one KV head, far less is allocated than keys and values for each head."""
    q, keys, values = vectors(1, 512, 16, 1, 64)
    made = numbers_made(lambda: module.grouped_attention(q, keys, values))
    each = keys.numel() * 16
    assert made < each, (
        f"it makes {made:,} numbers on the way; the keys are {keys.numel():,}, and {each:,} if each head gets its own. "
        "Give the queries a dimension for the group, and leave the keys as they are"
    )


# ---- latents ---------------------------------------------------------------------------------------------------------


def latents(heads, nope, rope, rank, v, positions, seed=0):
    """Make random arguments of `absorbed_attention`."""
    draw = torch.Generator().manual_seed(seed)
    shapes = (heads, nope), (heads, rope), (positions, rank), (positions, rope), (heads, nope, rank), (heads, v, rank)
    return [torch.randn(shape, generator=draw) / (rank**0.5 if len(shape) == 3 else 1) for shape in shapes]


def check_absorbed_is_latent_attention(module):
    """Scores and sums over latents give what keys and values made from them give."""
    for heads, nope, rope, rank, v, positions in ((1, 2, 4, 3, 2, 1), (3, 8, 4, 16, 6, 9), (4, 16, 8, 12, 20, 300)):
        given = latents(heads, nope, rope, rank, v, positions, seed=heads)
        by_rank, by_nope, unscaled = (latent(*given, width=width) for width in (rank + rope, nope, 1))
        mistakes = [
            (
                by_rank,
                f"the key that is never made has {nope} + {rope} numbers: divide by their root, not by the rank's",
            ),
            (by_nope, f"the rotary part counts, too: divide by sqrt({nope} + {rope})"),
            (unscaled, f"the scores are not divided by sqrt({nope} + {rope})"),
            (latent(*given, rotary=False), "q_rope · k_rope is missing in the scores"),
        ]
        what = f"with {heads} heads and latents of {rank} + {rope}, the output"
        found = leaves(module.absorbed_attention, given, "q_nope q_rope latents k_rope w_uk w_uv")
        agrees(found, latent(*given), what, mistakes)
    given = latents(3, 8, 4, 16, 6, 9)
    given[0] = given[0] * 3000
    agrees(module.absorbed_attention(*given), latent(*given), "with large scores, the output")


def check_no_key_is_made(module):
    """Over 24 latents or 400, no key or value of a head is made."""
    for positions, share in ((24, 2), (400, 4)):
        heads, nope = 8, 48
        given = latents(heads, nope, 8, 32, 48, positions)
        made, keys = numbers_made(lambda given=given: module.absorbed_attention(*given)), heads * nope * positions
        assert made < keys / share, (
            f"over {positions} latents it makes {made:,} numbers on the way, and all heads' keys are {keys:,}: w_uk "
            "must go to the query, and w_uv to the sum of latents"
        )


def check_ranks_together_are_the_whole(module):
    """Each rank's query heads over the KV heads that it keeps give, side by side, the attention of one rank."""
    for tp, heads, kv_heads in ((2, 8, 2), (4, 8, 2), (4, 8, 8), (8, 8, 1)):
        q, keys, values = vectors(3, 9, heads, kv_heads, 8, seed=tp)
        share, parts = heads // tp, []
        for rank in range(tp):
            kept = module.kv_heads_of_rank(rank, tp, kv_heads)
            mine = q[:, rank * share : (rank + 1) * share]
            parts.append(module.grouped_attention(mine, keys[:, kept], values[:, kept]))
        what = f"{heads} heads on {kv_heads} KV heads, over {tp} ranks: what they compute together"
        agrees(torch.cat(parts, dim=1), attention(q, keys, values), what)


# ---- the kernel, in steps --------------------------------------------------------------------------------------------


def rows_of(heads):
    """Return the power of two, 16 or more, that holds this many rows."""
    return max(16, triton.next_power_of_2(heads))


def clean(trace, **most):
    """Check for races, accesses outside the arguments, and arguments read or written more often than needed."""
    hint = "Have rows beyond the group, or tokens beyond the last one, no mask?"
    assert not trace.out_of_bounds, f"{trace.out_of_bounds[0]}. {hint}"
    assert not trace.races, f"{trace.races[0]}. {hint}"
    for name, numbers in most.items():
        traffic = trace.arguments[name]
        moved, size = max(traffic.bytes_read, traffic.bytes_written), 4 * numbers
        words = "Does each head load its own copy?" if name in ("keys", "values") else ""
        assert moved <= size, f"{moved:,} bytes of {name} moved, and {size:,} are enough. {words}".strip()


def stretched(q, keys, large):
    """Make queries and keys [..., tokens, kv_heads, head_dim] whose scores are `large` times as far apart.

    The largest score rises from tile to tile. With a `large` below 0 it falls, and all scores are far below 0.
    """
    tokens = keys.shape[-3]
    later = torch.arange(tokens)[:, None, None] / tokens
    return (q * large, keys + later) if large > 0 else (q.abs() * -large, -6 - keys.abs() - later)


def check_kernel_1_scores(module):
    """Stretch: scores_kernel: a group's rows in one matmul, every key read once."""
    for heads, kv_heads, head_dim, tokens, tile in ((4, 2, 16, 7, 16), (6, 1, 32, 33, 32), (3, 3, 16, 16, 16)):
        q, keys, _ = vectors(1, tokens, heads, kv_heads, head_dim, seed=heads)
        scores, group = torch.full((heads, tokens), math.nan), heads // kv_heads
        grid, sizes = (kv_heads, -(-tokens // tile)), {"GROUP": group, "HEAD_DIM": head_dim, "ROWS": rows_of(group)}
        trace = trace_kernel(module.scores_kernel, grid, scores, q[0], keys, tokens, **sizes, TILE=tile)
        expected = torch.stack([q[0, h].double() @ keys[:, h // group].double().T for h in range(heads)])
        clean(trace)
        what = f"with {heads} heads on {kv_heads} KV heads and {tokens} tokens in tiles of {tile}, scores"
        agrees(scores, expected, what, [(expected * head_dim**-0.5, "nothing is divided in this step")])
        clean(trace, keys=keys.numel(), scores=scores.numel(), q=q.numel() * grid[1])


def check_kernel_2_attends(module):
    """Stretch: group_kernel: the running softmax for all rows of a group, each key and value read once."""
    for heads, kv_heads, head_dim, tokens, large, tile in (
        (4, 2, 16, 7, 1, 16), (6, 1, 32, 33, 1, 32), (3, 3, 16, 16, 1, 16), (20, 1, 16, 40, 1, 16),
        (4, 2, 16, 40, 600, 16), (4, 2, 16, 20, -600, 16),
    ):  # fmt: skip
        q, keys, values = vectors(1, tokens, heads, kv_heads, head_dim, seed=heads)
        q, keys = stretched(q, keys, large)
        out, group = torch.full((heads, head_dim), math.nan), heads // kv_heads
        sizes = {"GROUP": group, "HEAD_DIM": head_dim, "ROWS": rows_of(group), "TILE": tile}
        given = q[0].contiguous(), keys, values, tokens, head_dim**-0.5
        trace = trace_kernel(module.group_kernel, (kv_heads,), out, *given, **sizes)
        clean(trace)
        what = f"with {heads} heads on {kv_heads} KV heads and {tokens} tokens in tiles of {tile}, the output"
        unscaled = attention(q, keys, values, scale=1.0)[0]
        agrees(out, attention(q, keys, values)[0], what, [(unscaled, "the scores are not multiplied by scale")])
        clean(trace, keys=keys.numel(), values=values.numel(), q=q.numel(), out=out.numel())


def check_kernel_3_many_requests(module):
    """Stretch: decode_kernel: requests of any length, any head dim, and any part of a group in a program."""
    for heads, kv_heads, head_dim, mine, large, tile in (
        (6, 2, 24, 3, 1, 16), (4, 2, 24, 1, -600, 16), (8, 1, 16, 4, 600, 16), (20, 1, 16, 20, 1, 32),
    ):  # fmt: skip
        lengths, slots, scale = (0, 1, 16, 21), 23, head_dim**-0.5
        draw = torch.Generator().manual_seed(heads * mine)
        q = torch.randn(len(lengths), heads, head_dim, generator=draw)
        keys, values = torch.randn(2, len(lengths), slots, kv_heads, head_dim, generator=draw)
        q, keys = stretched(q, keys, large)
        for request, length in enumerate(lengths):
            keys[request, length:], values[request, length:] = math.nan, math.nan
        out, group = torch.full_like(q, math.nan), heads // kv_heads
        sizes = {"HEADS": mine, "GROUP": group, "KV_HEADS": kv_heads, "HEAD_DIM": head_dim, "ROWS": rows_of(mine)}
        given = out, q, keys, values, torch.tensor(lengths, dtype=torch.int32), slots, scale
        padded = {"BLOCK_D": rows_of(head_dim), "TILE": tile}
        trace = trace_kernel(module.decode_kernel, (len(lengths), heads // mine), *given, **sizes, **padded)
        clean(trace)
        for request, length in enumerate(lengths):
            its = keys[request, :length], values[request, :length]
            expected = attention(q[request][None], *its)[0] if length else torch.zeros(heads, head_dim).double()
            agrees(
                out[request], expected, f"{heads} heads on {kv_heads}, {mine} a program: a request of {length} tokens"
            )
        seen = sum(lengths) * kv_heads * head_dim * group // mine
        clean(trace, keys=seen, values=seen, out=out.numel(), q=q.numel())


# ---- in the engine ---------------------------------------------------------------------------------------------------


def plug(module) -> Plugged:
    """Serve with the learner's `grouped_attention`, for each request, over its gathered blocks."""

    class GroupedAttention:
        """Serves as the engine's attention: it is called with the caches, and bound to each step's tables."""

        def __init__(self, kv_caches, scale, sliding_window):
            self.kv_caches = kv_caches

        def of_step(self, metadata):
            def attend(layer_index, q, k, v):
                keys, values, *_ = self.kv_caches[layer_index]
                reshape_and_cache(k, v, keys, values, metadata.slot_mapping)
                starts, out = metadata.query_start_loc.tolist(), torch.zeros_like(q)
                for request, length in enumerate(metadata.seq_lens.tolist()):
                    blocks = metadata.block_table[request, : -(-length // keys.shape[1])].long()
                    its = (cache[blocks].flatten(0, 1)[:length] for cache in (keys, values))
                    rows = slice(starts[request], starts[request + 1])
                    out[rows] = module.grouped_attention(q[rows], *its)
                return out

            return attend

    return Plugged(parts=Parts(attention=GroupedAttention), max_tokens=12)
