"""Lesson 05: each lever does what it says, its kernels are right and match the engine's, its
exercise catches mistakes.
"""

import math
import re

import pytest
import torch
from kernels.harness import assert_close, assert_compiles
from lessons.harness import REPOSITORY, exercise_test, figures_of_quick_run, script_path

from minivllm import LLM, SamplingParams
from minivllm.config import EMBEDDED_MODEL, NO_PARTS, Parts
from minivllm.core.policy import SchedulingPolicy
from minivllm_lab.checks.mutants import load_mutant
from minivllm_lab.checks.plugged import Plugged, serve
from minivllm_lab.exercise import checks_of, load, plug_of, run_checks
from minivllm_lab.marks import pages_of
from minivllm_lab.optimization_catalog import captured, manuals, opening, quantization, report
from minivllm_lab.optimization_catalog.shared_prefixes import ANSWER_TOKENS
from minivllm_lab.pictures.followed import PROMPT, followed

lesson = load(script_path("05"))
pytestmark = pytest.mark.filterwarnings("ignore:divide by zero")


# ---- the text and its figures --------------------------------------------------------------------


def test_the_hashes_by_hand_are_those_of_the_figure():
    """The table in the text is the followed request's tokens under the hash for paper."""
    tokens = [token.id for token in followed("alone").request.tokens]
    hashes = [0]
    for start in (0, 4, 8):
        hashes.append(opening.paper_hash(hashes[-1], tokens[start : start + 4]))
    assert hashes[1:] == [788, 134, 533]
    text, notes = (page.read_text() for page in pages_of(REPOSITORY / "lessons", "05"))
    for start, block_hash in ((0, 788), (4, 134)):
        ids = ", ".join(map(str, tokens[start : start + 4]))
        assert re.search(rf"\| {ids} \| .* \| {block_hash} \|", text), f"no row with {ids} and {block_hash}"
    assert ", ".join(map(str, tokens[8:12])) in notes
    assert opening.paper_hash(0, [516, 846, 8, 65]) == 492
    assert opening.paper_hash(492, tokens[4:8]) == 62
    assert opening.paper_hash(0, tokens[4:8]) == 618
    different = [1 - math.prod(1 - place / 1000 for place in range(count)) for count in (37, 38)]
    assert different[0] < 0.5 < different[1], "how many hashes are enough for an even chance"


def test_what_five_prompts_find_is_what_the_text_says():
    """The engine gets the text's five prompts one after another."""
    llm = LLM(EMBEDDED_MODEL, device="cpu", num_gpu_blocks_override=16, block_size=4, max_model_len=32)
    changed = PROMPT.replace("return", "print"), PROMPT[: -len(" return")], PROMPT.replace("add", "sub")
    params = SamplingParams(temperature=0.0, max_tokens=6)
    asked = [llm.generate(prompt, params, use_tqdm=False)[0] for prompt in (PROMPT, PROMPT, *changed)]
    assert [len(output.prompt_token_ids) for output in asked] == [9, 9, 9, 8, 9]
    assert [output.num_cached_tokens for output in asked] == [0, 8, 8, 4, 0]
    assert [asked[place].outputs[0].text for place in (0, 4)] == [" a + b\n\ndef", " a, b\n\ndef"]


@pytest.mark.parametrize("room", [7, 9])
def test_customers_in_turn_find_nothing_if_one_manual_is_too_many(room, monkeypatch):
    """Each question evicts the manual that will be needed soonest."""
    monkeypatch.setattr(manuals, "ROOM", room)
    answered = manuals.turns()
    assert not any(turn.found for turn in answered)
    soon = len(manuals.CUSTOMERS) - room
    for index in range(room, len(answered) - soon):
        (evicted,) = set(answered[index - 1].cached) - set(answered[index].cached)
        assert answered[index + soon].customer == evicted


def test_with_room_for_all_every_manual_is_found_from_the_second_round_on(monkeypatch):
    monkeypatch.setattr(manuals, "ROOM", 10)
    assert [turn.found for turn in manuals.turns()] == [False] * 10 + [True] * 10


