"""Lesson 05: each lever is what it says, its kernels are right and the engine's, its exercise catches mistakes."""

import pytest
import torch
from kernels.harness import assert_close, assert_compiles, random_block_table, reference_attention
from lessons.harness import assert_refuses, checks_that_catch, figures_of_quick_run, script_path

from minivllm.config import EMBEDDED_MODEL
from minivllm.kernels import packed_weights
from minivllm.kernels import reshape_and_cache as engine_cache
from minivllm.kernels.cpu import cache_calls
from minivllm.kernels.quantized_linear import quantized_linear
from minivllm.kernels.unified_attention import unified_attention
from minivllm.lab.exercise import load
from minivllm.lab.reports import optimization_catalog as report
from minivllm.models.loader import load_model, random_model
from minivllm.simulate.known_models import known_model

lesson = load(script_path("05"))
EXACT, TILE = torch.float32, 64
pytestmark = pytest.mark.filterwarnings("ignore:divide by zero")


# ---- the KV cache in int8 --------------------------------------------------------------------------------------------


def written(lengths, kv_heads, head_dim, block_size, dtype, device):
    """Random keys and values in scattered blocks, by the lesson's kernel; what they were, by sequence."""
    tables, blocks = random_block_table(lengths, block_size)
    caches = torch.full((2, blocks * block_size, kv_heads, head_dim), 111, dtype=torch.int8, device=device)
    scales = torch.full((2, blocks * block_size, kv_heads), torch.nan, device=device)
    slots = torch.cat([
        tables[row].long()[torch.arange(n) // block_size] * block_size + torch.arange(n) % block_size
        for row, n in enumerate(lengths)
    ])  # fmt: skip
    new = torch.randn(2, len(slots), kv_heads, head_dim).to(dtype)
    new[:, ::5, 0] = 0
    new[0, 1::7, 0, 3] = 300
    for rows, cache, scale in zip(new.to(device), caches, scales, strict=True):
        lesson.quantize_launch(rows, slots.to(device), cache, scale)
    return new, slots, caches, scales, tables


@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "block_size", "dtype"),
    [(2, 2, 64, 16, EXACT), (6, 2, 80, 5, torch.float16), (8, 1, 128, 1, EXACT), (3, 3, 16, 64, torch.float16)],
)
def test_what_the_kernels_write_and_read(heads, kv_heads, head_dim, block_size, dtype, device):
    torch.manual_seed(0)
    lengths = [0, 1, block_size, block_size + 1, TILE - 1, TILE + 1]
    new, slots, caches, scales, tables = written(lengths, kv_heads, head_dim, block_size, dtype, device)
    for rows, cache, scale in zip(new, caches.cpu(), scales.cpu(), strict=True):
        integers, expected = lesson.quantize(rows)
        assert_close(scale[slots], expected)
        assert (cache[slots].int() - integers).abs().max() <= (1 if device.type == "cuda" else 0)
        others = torch.ones(len(cache), dtype=torch.bool).index_fill(0, slots, False)
        assert (cache[others] == 111).all(), "a slot that nobody asked for was written"
    q = torch.randn(len(lengths), heads, head_dim).to(device, dtype)
    counts = torch.tensor(lengths, dtype=torch.int32, device=device)
    out = lesson.int8_decode(q, caches, scales, tables.to(device), counts, block_size)
    k, v = (caches.double() * scales[..., None]).cpu()[:, slots]
    ends = torch.tensor(lengths).cumsum(0).tolist()
    for row, (end, n) in enumerate(zip(ends, lengths, strict=True)):
        if n == 0:
            assert not out[row].any()
        else:
            expected = reference_attention(q[row, None], k[end - n : end], v[end - n : end], head_dim**-0.5)[0]
            assert_close(out[row], expected)


