"""Check exercise 05 and the script that solves it, and run the engine with the learner's parts."""

import random
import warnings

import torch

from minivllm.config import Parts
from minivllm.core.block_hash import hash_new_full_blocks
from minivllm.core.policy import SchedulingPolicy
from minivllm.kernels.unified_attention import unified_attention
from minivllm_lab.kernel_trace import trace_kernel
from minivllm_lab.plugged import Plugged
from minivllm.worker.paged_attention import PagedAttention

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


def check_scales_and_types(module):
    """Integers are int8 in the rows' shape; each row has one float32 scale, its largest magnitude / 127."""
    rows = torch.tensor([[0.5, -2.54, 1.0], [127.0, 3.0, 0.0]])
    integers, scales = module.quantize(rows)
    assert integers.dtype == torch.int8, f"the integers are {integers.dtype}"
    assert scales.dtype == torch.float32, f"the scales are {scales.dtype}"
    assert integers.shape == (2, 3) and scales.shape == (2,), f"shapes {tuple(integers.shape)}, {tuple(scales.shape)}"
    assert torch.allclose(scales, torch.tensor([0.02, 1.0])), f"scales {scales.tolist()}, not 0.02 and 1"
    integers, scales = module.quantize(torch.randn(2, 3, 4, 8).half())
    assert integers.shape == (2, 3, 4, 8) and scales.shape == (2, 3, 4), "rows may have any dimensions before the last"


def check_scales_keep_their_digits(module):
    """Rows in 16 bits have scales in 32: exact to a millionth."""
    for dtype in (torch.float16, torch.bfloat16):
        rows = torch.randn(100, 32, generator=torch.Generator().manual_seed(1)).to(dtype)
        scales = module.quantize(rows)[1]
        off = (scales.double() / (rows.double().abs().amax(-1) / 127) - 1).abs().max().item()
        assert off < 1e-6, f"scales of {dtype} rows are off by {off:.0e}: were they divided in 16 bits? .float() first"
    tiny = module.quantize(torch.full((1, 4), 2e-6))[1].item()
    assert abs(tiny / (2e-6 / 127) - 1) < 1e-5, f"the scale of a row of 2e-6 is {tiny}: 16 bits cannot hold it"


def check_integers_are_the_nearest(module):
    """A number read back is off by half a scale at most, and −128 is never used."""
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        rows = torch.randn(200, 64, generator=torch.Generator().manual_seed(0)).to(dtype)
        integers, scales = module.quantize(rows)
        off = ((integers.float() * scales[:, None] - rows.float()).abs() / scales[:, None]).max()
        hint = "Does .to(torch.int8) cut off?" if 0.9 < off <= 1.0001 else ""
        hint = "Were rows divided in 16 bits? .float() first" if dtype != torch.float32 else hint
        assert off < 0.5001, f"{dtype} rows are off by {off:.2f} scales: round to the nearest integer. {hint}"
        assert integers.min() > -128, "the largest magnitude is 127"


def check_zeros_and_outliers(module):
    """A row of zeros gives zeros, and a huge number in one row changes nothing in another."""
    rows = torch.tensor([[0.0, 0.0], [1.0, -0.5], [1e6, 1.0]])
    integers, scales = module.quantize(rows)
    assert torch.isfinite(scales).all(), f"scales {scales.tolist()}"
    assert scales[0] == 0, f"the scale of a row of zeros is {scales[0].item()}, not 0"
    assert integers[0].tolist() == [0, 0], f"zeros became {integers[0].tolist()}"
    back = integers[1].float() * scales[1]
    assert torch.allclose(back, rows[1], atol=0.01), f"1.0, -0.5 beside a row with 1e6 became {back.tolist()}"


# ---- the kernel, in steps --------------------------------------------------------------------------------------------


def rows_of(count, head_dim, seed=0):
    """Make rows in 16 bits: one of zeros, one whose largest is negative, one with a huge neighbour."""
    rows = torch.randn(count, head_dim, generator=torch.Generator().manual_seed(seed)).half()
    rows[1], rows[2, 3], rows[3, 0] = 0, -9, 500
    return rows


def traced(kernel, grid, *arguments, head_dim):
    """Trace the kernel; it must stay inside its arguments and have no races."""
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        trace = trace_kernel(kernel, grid, *arguments, HEAD_DIM=head_dim, BLOCK_D=1 << (head_dim - 1).bit_length())
    nan = any("cast" in str(warning.message) for warning in warned)
    assert not nan, "a NaN becomes an integer. Is a row of zeros divided by its scale?"
    assert not trace.out_of_bounds, f"{trace.out_of_bounds[0]}. Is something not masked, or not skipped?"
    assert not trace.races, trace.races[0]
    return trace


def assert_bytes(label, moved, expected):
    """Compare the bytes moved with those expected; recognise the usual mistake by the ratio."""
    ratio = moved / expected if expected else 0.0
    hint = " Is the row loaded twice?" if ratio == 2 else ""
    assert moved == expected, f"{label}: {moved:,} bytes, {expected:,} are enough.{hint}"


