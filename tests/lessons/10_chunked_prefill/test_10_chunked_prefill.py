"""Lesson 10: its steps are the engine's, its kernel and formulas are right, its exercise catches
mistakes.
"""

import random
from functools import partial

import pytest
import torch
from kernels.harness import assert_compiles
from lessons.harness import REPOSITORY, engine_step, exercise_test, figures_of_quick_run, script_path
from refusals import assert_refused

from minivllm.config import CacheConfig, SchedulerConfig
from minivllm.core.policy import DEFAULT_POLICY
from minivllm.core.request import Request
from minivllm.core.scheduler import Scheduler
from minivllm.memory import kv_bytes_per_token
from minivllm_lab.chunked_prefill import kernel_cases, pieces, report
from minivllm_lab.chunked_prefill.learner_policy import learner_policy
from minivllm_lab.chunked_prefill.prefill_first import PREFILL_FIRST
from minivllm_lab.exercise import load
from minivllm_simulate.hardware import get_hardware
from minivllm_simulate.known_models import known_model
from minivllm_simulate.memory import num_parameters

lesson = load(script_path("10"))
TEXT, NOTES = (
    " ".join((REPOSITORY / "lessons" / folder / "10_chunked_prefill.md").read_text().split())
    for folder in ("", "notes")
)

# ---- its steps are the engine's ------------------------------------------------------------------


def workload(seed: int) -> tuple[dict[int, list[tuple[str, int, int]]], dict]:
    """Draw arrivals by step as (name, prompt, output), and a scheduler's settings."""
    draw = random.Random(seed)
    arrivals = {
        step: [(f"{step}.{i}", draw.randint(1, 40), draw.randint(1, 6)) for i in range(draw.choice([0, 0, 1, 3]))]
        for step in range(8)
    }
    arrivals[0].append(("first", draw.randint(1, 40), 4))
    settings = {"max_num_seqs": draw.randint(1, 6), "long_prefill_token_threshold": draw.choice([0, 0, 2, 5])}
    settings["enable_chunked_prefill"] = draw.random() < 0.7
    least = settings["max_num_seqs"] if settings["enable_chunked_prefill"] else 64
    return arrivals, settings | {"max_num_batched_tokens": least + draw.choice([0, 1, 8, 40])}


def engine_steps(arrivals, settings, policy=DEFAULT_POLICY) -> list[dict[str, int]]:
    """Return the steps of the engine's scheduler with ample memory."""
    cache = CacheConfig(num_gpu_blocks=500, enable_prefix_caching=False)
    scheduler = Scheduler(SchedulerConfig(max_model_len=64, **settings), cache, policy)
    steps, last = [], max(arrivals)
    while len(steps) <= last or scheduler.has_unfinished_requests():
        for name, prompt, output in arrivals.get(len(steps), ()):
            scheduler.add_request(Request(name, [0] * prompt, max_tokens=output))
        steps.append(dict(engine_step(scheduler).num_scheduled_tokens))
    return steps


def lesson_steps(policy, arrivals) -> list[dict[str, int]]:
    requests = {step: [lesson.Request(*each) for each in coming] for step, coming in arrivals.items()}
    return list(lesson.serve(policy, requests))


def test_the_mixed_steps_are_the_engines():
    for seed in range(50):
        arrivals, settings = workload(seed)
        policy = partial(
            lesson.mixed, token_budget=settings["max_num_batched_tokens"], max_num_seqs=settings["max_num_seqs"],
            threshold=settings["long_prefill_token_threshold"], may_be_cut=settings["enable_chunked_prefill"],
        )  # fmt: skip
        ours, expected = lesson_steps(policy, arrivals), engine_steps(arrivals, settings)
        assert [list(step.items()) for step in ours] == [list(step.items()) for step in expected], seed


def test_prefill_first_is_the_scheduler_of_v0():
    for seed in range(25):
        arrivals, settings = workload(seed)
        settings |= {"enable_chunked_prefill": False, "max_num_batched_tokens": 64, "long_prefill_token_threshold": 0}
        policy = partial(lesson.prefill_first, token_budget=64, max_num_seqs=settings["max_num_seqs"])
        assert lesson_steps(policy, arrivals) == engine_steps(arrivals, settings, PREFILL_FIRST), seed


def test_the_example_by_hand():
    """Follow the text's two tables."""
    first, mixed = (
        list(lesson.serve(policy, lesson.chats_and_a_long_prompt()))
        for policy in (partial(lesson.prefill_first, token_budget=32), partial(lesson.mixed, token_budget=8))
    )
    assert first[2:5] == [{"L": 20}, {"a": 1, "b": 1, "L": 1}, {"a": 1, "b": 1, "L": 1}]
    assert mixed[2:6] == [{"a": 1, "b": 1, "L": 6}] * 3 + [{"a": 1, "b": 1, "L": 2}]
    assert len(first) == len(mixed) == 8


@pytest.mark.parametrize(
    ("parts", "about"),
    [
        ({"chunk_limit": lambda *_: 0}, "your chunk_limit returns 0"),
        ({"running_tokens": lambda missing, *_: missing + 1}, "your running_tokens returns"),
        ({"admitted_tokens": lambda *_: None}, "your admitted_tokens returns None"),
    ],
)
def test_a_cap_that_cannot_be_is_one_line(parts, about):
    arrivals = {0: [("a", 30, 4), ("b", 30, 4)]}
    assert_refused(about, engine_steps, arrivals, {"max_num_batched_tokens": 8}, learner_policy(**parts))


# ---- the kernel ----------------------------------------------------------------------------------


def test_the_scripts_own_proof_holds(device):
    launches = lesson.mixed_launch, lesson.in_two_launches
    assert kernel_cases.verify_kernel(*launches, device, quick=False)["largest_error"] < 4e-3


