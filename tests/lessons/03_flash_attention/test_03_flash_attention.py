"""Lesson 03: its softmax is exact whatever the tiles, its counts are the loops' own, its
exercise catches mistakes.
"""

import json
import math
import re
from functools import partial

import numpy as np
import pytest
import torch
from kernels.harness import assert_close, assert_compiles, reference_attention
from lessons.harness import REPOSITORY, exercise_test, figures_of_quick_run, script_path
from refusals import assert_refused

from minivllm.config import EMBEDDED_MODEL
from minivllm.models.attention import CausalAttention
from minivllm.models.loader import load_model
from minivllm.models.tokenizer import load_tokenizer
from minivllm.platforms.triton_utils import INTERPRETED, triton
from minivllm_lab.checks.kernel_trace import trace_kernel
from minivllm_lab.exercise import load
from minivllm_lab.flash_attention import opening, report
from minivllm_lab.flash_attention.attention_in_model import attend_in_model
from minivllm_lab.flash_attention.slow_memory import in_slow_memory
from minivllm_lab.flash_attention.still_pictures import L2_RATES, QUERIES, REACHED
from minivllm_lab.pictures.followed import PROMPT
from minivllm_simulate.hardware import HARDWARE

lesson = load(script_path("03"))
ROW = REPOSITORY / "widgets" / "flash_attention" / "attention_row.json"


# ---- the loops in NumPy --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("length", "head_dim", "block_q", "block_k"), [(1, 1, 1, 1), (63, 80, 64, 16), (130, 8, 16, 128), (37, 3, 5, 7)]
)
def test_the_model_of_the_traffic_is_the_loops_own_count(length, head_dim, block_q, block_k):
    lesson.count_bytes(length, head_dim, block_q, block_k)  # asserts it to the byte


def test_a_loop_that_moves_more_is_not_taken_for_the_model(monkeypatch):
    monkeypatch.setattr(lesson, "masked", lambda scores, rows, first=0: scores)  # moves the same: no complaint
    lesson.count_bytes(40, 8, 16, 16)
    greedy = lesson.tiled_attention
    monkeypatch.setattr(lesson, "tiled_attention", lambda q, k, v, **tiles: (k[:], greedy(q, k, v, **tiles)))
    with pytest.raises(AssertionError, match="not Traffic"):
        lesson.count_bytes(40, 8, 16, 16)


def test_the_budget_names_the_longest_sequence_that_fits(capsys):
    assert report.show_budget(8, 64 * 2**20) == {"refused_at": 2048, "longest": 1024}, "all of it may be used"
    said = " ".join(capsys.readouterr().out.split())
    assert "2,048 tokens need 256 MiB, but there are 64; 1,024 tokens fit" in said
    assert report.show_budget(8, 64 * 2**20 - 1) == {"refused_at": 1024, "longest": 1023}


# ---- the kernel ----------------------------------------------------------------------------------


def vectors(queries, keys, heads, head_dim, dtype, device, seed=0):
    draw = torch.Generator().manual_seed(seed)
    shapes = ((queries, heads, head_dim), (keys, heads, head_dim), (keys, heads, head_dim))
    return [torch.randn(shape, generator=draw).to(device, dtype) for shape in shapes]


def test_the_scripts_own_proof_holds(device):
    """It compares with float64 in one pass, and over parts of the keys, whose lse merges them."""
    assert lesson.verify(device)["ours"] < 2e-5


@pytest.mark.gpu
@pytest.mark.parametrize("head_dim", [64, 80, 128])
@pytest.mark.parametrize("length", [1, 127, 128, 129, 1000])
def test_flash_attention_as_it_is_launched(length, head_dim):
    q, k, v = vectors(length, length, 4, head_dim, torch.bfloat16, "cuda")
    assert_close(lesson.flash_attention(q, k, v)[0], reference_attention(q, k, v, head_dim**-0.5))


