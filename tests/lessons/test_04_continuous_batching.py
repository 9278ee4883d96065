"""Lesson 04: its scheduler is the engine's, its formula is right, its kernel too, its exercise catches mistakes."""

import random

import pytest
import torch
from kernels.harness import assert_close, assert_compiles, reference_attention
from lessons.harness import (
    assert_refuses,
    checks_that_catch,
    figures_of_quick_run,
    script_path,
)

from minivllm.config import EMBEDDED_MODEL, CacheConfig, ModelConfig, SchedulerConfig
from minivllm.errors import MinivllmError
from minivllm.kernels.unified_attention import unified_attention
from minivllm.lab.exercise import checks_of, load
from minivllm.lab.recording import bare_engine, foretell, record_run
from minivllm.models.loader import random_model
from minivllm.simulate.cost_model import FittedCost
from minivllm.simulate.virtual_clock import SimulatedRequest, simulate

lesson = load(script_path("04"))
checks = {check.__name__: check for check in checks_of("04")}


FIXED = FittedCost(per_step=1.0, per_request=0.0, per_token=0.0, per_pair=0.0)


# ---- the slots -------------------------------------------------------------------------------------------------------


def test_the_formula_at_its_ends():
    assert lesson.static_utilization([7] * 10, 64) == pytest.approx(1)
    assert lesson.static_utilization([3, 5, 9], 1) == pytest.approx(1)
    uniform = list(range(1, 513))
    for batch in (2, 4, 8, 16, 64):
        assert lesson.static_utilization(uniform, batch) == pytest.approx((batch + 1) / (2 * batch), abs=0.003)


def test_counts_agree_with_the_formula():
    found = lesson.measure_slots(requests=256, slots=8, seed=0)
    for one in found.values():
        assert one["static"] == pytest.approx(one["formula"], abs=0.05)
        assert one["continuous"] == 1.0, "while somebody waits, no slot is empty"
    released = {"Azure conversation": 0.462, "Azure code": 0.266}  # counted on every request of the files
    for title, share in released.items():
        assert found[title]["theory"]["8"] == pytest.approx(share, abs=0.03)


def test_the_timelines():
    outputs = (3, 14, 5, 8, 12, 4, 6, 2, 9, 5)
    found = lesson.show_timelines(outputs, 4)
    assert found["static"]["steps"] == 14 + 12 + 9
    assert found["continuous"]["steps"] == 20
    for one in found.values():
        rows = one["slots"]
        assert [sum(row.count(chr(65 + i)) for row in rows) for i in range(10)] == list(outputs)
        assert one["used"] == pytest.approx(sum(outputs) / (4 * one["steps"]))


# ---- the kernel ------------------------------------------------------------------------------------------------------

RAGGED = {
    "prefills": ([17, 1, 33, 16], [17, 1, 33, 16]),
    "decodes": ([1, 1, 1, 1], [1, 31, 32, 33]),
    "mixed": ([1, 20, 0, 5, 1], [64, 50, 7, 5, 0 + 1]),
    "one request": ([3], [70]),
    "an empty one at each end": ([0, 4, 0], [0, 9, 12]),
}


def ragged_case(queries, lengths, heads, kv_heads, head_dim, dtype):
    draw = torch.Generator().manual_seed(0)
    q = torch.randn(sum(queries), heads, head_dim, generator=draw).to(dtype)
    k, v = torch.randn(2, sum(lengths), kv_heads, head_dim, generator=draw).to(dtype)
    return q, k, v, lesson.starts(queries), lesson.starts(lengths)


@pytest.mark.parametrize("shape", [(4, 4, 64), (6, 2, 80), (8, 1, 128)], ids=str)
@pytest.mark.parametrize("case", RAGGED)
def test_one_launch_is_the_loop(case, shape, device):
    queries, lengths = RAGGED[case]
    dtype = torch.float16 if shape[2] == 80 else torch.float32
    q, k, v, query_start, key_start = ragged_case(queries, lengths, *shape, dtype)
    found = lesson.ragged_launch(*(x.to(device) for x in (q, k, v, query_start, key_start))).cpu()
    looped = lesson.ragged_attention(q.float(), k.float(), v.float(), query_start, key_start)
    a = c = 0
    for n, length in zip(queries, lengths, strict=True):
        expected = reference_attention(q[a : a + n], k[c : c + length], v[c : c + length], shape[2] ** -0.5)
        assert_close(found[a : a + n], expected)
        assert_close(looped[a : a + n], expected)
        a, c = a + n, c + length