def test_it_compiles():
    q, cache = torch.zeros(8, 32, 128).bfloat16(), torch.zeros(4, 16, 8, 128).bfloat16()
    ints = torch.zeros(16, dtype=torch.int32)
    arguments = {
        "out": q, "q": q, "k_cache": cache, "v_cache": cache, "query_start_loc": ints, "seq_lens": ints,
        "block_table": ints, "num_decodes": 7, "num_seqs": 9, "table_width": 64, "scale": 0.1, "GROUP": 4,
        "KV_HEADS": 8, "HEAD_DIM": 128, "BLOCK_D": 128, "BLOCK_SIZE": 16, "DECODE_M": 16, "CHUNK_M": 64, "BLOCK_T": 32,
    }  # fmt: skip
    assert_compiles(lesson.mixed_kernel, arguments, tensor_core=True, load_bytes=16)


def test_tiles_by_hand():
    """A decode in a group of 4 has 4 real rows; a chunk of 17 tokens has tiles of 16 tokens and of
    one.
    """
    work = lesson.tile_work([1, 17], [10, 17], 4, [16, 64])
    assert (work["tiles"], work["rows"], work["real"], work["keys"]) == (3, 16 + 128, 4 + 68, 10 + 16 + 17)
    assert work["scores"] == 16 * 32 + 64 * 32 + 64 * 32
    assert work["keeps"] == 4 * (10 + 17 * 18 // 2)


# ---- the formulas --------------------------------------------------------------------------------


def test_a_budget_of_decodes_and_a_prompt_that_must_not_be_cut_starve_it():
    """A prompt of 24 tokens arrives beside four chats of 30, as in the text's section "Break it"."""

    def steps_to_first_token(**settings):
        arrivals = {0: [lesson.Request(name, 1, 30) for name in "abcd"], 1: [lesson.Request("L", 24, 1)]}
        steps = list(lesson.serve(partial(lesson.mixed, **settings), arrivals))
        return max(number for number, step in enumerate(steps) if "L" in step)

    assert steps_to_first_token(token_budget=8) == lesson.steps_of_a_prompt(24, 8, 4) == 6
    assert steps_to_first_token(token_budget=4) > 30, "it gets nothing before a chat has ended"
    assert steps_to_first_token(token_budget=24, may_be_cut=False) == 30, "it waits for the chats"
    assert steps_to_first_token(token_budget=28, may_be_cut=False) == 1


def test_the_knee_is_found_in_a_sweep():
    """The knee is the time of small steps over the slope of large ones; single outliers do not
    matter.
    """
    sweep = {size: max(0.025, 0.005 + 0.002 * size) for size in pieces.SIZES}
    assert pieces.sweep_knee(sweep) == pytest.approx(12.5)
    assert pieces.sweep_knee({**sweep, 1: 0.1, 8: 0.2, 16: 0.2}) == pytest.approx(12.5)


def test_keys_and_experts_move_the_knee():
    """A step also reads its decodes' caches, and a token uses only some experts, as in the notes'
    examples.
    """
    gpu, llama, deepseek = get_hardware("H100"), known_model("Llama-3.1-8B"), known_model("DeepSeek-V3")
    dense = lesson.knee(gpu.flops_of("bfloat16"), gpu.bandwidth, 2)
    weights, keys = 2 * num_parameters(llama), 64 * 4096 * kv_bytes_per_token(llama)
    assert f"read {keys / 1e9:.1f} GB of [keys and values]" in NOTES
    assert f"beside {weights / 1e9:.1f} GB of weights" in NOTES
    assert f"the knee is at {dense * (1 + keys / weights):.0f}. DeepSeek-V3" in NOTES

    expert = 3 * deepseek.hidden_size * deepseek.moe_intermediate_size
    layers = deepseek.num_hidden_layers - deepseek.num_dense_layers
    parameters = num_parameters(deepseek)
    active = parameters - layers * (deepseek.num_experts - deepseek.num_experts_per_tok) * expert
    assert f"{active // 10**9} of its {parameters // 10**9} billion" in NOTES
    assert round(parameters / active) == 18
    assert "about eighteen times as far out" in NOTES
    beyond = 5000
    assert beyond < dense * parameters / active < 1.1 * beyond
    assert f"beyond {beyond:,}" in TEXT
    assert f"beyond {beyond:,}" in NOTES


# ---- the script from outside ---------------------------------------------------------------------


def test_quick_run(tmp_path):
    figures = figures_of_quick_run("10", tmp_path, "--prompt", "600")
    chats = figures["chats"]
    assert list(chats) == list(report.QUICK_WAYS)
    assert [record["chat_tokens"] for record in chats.values()] == [0, 4, 4, 4]
    steps = [1, *(lesson.steps_of_a_prompt(600, budget, 4) for budget in (2048, 512, 32))]
    assert [record["steps"] for record in chats.values()] == steps
    assert figures["again"]["chunks"]["64"]["again"] == lesson.keys_read_again(figures["again"]["prompt"], 64)
    tiles = [record["rows"] for record in figures["tiles"].values()]
    assert tiles[0] == tiles[2] < tiles[1]
    gpus, sarathi = figures["gpus"]["gpus"], figures["gpus"]["sarathi"]
    knees = {"L4": 403, "A100-80": 153, "H100": 295, "H200": 206, "B200": 281}
    assert {name: round(gpu["knee"]) for name, gpu in gpus.items()} == knees
    assert gpus["L4"]["budget"] == 0, "an L4 cannot read the weights in 50 ms"
    assert [round(100 * off) for off in sarathi.values()] == [30, 21], "the text says so"


# ---- the exercise --------------------------------------------------------------------------------

test_the_checks_catch = exercise_test("10")
