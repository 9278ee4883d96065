"""Check the part of exercise 05 that needs NumPy, torch or Triton, and run the engine with the learner's part."""

import warnings

import torch

from minivllm.config import Parts
from minivllm.core.policy import SchedulingPolicy
from minivllm.kernels.unified_attention import unified_attention
from minivllm.worker.paged_attention import PagedAttention
from minivllm_lab.checks.kernel_trace import trace_kernel
from minivllm_lab.checks.plugged import Plugged


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