def test_the_lessons_kernel_is_the_engines(device):
    """Contiguous keys are paged ones whose tables count upwards: the engine's kernel gives the same."""
    queries, lengths, block = [5, 1, 16], [21, 40, 16], 16
    q, k, v, query_start, key_start = ragged_case(queries, lengths, 8, 2, 64, torch.float32)
    needed = [-(-length // block) for length in lengths]
    k_cache, v_cache = torch.zeros(2, sum(needed), block, 2, 64)
    table, first = torch.zeros(3, max(needed), dtype=torch.int32), 0
    for row, (count, length) in enumerate(zip(needed, lengths, strict=True)):
        table[row, :count] = torch.arange(first, first + count)
        mine = slice(int(key_start[row]), int(key_start[row]) + length)
        k_cache[first : first + count].view(-1, 2, 64)[:length] = k[mine]
        v_cache[first : first + count].view(-1, 2, 64)[:length] = v[mine]
        first += count
    on = [x.to(device) for x in (q, k_cache, v_cache, query_start, torch.tensor(lengths, dtype=torch.int32), table)]
    engine = unified_attention(*on, 64**-0.5, backend="triton")
    assert_close(lesson.ragged_launch(*(x.to(device) for x in (q, k, v, query_start, key_start))), engine)


@pytest.mark.parametrize(("head_dim", "group"), [(80, 4), (128, 1)])
def test_the_kernel_compiles_everywhere(head_dim, group):
    assert_compiles(
        lesson.ragged_kernel,
        {
            **dict.fromkeys(("out", "q", "keys", "values"), "*bf16"), "query_start": "*i32", "key_start": "*i32",
            "scale": 0.1, "GROUP": group, "KV_HEADS": 8, "HEAD_DIM": head_dim,
            "BLOCK_D": 128, "BLOCK_Q": 16, "BLOCK_T": 32,
        },
        tensor_core=True,
        load_bytes=16,
    )  # fmt: skip


SMALL = ModelConfig(
    num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=16, hidden_size=64,
    intermediate_size=96, vocab_size=256, max_position_embeddings=256, model_type="llama",
)  # fmt: skip


@torch.inference_mode()
def test_requests_in_one_forward_pass_do_not_see_one_another():
    model, sizes = random_model(SMALL, dtype="float32"), [2, 9, 5]

    def forward(lengths):
        layout, positions = lesson.starts(lengths), torch.cat([torch.arange(n) for n in lengths])
        return model(positions, positions, lambda _, q, k, v: lesson.ragged_attention(q, k, v, layout, layout))

    assert_close(forward(sizes), torch.cat([forward([size]) for size in sizes]))


# ---- asynchronous scheduling -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("schedule_ms", "forward_ms"), [(2, 5), (5, 2), (0, 3), (4, 4)])
def test_two_deep_hides_the_shorter_half_if_there_are_placeholders(schedule_ms, forward_ms):
    found = lesson.show_pipelines(schedule_ms, forward_ms, tokens=200)
    alone, blind, overlapped = found.values()
    assert alone["ms_per_token"] == pytest.approx(schedule_ms + forward_ms)
    assert overlapped["ms_per_token"] == pytest.approx(max(schedule_ms, forward_ms), rel=0.02)
    assert (alone["steps"], blind["steps"], overlapped["steps"]) == (200, 200, 200), "no step too many"
    assert (alone["empty"], blind["empty"], overlapped["empty"]) == (0, 200, 0)


# ---- break it, and the engine ----------------------------------------------------------------------------------------


def test_a_budget_below_the_batch_starves_the_last():
    assert list(lesson.starved(5, 20).values()) == [20] * 5 + [0] * 3


def test_the_engine_takes_the_steps_that_the_simulator_takes():
    """Under a tight pool, with preemptions: the same tokens to the same requests in every step."""
    draw = random.Random(1)
    lengths = [(draw.randint(1, 30), draw.randint(1, 20)) for _ in range(10)]
    blocks = CacheConfig(num_gpu_blocks=24, block_size=4, enable_prefix_caching=False)
    limits = {"max_model_len": 64, "max_num_seqs": 6, "max_num_batched_tokens": 24}
    run = record_run(bare_engine(EMBEDDED_MODEL, torch.device("cpu"), blocks, **limits), lengths)
    config = SchedulerConfig(**limits)
    simulated = simulate([SimulatedRequest(*one) for one in lengths], config, blocks, FIXED)
    assert [step.scheduled for step in simulated.steps] == run.scheduled
    assert [step.shape for step in simulated.steps] == [step.shape for step in run.steps]
    assert simulated.num_preemptions == run.num_preemptions > 0
    assert foretell(lengths, run, config, blocks, FIXED) == pytest.approx(len(run.steps) / run.seconds - 1)
    with pytest.raises(MinivllmError, match="other steps"):
        foretell(lengths[1:], run, config, blocks, FIXED)
    assert run.output_tokens == simulated.output_tokens == sum(output for _, output in lengths)


# ---- the exercise ----------------------------------------------------------------------------------------------------

MUTANTS = {
    "forgets who runs": ("schedule", "for request in running: ...", ""),
    "forgets to spend the budget": ("schedule.give", "budget - num_new_tokens", "budget"),
    "postpones a prompt that does not fit": (
        "schedule.give",
        "num_new_tokens > 0",
        "0 < known - request.num_computed_tokens <= budget",
    ),
    "admits for nothing": ("schedule", "waiting and token_budget > 0 and ...", "waiting and ..."),
    "forgets the places": ("schedule", "... and ... and len(running) < max_num_seqs", "... and ..."),
    "one place too many": ("schedule", "len(running) < max_num_seqs", "len(running) <= max_num_seqs"),
    "takes the last to come": ("schedule", "waiting.popleft()", "waiting.pop()"),
    "puts the new ones first": (
        "schedule",
        "running.append(...)\ntoken_budget = give(running[-1], token_budget)",
        "running.insert(0, ...)\ntoken_budget = give(running[0], token_budget)",
    ),
    "does not count at once": ("schedule.give", "request.num_computed_tokens += ...", ""),
    "has a prefill phase": (
        "schedule",
        "for request in running: ...",
        "for request in running if not waiting else []: ...",
    ),
    "lists those who get nothing": ("schedule.give", "num_new_tokens > 0", "num_new_tokens >= 0"),
}


@pytest.mark.parametrize("mistake", MUTANTS)
def test_the_checks_catch(mistake):
    assert checks_that_catch("04", MUTANTS[mistake])


def test_a_wrong_prediction_is_caught():
    right = lesson.first_steps()
    for step, name in ((0, "B"), (1, "C"), (3, "D")):
        wrong = [dict(one) for one in right]
        wrong[step][name] += 1
        with pytest.raises(AssertionError, match=f"step {step + 1}"):
            checks["check_prediction"](type("Learner", (), {"first_steps": staticmethod(lambda wrong=wrong: wrong)}))


# ---- the script from outside -----------------------------------------------------------------------------------------


def test_quick_run(tmp_path):
    figures = figures_of_quick_run("04", tmp_path)
    alone, static, batched, paged = figures["engine"]["ways"].values()
    assert alone["most"] == 1
    assert "max_model_len to 304 or less" in figures["refused"], "19 blocks of 16"
    assert static["most"] == batched["most"] == lesson.RESERVED < paged["most"]
    assert static["steps"] > batched["steps"] > paged["steps"]
    assert figures["engine"]["both"] == pytest.approx(figures["engine"]["batching"] * figures["engine"]["paging"])
    gaps = [one["longest_gap"] for one in figures["long_prompt"].values()]
    assert gaps == sorted(gaps, reverse=True), "a smaller budget, a shorter gap"


@pytest.mark.parametrize(
    ("arguments", "about"),
    [
        (["--slots", "0"], "--slots: must be from 1 to 64"),
        (["--slots", "100000"], "--slots: must be from 1 to 64"),
        (["--requests", "3"], "--requests: must be from 12 to 4096"),
        (["--model", "/no/such/model"], "no model directory"),
        (["--plot", "figure.txt"], "ends in .png or .svg"),
    ],
)
def test_bad_input_is_one_line(arguments, about):
    assert_refuses(lesson, *arguments, about=about)