@pytest.mark.parametrize("large", [3e3, -3e3])
def test_large_scores_do_not_overflow(large, device):
    q, k, v = vectors(40, 40, 1, 64, torch.float32, device)
    q[:], k[20] = 1.0, large / 8  # key 20 outweighs all others, or weighs nothing
    out, _ = lesson.flash_attention(q, k, v, block_q=16, block_k=16)
    assert_close(out, reference_attention(q, k, v, 0.125))


def test_a_row_that_sees_nothing_gives_zero_and_spoils_no_other(device):
    """The first 30 of 40 causal queries come before all 10 keys."""
    q, k, v = vectors(40, 10, 2, 64, torch.float32, device)
    out, lse = lesson.flash_attention(q, k, v, block_q=16, block_k=16)
    assert torch.equal(out[:30], torch.zeros_like(out[:30]))
    assert torch.isneginf(lse[:, :30]).all()
    assert_close(out[30:], reference_attention(q[30:], k, v, 0.125))


def test_no_queries_and_no_keys(device):
    q, k, v = vectors(3, 0, 2, 64, torch.float32, device)
    out, lse = lesson.flash_attention(q, k, v)
    assert torch.equal(out, torch.zeros_like(out))
    assert torch.isneginf(lse).all()
    assert lesson.flash_attention(q[:0], q, q)[0].shape == (0, 2, 64)


@pytest.mark.parametrize(
    ("heads", "tiles", "words"),
    [
        (1, {"block_q": 8}, "block_q must be a power of two"),
        (1, {"block_k": 48}, "block_k must be a power of two"),
        (2, {}, "heads and head dims must agree"),
    ],
)
def test_what_the_kernel_cannot_take_is_refused(heads, tiles, words):
    q, k, v = vectors(4, 4, heads, 64, torch.float32, "cpu")
    assert_refused(words, lesson.flash_attention, q, k[:, :1], v[:, :1], **tiles)


@pytest.mark.parametrize("head_dim", [64, 80, 128])
def test_the_kernel_compiles_everywhere(head_dim):
    arguments = {
        **dict.fromkeys(("out", "q", "k", "v"), "*bf16"), "lse": "*fp32", "queries": 4096, "keys": 4096, "scale": 0.1,
        "CAUSAL": True, "HEADS": 32, "HEAD_DIM": head_dim, "BLOCK_D": triton.next_power_of_2(head_dim),
        "BLOCK_Q": 128, "BLOCK_K": 64,
    }  # fmt: skip
    launched = {"num_warps": 8, "num_stages": 2}
    assert_compiles(lesson.flash_kernel, arguments, launched, tensor_core=True, load_bytes=16)


def test_the_kernels_of_the_exercise_compile_everywhere():
    scores, sizes = dict.fromkeys(("out", "scores", "values"), "*fp32"), {"HEAD_DIM": 64, "BLOCK": 32}
    sums = {**dict.fromkeys(("m_out", "l_out", "scores"), "*fp32"), "KEYS": 4096, "BLOCK": 128}
    assert_compiles(lesson.row_sums_kernel, sums)
    assert_compiles(lesson.row_output_kernel, scores | sizes | {"KEYS": 4096})
    assert_compiles(lesson.causal_rows_kernel, scores | {"rows": 7, "keys": 4001} | sizes)


# ---- the row that the widget shows ---------------------------------------------------------------


def test_the_widgets_row_is_the_embedded_models():
    model, tokenizer = load_model(EMBEDDED_MODEL, dtype="float32")[0], load_tokenizer(EMBEDDED_MODEL)
    kernel = partial(lesson.flash_attention, block_q=32, block_k=32) if INTERPRETED else None
    row = attend_in_model(model, tokenizer, report.TEXT, kernel, report.LIMITS["float16"]).row
    stored = json.loads(ROW.read_text())["figures"]
    how = f"run vllm/03_flash_attention.py --quick --row {ROW.relative_to(REPOSITORY)}"
    for name in ("layer", "head", "tokens"):
        assert stored[name] == row[name], how
    for name in ("scores", "values"):
        np.testing.assert_allclose(stored[name], row[name], atol=5e-3, err_msg=how)


