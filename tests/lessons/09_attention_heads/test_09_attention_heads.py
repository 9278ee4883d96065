"""Lesson 09: its attention and its kernels are the engine's, its numbers are right, its exercise
catches mistakes.
"""

import json
import math
from pathlib import Path

import pytest
import torch
from kernels.harness import assert_close, assert_compiles
from lessons.harness import REPOSITORY, exercise_test, figures_of_quick_run, script_path

from minivllm import LLM, SamplingParams
from minivllm.config import EMBEDDED_MODEL
from minivllm.config.units import GIB
from minivllm.memory import kv_bytes_per_token
from minivllm.models.loader import load_model
from minivllm_lab.attention_heads import absorption, kernel_cases, opening, plan, report
from minivllm_lab.attention_heads.pooled_heads import pooled_checkpoint
from minivllm_lab.checks.kernel_trace import trace_kernel
from minivllm_lab.engines.inside import core_of
from minivllm_lab.exercise import load
from minivllm_lab.pictures.followed import followed
from minivllm_simulate.known_models import known_model
from minivllm_simulate.memory import memory_ledger

lesson = load(script_path("09"))
PAGE = REPOSITORY / "lessons" / "09_attention_heads.md"
TEXT = " ".join(PAGE.read_text().split())
NOTES = (REPOSITORY / "lessons" / "notes" / PAGE.name).read_text()
FORMS = "MHA ", "GQA ", "MQA "

# ---- the kernels ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "part"), [(3, 3, 64, 1), (6, 2, 80, 1), (14, 2, 80, 7), (17, 1, 32, 17)]
)
def test_the_kernel_attends(heads, kv_heads, head_dim, part, device):
    """Whatever part of a group a program takes, the result is the same; a request without tokens
    gets zeros.
    """
    torch.manual_seed(heads)
    case = kernel_cases.head_case(heads, kv_heads, head_dim)
    expected = kernel_cases.one_by_one(lesson.grouped_attention, case)
    assert_close(lesson.decode(*(tensor.to(device) for tensor in case), heads_a_program=part), expected)
    assert not expected[0].any()


@pytest.mark.parametrize("shape", kernel_cases.LATENT_CASES, ids=lambda shape: f"{shape['heads']} heads")
def test_the_kernel_attends_to_latents(shape, device):
    torch.manual_seed(shape["heads"])
    batch = kernel_cases.latent_batch(shape)
    result = lesson.latent_decode(*(tensor.to(device) for tensor in batch))
    assert_close(result, kernel_cases.latents_one_by_one(lesson.absorbed_attention, batch))


def traced(decode, *arguments, **more):
    """Trace the reads and writes of the kernel that a call to the lesson's `decode` launches."""
    traces = []
    decode(*arguments, **more, launch=lambda *call, **constants: traces.append(trace_kernel(*call, **constants)))
    return traces[0]