def test_the_captured_layer_has_the_times_of_the_text():
    """The launches and kernels add up to what the picture, the text and PERFORMANCE.md say."""
    assert captured.LAUNCH * len(captured.NAMES) * captured.LAYERS == pytest.approx(12_000)
    layer = sum(captured.MATMULS.get(name, captured.OTHER) for name in captured.NAMES)
    assert round(layer) == 135
    assert layer * captured.LAYERS == pytest.approx(3_800 - 270 + 800, abs=20)
    text = (REPOSITORY / "lessons" / "05_optimization_catalog.md").read_text()
    assert "375 µs" in text
    assert "135 µs" in text


# ---- the KV cache in int8 ------------------------------------------------------------------------


def test_the_scripts_own_proof_holds(device):
    assert max(lesson.verify_kernels(device).values()) < 4e-3


def test_kernels_of_the_cache_compile_everywhere():
    sizes = {"HEAD_DIM": 128, "BLOCK_D": 128}
    arguments = {"rows": "*bf16", "slots": "*i64", "cache": "*i8", "scales": "*fp32", **sizes}
    assert_compiles(lesson.quantize_and_cache_kernel, arguments, {"num_warps": 1})
    rows = {"rows": "*bf16", "scales": "*fp32", "integers": "*i8", **sizes}
    assert_compiles(lesson.quantize_kernel, rows, {"num_warps": 1})
    assert_compiles(lesson.largest_kernel, {"rows": "*bf16", "largest": "*fp32", **sizes}, {"num_warps": 1})
    pointers = {"out": "*bf16", "q": "*bf16", "keys": "*i8", "values": "*i8", "key_scales": "*fp32"}
    pointers |= {"value_scales": "*fp32", "block_table": "*i32", "lengths": "*i32"}
    shape = {"GROUP": 4, "KV_HEADS": 8, "BLOCK_SIZE": 16, "BLOCK_T": 64, **sizes}
    arguments = {**pointers, "table_width": 128, "scale": 0.1, **shape}
    assert_compiles(lesson.int8_decode_kernel, arguments, load_bytes=8)


# ---- weights -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("m", "n", "k", "dtype"), [(1, 64, 64, torch.float32), (17, 1, 33, torch.float16), (33, 130, 65, torch.float32)]
)
def test_the_product_with_int8(m, n, k, dtype, device):
    torch.manual_seed(0)
    x, (integers, scales) = torch.randn(m, k).to(dtype), lesson.quantize(torch.randn(n, k))
    result = lesson.w8a16(x.to(device), integers.to(device), scales.to(device))
    assert result.dtype == dtype
    assert_close(result, x.double() @ (integers.double() * scales.double()[:, None]).T, scale=2)


def test_the_product_compiles_everywhere():
    arguments = {"out": "*bf16", "x": "*bf16", "weight": "*i8", "scales": "*fp32", "M": 64, "N": 4096, "K": 4096}
    tiles = {"BLOCK_M": 16, "BLOCK_N": 64, "BLOCK_K": 64}
    assert_compiles(lesson.w8a16_kernel, {**arguments, **tiles}, tensor_core=True, load_bytes=16)


@pytest.mark.parametrize(("columns", "group"), [(64, 16), (70, 16), (7, 2)])
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


def test_bits_are_counted():
    rounding = quantization.Rounding(lesson.quantize, lesson.quantize_int4, lesson.dequantize_int4)
    weight = torch.randn(256, 512)
    for group, bits in ((None, 8 + 16 / 512), (64, 4 + 16 / 64), (1 << 20, 4 + 16 / 512)):
        rounded, counted = quantization.stored(weight, group, rounding)
        assert counted == pytest.approx(bits)
        assert rounded.shape == weight.shape


# ---- CUDA graphs ---------------------------------------------------------------------------------


def test_wrong_replays():
    result = report.replay_wrongly(lesson.Buffers, lesson.padded_size)
    assert result["graphs"] == {"1": 1, "3": 4, "5": 8, "9": 16, "17": None}
    assert result["padded"] == 99
    assert result["not padded"] == 4, "the row of a request that has left is written again"
    assert result["too small"][:4] == result["right"][:4]
    assert result["too small"][4] == 50, "the fifth row is the step before's"