def test_padding_is_not_written(device):
    rows, cache = torch.randn(3, 2, 16, device=device), torch.full((4, 2, 16), 9, dtype=torch.int8, device=device)
    scales = torch.zeros(4, 2, device=device)
    lesson.quantize_launch(rows, torch.tensor([-1, 2, -1], device=device), cache, scales)
    assert (cache[[0, 1, 3]] == 9).all()
    assert scales[2].all()
    assert not scales[[0, 1, 3]].any()


def test_the_lessons_cache_is_the_engines(device):
    """The same integers and scales, but for rounding at halves, and the same attention over them."""
    torch.manual_seed(0)
    lengths, block = [1, 17, 33, 40], 16
    new, slots, caches, scales, tables = written(lengths, 2, 64, block, EXACT, device)
    blocks = caches.shape[1] // block
    theirs = [torch.zeros(blocks, block, 2, 64, dtype=torch.int8, device=device) for _ in range(2)]
    their_scales = [torch.zeros(blocks, 2, block, device=device) for _ in range(2)]
    engine_cache.reshape_and_cache(
        *new.to(device), *theirs, slots.to(device), key_scales=their_scales[0], value_scales=their_scales[1],
        backend="triton",
    )  # fmt: skip
    for mine, other, scale, other_scale in zip(caches, theirs, scales, their_scales, strict=True):
        off = (mine.view_as(other).int() - other).view(-1, 2, 64)[slots.to(device)].abs()
        assert off.max() <= 1
        assert off.float().mean() < 1e-3
        assert_close(scale[slots.to(device)], other_scale.transpose(1, 2).reshape(-1, 2)[slots.to(device)])
    q, counts = torch.randn(4, 8, 64, device=device), torch.tensor(lengths, dtype=torch.int32, device=device)
    shaped = [cache.view(blocks, block, 2, 64) for cache in caches]
    by_head = [scale.view(blocks, block, 2).transpose(1, 2).nan_to_num().contiguous() for scale in scales]
    starts = torch.arange(5, dtype=torch.int32, device=device)
    engine = unified_attention(
        q, *shaped, starts, counts, tables.to(device), 64**-0.5, k_scales=by_head[0], v_scales=by_head[1],
        backend="triton",
    )  # fmt: skip
    assert_close(lesson.int8_decode(q, caches, scales, tables.to(device), counts, block), engine)


def test_the_cpu_forms_agree():
    """`quantize` in PyTorch is the engine's CPU form, but for rounding at halves."""
    rows = torch.randn(500, 3, 32)
    rows[::7, 1] = 0
    (integers, scales), (theirs, their_scales) = lesson.quantize(rows), cache_calls.quantize(rows)
    assert torch.equal(scales, their_scales)
    assert (integers.int() - theirs).abs().max() <= 1
    assert (integers != theirs).float().mean() < 1e-3


def test_kernels_of_the_cache_compile_everywhere():
    sizes = {"HEAD_DIM": 128, "BLOCK_D": 128}
    arguments = {"rows": "*bf16", "slots": "*i64", "cache": "*i8", "scales": "*fp32", **sizes}
    assert_compiles(lesson.quantize_kernel, arguments, {"num_warps": 1})
    pointers = {"out": "*bf16", "q": "*bf16", "keys": "*i8", "values": "*i8", "key_scales": "*fp32"}
    pointers |= {"value_scales": "*fp32", "block_table": "*i32", "lengths": "*i32"}
    shape = {"GROUP": 4, "KV_HEADS": 8, "BLOCK_SIZE": 16, "BLOCK_T": 64, **sizes}
    arguments = {**pointers, "table_width": 128, "scale": 0.1, **shape}
    assert_compiles(lesson.int8_decode_kernel, arguments, load_bytes=8)


def test_one_outlier_breaks_a_scale_for_all():
    """A channel × 50: with a scale a token and head only its own head suffers, with one scale all do."""
    torch.manual_seed(0)
    rows = torch.randn(100, 4, 64)
    rows[:, 0, 0] *= 50
    ways = report.int8_caches(lesson.quantize).values()
    near, far = ((rounded(rows) - rows)[:, 1:].square().mean() for rounded in ways)
    assert far > 300 * near