# ---- the exercise --------------------------------------------------------------------------------


test_the_checks_catch = exercise_test("03")


# ---- the opening figure --------------------------------------------------------------------------


def test_the_opening_figures_scores_are_the_embedded_models():
    model, tokenizer = load_model(EMBEDDED_MODEL, dtype="float32")[0], load_tokenizer(EMBEDDED_MODEL)
    ids, scores, plain = tokenizer.encode(PROMPT).ids, {}, CausalAttention(model.config)

    def attend(layer, q, k, v):
        keys = k.repeat_interleave(q.shape[1] // k.shape[1], dim=1)
        scores[layer] = torch.einsum("qhd,khd->hqk", q, keys) / math.sqrt(q.shape[-1])
        return plain(layer, q, k, v)

    with torch.inference_mode():
        model(torch.tensor(ids), torch.arange(len(ids)), attend)
    for row, drawn in enumerate(opening.SCORES, start=opening.FIRST):
        assert len(drawn) == row + 1
        np.testing.assert_allclose(drawn, scores[opening.LAYER][opening.HEAD, row, : row + 1], atol=0.01)


def test_the_opening_figure_walks_as_the_loop_does():
    """The rows that move in the figure are those that the loop moves for that tile of queries."""
    frames = opening.frames()
    assert "moved so far: 24 rows" in frames.still(-1)
    moved = {}
    for length in (4, 8):
        arrays, trips = in_slow_memory(*np.ones((3, length, 1), np.float32))
        output, _ = lesson.tiled_attention(*arrays, block_q=4, block_k=4)
        assert np.asarray(output).tolist() == [[1.0]] * length, "it is there as it was written"
        moved[length] = trips.read + trips.written
    lse = 4 * 4
    assert moved[8] - moved[4] - lse == 24 * 4
    factors = [math.exp(opening.sums(row, 4)[0] - opening.sums(row, len(row))[0]) for row in opening.SCORES]
    assert [f"{factor:.2f}" for factor in factors] == ["1.00", "0.13", "1.00", "0.38"]
    assert all(f">{factor:.2f}<" in frames.still(5) for factor in factors)


# ---- what the text says --------------------------------------------------------------------------


TEXT = " ".join((REPOSITORY / "lessons" / "03_flash_attention.md").read_text().split())


def test_the_first_screen_counts_with_the_data_sheets():
    h100, h200 = HARDWARE["H100"], HARDWARE["H200"]
    drawn, needed = opening.stills(), REACHED / QUERIES
    for gpu in (h100, h200):
        assert f"feed {QUERIES * gpu.bandwidth / 1e12:.0f}<" in drawn["bet"]
    assert h100.flops_of("bfloat16") == h200.flops_of("bfloat16")
    assert h100.bandwidth / 1e12 < needed < min(L2_RATES)
    assert f"needed: {needed:.1f} TB/s" in drawn["reveal"]
    for words in (
        f"{h200.bandwidth / h100.bandwidth:.1f} times as fast",
        f"an H100 could do {h100.ridge():.0f}",
        f"could feed {QUERIES * h100.bandwidth / 1e12:.0f} TFLOP/s, {QUERIES / h100.ridge():.0%}".replace("%", " %"),
        f"hoped for from the H200, {QUERIES * h200.bandwidth / 1e12:.0f}",
        f"{REACHED / (h100.flops_of('bfloat16') / 1e12):.0%} of the peak".replace("%", " %"),
        f"need {needed:.1f} TB a second, but HBM delivers {h100.bandwidth / 1e12:.2f}",
    ):
        assert words in TEXT


def test_the_bars_that_shrink_are_the_example_by_hand():
    state, drawn = lesson.nothing_seen(1, 1), opening.stills()["shrink"]
    factors = []
    for scores, values in (([math.log(2), 0], [8, 16]), ([math.log(4), 0], [24, 40])):
        before = state.m[0]
        state = lesson.softmax_step(state, np.array([scores]), np.array(values)[:, None])
        factors.append(math.exp(before - state.m[0]))
        assert f"l = {state.l[0]:g}<" in drawn
        assert f"O = {state.o[0, 0]:g}<" in drawn
    assert factors == pytest.approx([0, 0.5])
    assert "× ½" in drawn
    assert "count 2 and ½: $\\ell = 1.5 + 2 + ½ = 4$" in TEXT, "FlashAttention-4's, under the old maximum"
    assert state.o[0, 0] / state.l[0] == pytest.approx(84 / 4)


@pytest.mark.skipif(not INTERPRETED, reason="the interpreter counts the bytes")
def test_cells_print_what_the_page_shows(capsys):
    page, names = (
        (REPOSITORY / "lessons" / "03_flash_attention.md").read_text(),
        {"lesson": lesson, "math": math, "np": np},
    )
    cells = re.findall(r"```python exec\n([^`]*)```\n\n```text\n(.*?)```", page, re.DOTALL)
    assert len(cells) == 3
    for cell, shown in cells:
        exec(cell, names)
        assert capsys.readouterr().out == shown


def test_what_the_text_says_beside_its_tables():
    assert f"1,024 queries alone take {1024 * 128 * 2:,} bytes" in TEXT
    stored, tiles = 4 * 8192 + 4 * 128, 8192 // 128 + 3
    assert f"so tiles of 128 queries save half as much: {stored / (128 * tiles):.1f} times." in TEXT
    results = REPOSITORY / "benchmarks" / "results" / "03_flash_attention.nvidia-h200.json"
    short, long = (json.loads(results.read_text())["figures"]["time"]["by_length"][n]["gain"] for n in ("512", "4096"))
    assert f"On an H200, {short:.1f} times at 512 tokens, and {long:.1f} times at 4,096" in TEXT


@pytest.mark.skipif(not INTERPRETED, reason="the interpreter counts the bytes")
def test_the_loads_that_programs_share_are_as_the_text_says():
    q, k, v = torch.randn(3, 256, 1, 64)
    out, lse = torch.empty_like(q), torch.empty(1, 256)
    sizes = {"CAUSAL": True, "HEADS": 1, "HEAD_DIM": 64, "BLOCK_D": 64, "BLOCK_Q": 32, "BLOCK_K": 32}
    trace = trace_kernel(lesson.flash_kernel, (8, 1), out, lse, q, k, v, 256, 256, 0.125, **sizes)
    assert (trace.bytes_read, trace.bytes_read_once) == (655_360, 196_608)
    assert "Even here seven loaded bytes in ten are repeats." in TEXT
    assert 1 - trace.bytes_read_once / trace.bytes_read == pytest.approx(0.7, abs=0.01)


# ---- the script from outside ---------------------------------------------------------------------


def test_quick_run(tmp_path):
    figures = figures_of_quick_run("03", tmp_path)
    assert figures["powers"]["tiled_moved"] == pytest.approx(2, abs=0.1), "traffic stays quadratic"
    assert figures["powers"]["tiled_kept"] == pytest.approx(1), "what is kept becomes linear"
    assert figures["powers"]["naive_kept"] == pytest.approx(2)
    assert figures["powers"]["on_chip"] == pytest.approx(-1, abs=0.1)
    assert figures["powers"]["head_dim"] == pytest.approx(2, abs=0.15)
    assert figures["figure_2"]["ceiling"] == 17
    assert all(ratio < 17 for ratio in figures["figure_2"]["tiles"].values())
    assert figures["memory"] == {"refused_at": 8192, "longest": 4096}
    assert max(figures["errors"][name] for name in ("ours", "stored", "paged")) < 1e-5
    assert figures["model"]["logits_off_by"] < 1e-3
    assert figures["no_keys"]["unguarded_is_nan"]
    assert figures["traffic"]["peak_mib"]["tiled"] < 2 < 32 < figures["traffic"]["peak_mib"]["naive"], "2 × 16 MiB"
    assert [tile["fits"] for tile in figures["tiles"].values()] == [True, False]