# ---- tensor parallelism --------------------------------------------------------------------------


@pytest.mark.parametrize("ranks", [1, 3, 4])
def test_ranks_add_up(ranks):
    torch.manual_seed(0)
    x, up, gate = torch.randn(5, 8).double(), torch.randn(12, 8).double(), torch.randn(12, 8).double()
    down = torch.randn(7, 12).double()
    result = lesson.column_then_row(x, [gate, up], down, lambda g, u: torch.relu(g) * u, ranks)
    assert_close(result, (torch.relu(x @ gate.T) * (x @ up.T)) @ down.T)


# ---- the exercise --------------------------------------------------------------------------------


test_the_checks_catch = exercise_test("05")


@pytest.mark.interpreted
def test_other_integers_that_pass_give_the_same_tokens():
    """Halves may be rounded either way: the integers of `torch.round` pass the checks and change
    no token.
    """
    mutant = load_mutant(script_path("05"), ("quantize", "torch.floor(... + 0.5)", "torch.round(...)"))
    assert all(result.passed for result in run_checks(mutant, checks_of("05")))
    other = plug_of("05")(mutant)
    assert serve(other, other.parts).token_ids == serve(other, NO_PARTS).token_ids


def test_hashes_without_a_parent_give_wrong_answers():
    """The second `add`, after `sub`, finds its own first block and then one of `sub`, as the lesson
    says.
    """
    prompts = ["def sub(a, b):\n    return", "def add(a, b):\n    return", "def add(a, b):\n    return"]
    requests = Plugged(parts=NO_PARTS, engine_args={"block_size": 4}, prompts=prompts, max_tokens=6)
    policy = SchedulingPolicy(
        hash_block_tokens=lambda parent, tokens, keys: lesson.hash_block_tokens(bytes(32), tokens, keys)
    )
    right, wrong = serve(requests, NO_PARTS), serve(requests, Parts(policy=policy))
    assert right.texts == [" a, b\n\ndef", " a + b\n\ndef", " a + b\n\ndef"]
    assert wrong.texts == [" a, b\n\ndef", " a + b\n\ndef", " a, b\n\ndef"]


# ---- the script from outside ---------------------------------------------------------------------


def hits_of_turns(first, more, turns):
    """Count one conversation's cached tokens: each turn hits the full blocks of what the turn
    before computed.
    """
    lengths = [first + turn * (more + ANSWER_TOKENS) for turn in range(turns - 1)]
    return sum((length + ANSWER_TOKENS - 1) // 16 * 16 for length in lengths)


def test_quick_run(tmp_path):
    figures = figures_of_quick_run("05", tmp_path)
    assert {name: prefix["skipped"] for name, prefix in figures["prefix"].items()} == {
        "one system prompt": 3 * 384,  # three of four users find 24 blocks
        "chats of 5 turns": 4 * hits_of_turns(96, 24, 5),
        "an agent": hits_of_turns(256, 24, 8),
        "strangers": 0,
    }
    assert all(prefix["same"] == 1 for prefix in figures["prefix"].values()), "a cached prefix changes no answer"
    assert figures["kv"]["capacity"]["fp8"] == 2
    assert figures["kv"]["capacity"]["int8"] == pytest.approx(128 / 132 * 2)
    assert figures["kv"]["bytes"]["int8"]["here"] == 4 * 2 * 2 * (32 + 4)
    assert abs(figures["kv"]["added"]) < 0.01
    ways = figures["weights"]["ways"]
    assert ways["int4, a scale per row"]["added_50"] > 10 * ways["int4, groups of 16"]["added_50"]
    assert ways["int8, a scale per row"]["error_1"] < ways["int4, groups of 16"]["error_1"]
    thrashing = list(figures["thrash"].values())
    assert thrashing[0] > 0.4
    assert thrashing[-1] == 0, "least recently used, in turn: the one that comes next has just gone"
    assert figures["salt"] == {"Ann": 0, "Bob": 0, "Ann again": 96}
    assert figures["parallel"] == {"1": 30, "2": 30}