# ---- weights ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("m", "n", "k"), [(1, 64, 64), (5, 70, 200), (17, 1, 33), (33, 130, 65)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_the_product_with_int8(m, n, k, dtype, device):
    torch.manual_seed(0)
    x, (integers, scales) = torch.randn(m, k).to(dtype), lesson.quantize(torch.randn(n, k))
    found = lesson.w8a16(x.to(device), integers.to(device), scales.to(device))
    assert found.dtype == dtype
    assert_close(found, x.double() @ (integers.double() * scales.double()[:, None]).T, scale=2)


def test_the_product_compiles_everywhere():
    arguments = {"out": "*bf16", "x": "*bf16", "weight": "*i8", "scales": "*fp32", "M": 64, "N": 4096, "K": 4096}
    tiles = {"BLOCK_M": 16, "BLOCK_N": 64, "BLOCK_K": 64}
    assert_compiles(lesson.w8a16_kernel, {**arguments, **tiles}, tensor_core=True, load_bytes=16)


@pytest.mark.parametrize(("columns", "group"), [(64, 16), (64, 64), (70, 16), (7, 2), (128, 128)])
def test_int4_packs_what_it_unpacks(columns, group):
    torch.manual_seed(0)
    weight = torch.randn(9, columns)
    weight[3], weight[4, 0] = 0, 50
    packed, scales = lesson.quantize_int4(weight, group)
    groups = -(-columns // group)
    assert packed.dtype == torch.uint8
    assert (packed.shape, scales.shape) == ((9, groups * group // 2), (9, groups))
    back = lesson.dequantize_int4(packed, scales, columns)
    bound = scales.repeat_interleave(group, 1)[:, :columns] / 2 * 1.001 + 1e-9
    assert ((back - weight).abs() <= bound).all()
    again = lesson.quantize_int4(back, group)
    assert torch.equal(again[0], packed), "what it stands for is stored as itself"


def test_the_lessons_weights_mean_to_the_engine_what_they_mean_here():
    """The engine's own rounding uses a sixteenth value and signed scales; codes and scales are read alike."""
    torch.manual_seed(0)
    x, weight = torch.randn(3, 64), torch.randn(20, 64)
    packed, scales = lesson.quantize_int4(weight, 16)
    assert torch.equal(packed_weights.dequantize_weight(packed, scales), lesson.dequantize_int4(packed, scales, 64))
    integers, by_row = lesson.quantize(weight)
    theirs, their_scales = packed_weights.quantize_weight(weight, "int8")
    assert torch.equal(by_row[:, None], their_scales)
    assert (integers.int() - theirs).abs().max() <= 1
    assert_close(quantized_linear(x, integers, by_row[:, None]), lesson.w8a16(x, integers, by_row))


def test_bits_are_counted():
    weight, ways = torch.randn(256, 512), (lesson.quantize, lesson.quantize_int4, lesson.dequantize_int4)
    for group, bits in ((None, 8 + 16 / 512), (64, 4 + 16 / 64), (1 << 20, 4 + 16 / 512)):
        rounded, counted = report.stored(weight, group, *ways)
        assert counted == pytest.approx(bits)
        assert rounded.shape == weight.shape


# ---- CUDA graphs -----------------------------------------------------------------------------------------------------


def test_the_next_captured_size():
    sizes = [1, 2, 4, 8, 16]
    assert [lesson.padded_size(batch, sizes) for batch in (1, 2, 3, 5, 8, 9, 16, 17)] == [1, 2, 4, 8, 8, 16, 16, None]


def test_the_gain_of_graphs():
    assert lesson.graph_gain(300, 10e-6, 0.0, 1e-3) == pytest.approx(3)
    assert lesson.graph_gain(300, 10e-6, 0.0, 6e-3) == 1, "the GPU is slower than its host: nothing to gain"
    gains = [lesson.graph_gain(300, 10e-6, 1e-4, gpu) for gpu in (1e-4, 1e-3, 2e-3, 1e-2)]
    assert gains == sorted(gains, reverse=True)
    assert all(gain <= (300 * 10e-6 + 1e-4) / gpu for gain, gpu in zip(gains[:3], (1e-4, 1e-3, 2e-3), strict=True))


def test_wrong_replays():
    found = report.replay_wrongly(lesson.Buffers)
    assert found["padded"] == 99
    assert found["not padded"] == 4, "the row of a request that has left is written again"
    assert found["too small"][:4] == found["right"][:4]
    assert found["too small"][4] == 50, "the fifth row is the step before's"


# ---- tensor parallelism ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 6])
def test_ranks_add_up(ranks):
    torch.manual_seed(0)
    x, up, gate = torch.randn(5, 8).double(), torch.randn(12, 8).double(), torch.randn(12, 8).double()
    down = torch.randn(7, 12).double()
    found = lesson.column_then_row(x, [gate, up], down, lambda g, u: torch.relu(g) * u, ranks)
    assert_close(found, (torch.relu(x @ gate.T) * (x @ up.T)) @ down.T)


def test_a_layers_halves_on_two_ranks():
    model = load_model(EMBEDDED_MODEL, "cpu", "float32")[0]
    assert report.measure_parallel(model, lesson.column_then_row, lesson.all_reduce_bytes)["off"] < 1e-3


def test_bytes_of_the_all_reduce():
    llama = known_model("Meta-Llama-3-70B")
    shape = llama.hidden_size, llama.num_hidden_layers
    assert lesson.all_reduce_bytes(1, *shape, 2) == 2 * 80 * 8192 * 2
    assert lesson.all_reduce_bytes(64, *shape, 8) == 64 * 2 * 80 * 2 * 7 / 8 * 8192 * 2
    assert lesson.all_reduce_bytes(64, *shape, 1) == 0


# ---- speculation -----------------------------------------------------------------------------------------------------


@torch.inference_mode()
@pytest.mark.parametrize("drafts", [1, 4])
def test_speculation_changes_no_token_and_saves_passes(drafts):
    model = load_model(EMBEDDED_MODEL, "cpu", "float32")[0]
    prompt = [1000, 7, 300, 7, 1000, 7, 300, 7]
    plain, passes = lesson.generate(model, prompt, 24, 0)
    spoken, fewer = lesson.generate(model, prompt, 24, drafts)
    assert plain == spoken
    assert (len(plain), passes) == (24, 24)
    assert fewer < passes


@torch.inference_mode()
def test_wrong_drafts_change_nothing_either(monkeypatch):
    model = random_model(load_model(EMBEDDED_MODEL, "cpu", "float32")[1], seed=3, dtype="float32")
    monkeypatch.setattr(lesson, "propose", lambda text, longest, count: [text[0]] * count)
    prompt = [5, 6, 7]
    assert lesson.generate(model, prompt, 10, 3)[0] == lesson.generate(model, prompt, 10, 0)[0]


# ---- the exercise ----------------------------------------------------------------------------------------------------

MUTANTS = {
    "names a block by its tokens alone": ("block_hashes", "parent + tokens", "tokens"),
    "names the block that is not full": ("block_hashes", "len(token_ids) - block_size + 1", "len(token_ids)"),
    "forgets the salt": ("block_hashes", "b'' if start else extra", "b''"),
    "a chain that does not go on": (
        "block_hashes",
        "parent = hashlib.sha256(...).digest()",
        "name = hashlib.sha256(...).digest()",
    ),
    "one scale for all rows": ("quantize", "....amax(-1)", "....amax().expand(rows.shape[:-1])"),
    "cuts off": ("quantize", "torch.floor(... + 0.5)", "torch.trunc(...)"),
    "divides by zero": (
        "quantize",
        "torch.floor(rows / scales.clamp(min=1e-30)[..., None] + 0.5)",
        "torch.floor(rows / scales[..., None] + 0.5).nan_to_num(1)",
    ),
    "goes to −128": ("quantize", "... / 127", "... / 128"),
    "finds the ending itself": ("propose", "range(len(tokens) - n)", "range(len(tokens) - n + 1)"),
    "takes the latest place": ("propose", "range(len(tokens) - n)", "reversed(range(len(tokens) - n))"),
    "tries the shortest first": ("propose", "range(..., 0, -1)", "range(1, ... + 1)"),
    "drafts without end": ("propose", "tokens[start + n : start + n + count]", "tokens[start + n :]"),
    "gives up after the longest": ("propose", "for start in ...: ...", "for start in ...: ...\nbreak"),
    "no word of its own": ("verify", "favourites[: kept + 1]", "favourites[:kept]"),
    "trusts its drafts": ("verify", "kept = 0", "kept = len(drafts)"),
    "keeps what is right after a mistake": (
        "verify",
        "while ...: kept += 1",
        "kept = sum(a == b for a, b in zip(drafts, favourites, strict=False))",
    ),
}


@pytest.mark.parametrize("mistake", MUTANTS)
def test_the_checks_catch(mistake):
    assert checks_that_catch("05", MUTANTS[mistake])


# ---- the script from outside -----------------------------------------------------------------------------------------


def test_quick_run(tmp_path):
    figures = figures_of_quick_run("05", tmp_path)
    prefix = figures["prefix"]
    assert prefix["strangers"]["skipped"] == 0
    assert prefix["an agent"]["hit"] > prefix["one system prompt"]["hit"] > 0.5
    assert all(one["same"] == 1 for one in prefix.values()), "a cached prefix changes no answer"
    # 4 users behind 384 tokens: three of them find 24 blocks
    assert prefix["one system prompt"]["skipped"] == 3 * 384
    assert figures["kv"]["capacity"]["fp8"] == 2
    assert figures["kv"]["capacity"]["int8"] == pytest.approx(128 / 132 * 2)
    assert figures["kv"]["bytes"]["int8"]["here"] == 4 * 2 * 2 * (32 + 4)
    assert abs(figures["kv"]["added"]) < 0.01
    assert figures["outlier"]["a scale a tensor"]["50"] > 5 * abs(figures["outlier"]["a scale a token and head"]["50"])
    ways = figures["weights"]["ways"]
    assert ways["int4, a scale a row"]["added_50"] > 10 * ways["int4, groups of 16"]["added_50"]
    assert ways["int8, a scale a row"]["error_1"] < ways["int4, groups of 16"]["error_1"]
    gains = figures["graphs"]["gain"]
    assert all(list(one.values()) == sorted(one.values(), reverse=True) for one in gains.values())
    for one in figures["speculation"].values():
        assert one["same"]
        assert one["lesson_same"]
        assert one["lesson_passes"] <= 24
        assert one["a_pass"] > 1
    thrashing = list(figures["thrash"].values())
    assert thrashing[0] > 0.4
    assert thrashing[-1] == 0, "least recently used, in turn: the one that comes next has just gone"
    assert figures["salt"] == {"Ann": 0, "Bob": 0, "Ann again": 96}


@pytest.mark.parametrize(
    ("arguments", "about"),
    [
        (("--users", "1"), "--users: must be from 2 to 32"),
        (("--users", "100"), "--users: must be from 2 to 32"),
        (("--group", "7"), "--group: must be an even number"),
        (("--drafts", "99"), "--drafts: must be from 1 to 32"),
        (("--model", "nowhere"), "nowhere"),
    ],
)
def test_bad_input_gets_one_line(arguments, about):
    assert_refuses(lesson, *arguments, about=about)