def check_kernel_step_1_largest(module):
    """Stretch: step 1: each row's largest magnitude is stored; each element is read once."""
    rows, largest = rows_of(5, 20), torch.full((5,), torch.nan)
    trace = traced(module.largest_kernel, (5,), rows, largest, head_dim=20)
    expected = rows.float().abs().amax(-1)
    assert torch.equal(largest, expected), f"row by row {largest.tolist()}, not {expected.tolist()}"
    assert_bytes("rows read", trace.arguments["rows"].bytes_read, 5 * 20 * 2)
    assert_bytes("results written", trace.bytes_written, 5 * 4)


def check_kernel_step_2_quantize(module):
    """Stretch: step 2: each row's integers and scale are stored; a row of zeros gives zeros; a row is read once."""
    rows, integers, scales = rows_of(5, 20), torch.full((5, 20), 111, dtype=torch.int8), torch.full((5,), torch.nan)
    trace = traced(module.quantize_kernel, (5,), rows, integers, scales, head_dim=20)
    assert_quantized(rows, integers, scales)
    assert_bytes("rows read", trace.arguments["rows"].bytes_read, 5 * 20 * 2)
    assert_bytes("integers and scales written", trace.bytes_written, 5 * (20 + 4))


def assert_quantized(rows, integers, scales):
    """Check that the scales are right and the integers the nearest."""
    expected = rows.float().abs().amax(-1) / 127
    assert torch.isfinite(scales).all(), f"scales {scales.tolist()}: was every row's written?"
    assert torch.allclose(scales, expected, rtol=1e-5, atol=0), f"scales {scales.tolist()}, not {expected.tolist()}"
    zeros = integers[expected == 0]
    assert not zeros.any(), f"a row of zeros became {zeros[0].tolist()}: nothing may be divided by its scale"
    nearest = rows.float() / expected.clamp(min=1e-30)[..., None]
    off = (integers.float() - nearest).abs().max()
    hint = "Does .to(tl.int8) cut off? tl.floor(x + 0.5)" if 0.9 < off < 1.01 else ""
    assert off < 0.501, f"an integer is off by {off:.2f}. {hint}"


def check_kernel_step_3_cache(module):
    """Stretch: step 3: each token's heads go to its slot as integers; padding is not written, nor are other slots."""
    tokens, heads, head_dim, slots = 6, 2, 20, 10
    rows = rows_of(tokens * heads, head_dim).view(tokens, heads, head_dim)
    where = torch.tensor([7, -1, 3, 9, -1, 0])
    cache, scales = torch.full((slots, heads, head_dim), 111, dtype=torch.int8), torch.full((slots, heads), -1.0)
    trace = traced(module.quantize_and_cache_kernel, (tokens, heads), rows, where, cache, scales, head_dim=head_dim)
    used = where[where >= 0]
    others = torch.ones(slots, dtype=torch.bool).index_fill(0, used, False)
    written = others.nonzero().flatten()[(cache[others] != 111).flatten(1).any(1) | (scales[others] != -1).any(1)]
    assert not len(written), f"slot {written[0]} was written, and no token has it. Skip slot −1"
    assert_quantized(rows[where >= 0], cache[used], scales[used])
    assert_bytes("rows read", trace.arguments["rows"].bytes_read, len(used) * heads * head_dim * 2)
    assert_bytes("integers and scales written", trace.bytes_written, len(used) * heads * (head_dim + 4))


# ---- the engine with the learner's parts -----------------------------------------------------------------------------

INSTRUCTION = "def add(a, b):\n    return a + b\n\n\ndef sub(a, b):\n    return a - b\n\n\n"


def plug(module) -> Plugged:
    """Find prefixes by the learner's hashes, and let attention read the learner's integers."""
    prompts = [f"{INSTRUCTION}def {name}(a, b):\n    return" for name in ("mul", "div", "mod", "power")]
    return Plugged(
        parts=Parts(
            policy=SchedulingPolicy(hash_block_tokens=module.hash_block_tokens),
            attention=attention_over(module.quantize),
        ),
        engine_args={"kv_cache_dtype": "int8", "block_size": 4, "num_gpu_blocks_override": 200},
        prompts=[*prompts, prompts[0]],
        says=prefill_saved,
    )


def attention_over(quantize):
    """Return the engine's attention with caches that the learner's `quantize` writes."""

    class Attention(PagedAttention):
        """Quantize keys and values into their slots, then reads them with the engine's kernel."""

        def attend(self, metadata, layer_index, q, k, v):
            keys, values, key_scales, value_scales = self.kv_caches[layer_index]
            slots = metadata.slot_mapping[metadata.slot_mapping >= 0]
            block, offset = slots // keys.shape[1], slots % keys.shape[1]
            for rows, cache, scales in ((k, keys, key_scales), (v, values, value_scales)):
                cache[block, offset], scales[block, :, offset] = quantize(rows[: len(slots)])
            return unified_attention(
                q, keys, values, metadata.query_start_loc, metadata.seq_lens, metadata.block_table, self.scale,
                k_scales=key_scales, v_scales=value_scales, sliding_window=self.sliding_window,
                max_seq_len=metadata.max_seq_len, backend=self.backend,
            )  # fmt: skip

    return Attention


def prefill_saved(llm):
    """Return the prompt tokens that were found in the prefix cache."""
    return {"prompt tokens not computed": llm.llm_engine.stats.prefix_cache_stats.hits}