@pytest.mark.interpreted
def test_the_kernels_read_the_bytes_that_they_say():
    """Each program of a group reads keys and values once, and each program with rows reads a latent
    once, without races.
    """
    lengths = (20, 33)
    case = kernel_cases.head_case(8, 2, 24, lengths)
    for part in (1, 2, 4):
        trace = traced(lesson.decode, *case, heads_a_program=part)
        read = [trace.arguments[name].bytes_read for name in ("keys", "values")]
        assert read == [2 * sum(lengths) * 2 * 24 * 4 // part] * 2
        assert (trace.arguments["q"].bytes_read, trace.bytes_written) == (2 * 2 * 8 * 24, 2 * 2 * 8 * 24)
        assert not trace.out_of_bounds + trace.races
    shape = {"heads": 20, "rank": 32, "rope": 16, "nope": 8, "v": 8}
    for rows, programs in ((16, 2), (32, 1)):
        trace = traced(lesson.latent_decode, *kernel_cases.latent_batch(shape, lengths), rows=rows)
        assert trace.arguments["cache"].bytes_read == 4 * 48 * sum(lengths) * programs
        assert not trace.out_of_bounds + trace.races


def test_the_kernels_compile():
    """They compile with matrix instructions for Llama-3's shape and DeepSeek's: 16 heads in the
    rows, latents of 512 + 64.
    """
    numbers, lengths = torch.zeros(4, 128, dtype=torch.bfloat16), torch.zeros(4, dtype=torch.int32)
    tensors = dict.fromkeys(("out", "q", "keys", "values"), numbers)
    sizes = {"HEADS": 4, "GROUP": 4, "KV_HEADS": 8, "HEAD_DIM": 128, "BLOCK_D": 128, "ROWS": 16, "TILE": 32}
    assert_compiles(
        lesson.decode_kernel, {**tensors, "lengths": lengths, "slots": 4096, "scale": 0.1, **sizes}, tensor_core=True
    )
    latents = dict.fromkeys(("out", "q", "cache"), numbers)
    sizes = {"HEADS": 128, "RANK": 512, "ROPE": 64, "ROWS": 16, "TILE": 32}
    assert_compiles(
        lesson.latent_kernel, {**latents, "lengths": lengths, "slots": 4096, "scale": 0.1, **sizes}, tensor_core=True
    )


# ---- pooled heads --------------------------------------------------------------------------------


def test_pooling_takes_the_mean_of_the_heads_that_it_replaces():
    weight = torch.arange(4 * 2 * 3, dtype=torch.float32).view(8, 3)  # four heads of two rows
    pooled = lesson.pool_heads(weight, 4, 2)
    assert torch.equal(
        pooled, torch.stack([(weight[0:2] + weight[2:4]) / 2, (weight[4:6] + weight[6:8]) / 2]).flatten(0, 1)
    )
    assert torch.equal(lesson.pool_heads(weight, 4, 4), weight)


def test_a_pooled_checkpoint_loads_and_equal_heads_lose_nothing(tmp_path):
    """Pooling heads that are all equal changes no logit."""
    alike = pooled_checkpoint(EMBEDDED_MODEL, tmp_path / "one", 1, lesson.pool_heads)
    doubled = pooled_checkpoint(alike, tmp_path / "two", 1, lambda weight, _kv_heads, _into: weight.repeat(2, 1))
    config = json.loads((doubled / "config.json").read_text())
    (doubled / "config.json").write_text(json.dumps({**config, "num_key_value_heads": 2}))
    again = pooled_checkpoint(doubled, tmp_path / "again", 1, lesson.pool_heads)
    tokens, positions = torch.tensor([5, 300, 7, 41]), torch.arange(4)

    def logits(folder):
        model, config = load_model(folder, "cpu", torch.float32)
        attend = lambda _layer, q, k, v: lesson.grouped_attention(q, k, v)  # noqa: E731
        return config.num_key_value_heads, model.compute_logits(model(tokens, positions, attend))

    with torch.inference_mode():
        (each, first), (two, second), (last, third) = (logits(folder) for folder in (alike, doubled, again))
    assert (each, two, last) == (1, 2, 1)
    assert torch.allclose(first, second, atol=1e-4)
    assert torch.equal(first, third)


# ---- what the text says --------------------------------------------------------------------------


def test_absorption_by_hand():
    """Follow the picture's and the text's example of absorption, with latents of two numbers."""
    latents, w_uk, w_uv, q = map(
        torch.tensor, (absorption.LATENTS, ((1, 0), (1, 1)), ((2, 0), (0, 1)), absorption.QUERY)
    )
    keys, absorbed = latents @ w_uk.T, w_uk.T @ q
    assert keys.tolist() == [list(key) for key in absorption.KEYS]
    assert tuple(absorbed.tolist()) == absorption.ABSORBED_QUERY
    assert (keys @ q).tolist() == (latents @ absorbed).tolist() == list(absorption.SCORES)
    assert f"| key $W^{{UK}}c$, with $W^{{UK}}=((1,0),(1,1))$ | {absorption.KEYS[0]} | {absorption.KEYS[1]} |" in TEXT
    mean = torch.tensor([0.75, 0.25]) @ latents.float()
    assert "=({:g},{:g})$, and so is $W^{{UV}}({:g},{:g})$".format(*w_uv.float() @ mean, *mean) in TEXT


def test_four_heads_by_hand():
    """Follow the text's example of groups."""
    keys, values = torch.zeros(2, 2, 2, 4)
    for token in range(2):
        for kv_head in range(2):
            values[token, kv_head, 2 * kv_head + token] = 1
    keys[:] = 2 * values
    q = torch.tensor([[[1, 0, 0, 0], [0, 1, 0, 0], [0, 0, 1, 0], [0, 0, 1, 1]]], dtype=torch.float32)
    (result,) = lesson.grouped_attention(q, keys, values)
    rows = ["(" + ",".join(f"{number:.3g}" for number in row) + ")" for row in result.tolist()]
    assert f"| result | {' | '.join(rows)} |" in TEXT


def test_the_plan_and_the_task_on_paper():
    """The plan is off by the size of a group; the task's answers are the engine's."""
    model = known_model(plan.MODEL)
    token = kv_bytes_per_token(model, "bfloat16")
    assert f"{token // 1024} KiB a token" in plan.reveal()
    assert f"{8 * token // 1024:,} KiB a token" in plan.bet()
    assert 40 * GIB // (4096 * token) == plan.CHATS == 8 * (40 * GIB // (4096 * 8 * token))
    assert "32 chats need 8 machines" in plan.bet()
    assert "32 chats need 1 machine" in plan.reveal()
    paper = known_model("Qwen3-30B-A3B")
    shape = (
        paper.hidden_size, paper.num_hidden_layers, paper.num_attention_heads, paper.num_key_value_heads, paper.head_dim
    )  # fmt: skip
    assert f"| {' | '.join(map(str, shape))} |" in TEXT
    token = kv_bytes_per_token(paper, "bfloat16")
    assert (token, kv_bytes_per_token(paper, "bfloat16", 8), 24 * GIB // (8192 * token)) == (96 << 10, 24 << 10, 32)
    assert all(words in TEXT for words in ("**96 KiB**", "**32** fit", "**24 KiB**"))


def test_the_log_line_is_what_a_server_would_say():
    ledger = memory_ledger(known_model("Llama-3.1-70B"), "H100", max_model_len=4096, tp=8)
    assert f"Available KV cache memory: {ledger.kv_bytes / GIB:.2f} GiB" in TEXT
    concurrency = f"{ledger.concurrency:.2f}x"
    size = f"{ledger.tokens:,} tokens, Maximum concurrency for 4,096 tokens per request: {concurrency}"
    assert f"GPU KV cache size: {size}" in TEXT
    assert round(ledger.kv_bytes / ledger.tokens / 1024) == 40


def test_the_figures_of_the_text():
    """Count bytes and operations from the models' shapes."""
    deepseek = known_model("DeepSeek-V3")
    names = "Llama-3.1-8B", "Llama-2-7b-hf", "DeepSeek-V3"
    assert [round(lesson.decode_flops_per_byte(known_model(name))) for name in names] == [4, 1, 242]
    heads, rank, rope = deepseek.num_attention_heads, deepseek.kv_lora_rank, deepseek.rotary_dim
    nope, v = deepseek.qk_nope_head_dim, deepseek.v_head_dim
    attended = 2 * heads * (nope + rope + v)
    plain, absorbed = 2 * rank * heads * (nope + v) + attended, 2 * heads * (2 * rank + rope)
    assert (plain, attended, absorbed) == (33_636_352, 81_920, 278_528)
    assert f"{absorbed / attended:.1f} times the work" in TEXT
    assert f"{plain / absorbed:.0f} times the absorbed one's arithmetic" in TEXT
    small = known_model("DeepSeek-V2-Lite")
    shape = {
        "heads": small.num_attention_heads, "rank": small.kv_lora_rank, "rope": small.rotary_dim,
        "nope": small.qk_nope_head_dim, "v": small.v_head_dim,
    }  # fmt: skip
    assert shape == report.DEEPSEEK_V2_LITE


def test_llama_2s_means_are_those_of_the_row_in_the_notes():
    """A single one of table 18's eleven benchmarks may contradict their mean."""
    (row,) = [line for line in NOTES.splitlines() if "30B ablation models" in line]
    scores = {
        form: [float(score) for score in row.split(form)[1].split(";")[0].strip(" |").split(",")] for form in FORMS
    }
    assert {len(each) for each in scores.values()} == {11}
    means = " | ".join(f"{sum(scores[form]) / 11:.1f}" for form in FORMS)
    assert f"mean of all eleven benchmarks | {means} |" in TEXT


def test_the_opening_shows_the_embedded_models_heads():
    """The figure's attention weights are those that the model computes, to two digits."""
    model, config = load_model(EMBEDDED_MODEL, "cpu", torch.float32)
    tokens = torch.tensor([token.id for token in followed().request.prompt])
    shape = (config.num_attention_heads, config.num_key_value_heads, config.head_dim)
    assert shape == (opening.HEADS, opening.KV_HEADS, opening.HEAD_DIM)
    group = config.num_attention_heads // config.num_key_value_heads
    heads = range(opening.KV_HEAD * group, (opening.KV_HEAD + 1) * group)

    def attend(layer, q, k, v):
        if layer == opening.LAYER:
            for head, shown in zip(heads, opening.WEIGHTS, strict=True):
                weights = (k[:, opening.KV_HEAD] @ q[-1, head] * config.head_dim**-0.5).softmax(0)
                assert weights.tolist() == pytest.approx(shown, abs=0.006)
        return lesson.grouped_attention(q, k, v)

    with torch.inference_mode():
        model(tokens, torch.arange(len(tokens)), attend)
    assert len(opening.frames()) == len(opening.CAPTIONS)


def test_the_table_of_siblings_is_what_their_training_recorded():
    """Siblings that keep fewer numbers per token are no better, by the mean of their seeds."""
    record = json.loads((REPOSITORY / "benchmarks" / "results" / "attention_siblings.cpu.json").read_text())["figures"]
    siblings = {name: record[f"tiny-python-{name}"] for name in ("mha", "gqa", "mqa", "mla")}
    shown = NOTES.partition("<!-- siblings -->")[2].splitlines()
    mha = siblings["mha"]["held_out_loss_of_seed"]
    for (name, sibling), line in zip(siblings.items(), shown[3:], strict=False):
        losses = sibling["held_out_loss_of_seed"]
        _, words, kept, parameters, by_seed, above, _ = (cell.strip() for cell in line.split("|"))
        assert words.startswith(name.upper())
        assert kept == str(sibling["cached_numbers_per_token_and_layer"])
        assert parameters == f"{sibling['parameters']:,}"
        assert by_seed == ", ".join(f"{loss:.2f}" for loss in losses.values())
        differences = [loss - mha[seed] for seed, loss in losses.items()]
        if name != "mha":
            mean = sum(differences) / len(differences)
            assert above == f"{mean:+.2f} ({min(differences):+.2f} to {max(differences):+.2f})"
    means = [siblings[name]["held_out_loss_mean"] for name in ("mha", "gqa", "mqa")]
    assert means == sorted(means)
    assert len({sibling["tokens_seen"] for sibling in record.values()}) == 1
    sizes = [sibling["parameters"] for sibling in record.values()]
    assert max(sizes) < 1.001 * min(sizes), "they are compared at the same number of parameters"


# ---- two ranks -----------------------------------------------------------------------------------


def served(model: Path, tp: int) -> tuple[list[list[int]], list[int]]:
    """Return the greedy tokens of an engine with `tp` ranks, and the bytes of each rank's cache."""
    sizes = {"max_model_len": 128, "num_gpu_blocks_override": 32, "tensor_parallel_size": tp}
    llm = LLM(model, device="cpu", dtype="float32", **sizes)
    try:
        params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
        outputs = llm.generate(["def add(a, b):\n    return", "import os\n"], params, use_tqdm=False)
        kept = core_of(llm).executor.collective_rpc("kv_cache_bytes")
    finally:
        llm.shutdown()
    return [list(output.outputs[0].token_ids) for output in outputs], kept


@pytest.mark.usefixtures("warm_processes")
def test_two_ranks_keep_a_single_kv_head_twice(tmp_path):
    """They generate the tokens of one rank, and keep what the lesson's rule says."""
    pooled = pooled_checkpoint(EMBEDDED_MODEL, tmp_path / "pooled", 1, lesson.pool_heads)
    (tokens, (alone,)), (tokens_of_two, kept) = (served(pooled, tp) for tp in (1, 2))
    assert tokens == tokens_of_two
    assert kept == [len(lesson.kv_heads_of_rank(rank, 2, 1)) * alone for rank in range(2)] == [524_288] * 2


# ---- the script from outside ---------------------------------------------------------------------


def test_quick_run(tmp_path):
    figures = figures_of_quick_run("09", tmp_path)
    assert figures["models"]["models"]["Meta-Llama-3-70B"]["kib"] == 320
    assert figures["shared"]["by_kv_heads"]["1"]["less"] == 32
    assert figures["ranks"]["Meta-Llama-3-70B"]["16"] == {"rank": 40, "all": 640}
    pooled = figures["pooled"]
    assert pooled["own"] < pooled["pooled"] < pooled["guess"] == math.log(4096)


# ---- the exercise --------------------------------------------------------------------------------


test_the_checks_catch = exercise_test("09")
