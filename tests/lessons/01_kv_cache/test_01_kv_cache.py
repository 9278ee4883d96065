"""Lesson 01: its numbers are exact, its kernels are right, its exercise catches what people get
wrong.
"""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from kernels.harness import assert_close, assert_compiles
from lessons.harness import REPOSITORY, SMALL, exercise_test, figures_of_quick_run, script_path
from lessons.mistakes import mutants_of

from minivllm import memory
from minivllm.config import EMBEDDED_MODEL, ModelConfig
from minivllm.errors import MinivllmError
from minivllm.models.attention import CausalAttention
from minivllm.models.loader import random_model
from minivllm_lab.checks.mutants import load_mutant
from minivllm_lab.exercise import load, plug_of
from minivllm_lab.kv_cache import cone, opening
from minivllm_lab.kv_cache.race import race
from minivllm_lab.kv_cache.reservation import unused_shares
from minivllm_lab.pictures.followed import followed
from minivllm_simulate.hardware import HARDWARE
from minivllm_simulate.known_models import known_model
from minivllm_simulate.memory import memory_ledger

lesson = load(script_path("01"))
TEXT, NOTES = (
    " ".join((REPOSITORY / "lessons" / name).read_text().split()) for name in ("01_kv_cache.md", "notes/01_kv_cache.md")
)


def attentive_model(config=SMALL):
    """Return random weights large enough that the text depends on what attention sees, and from
    where.
    """
    model = random_model(config, dtype="float32")
    for parameter in model.parameters():
        if parameter.dim() == 2:
            parameter.mul_(10)
    return model


# ---- with and without a cache --------------------------------------------------------------------


def test_a_prompt_may_come_in_parts():
    """Several tokens run at the same time on a cache that is not empty: each sees the cached ones,
    and none after itself.
    """
    model, tokens = attentive_model(), torch.arange(40, 52)
    cache = lesson.KVCache(SMALL, 16, model.embed_tokens.weight)
    parts = []
    for part in (slice(0, 5), slice(5, 11), slice(11, 12)):
        parts.append(model(tokens[part], torch.arange(12)[part], cache.attend))
        cache.length = part.stop
    whole = model(tokens, torch.arange(12), CausalAttention(SMALL))
    assert_close(torch.cat(parts), whole)


def test_the_step_by_hand():
    """The numbers are those that the text derives on paper, including the mistaken ones."""
    keys, values = torch.full((2, 4, 1, 4), torch.nan)
    keys[:2, 0], values[:2, 0] = torch.eye(4)[:2] * 2, torch.eye(4)[:2]
    q, k, v = torch.tensor([[0.0, 1, 0, 0], [1, 0, 2, 0]]), torch.eye(4)[2:3] * 2, torch.eye(4)[2:3]
    step = lesson.decode_step(q, k, v, keys, values, 2)
    without_itself = lesson.attention(q[None], keys[:2], values[:2], first=2)[0]
    unscaled = lesson.attention(2 * q[None], keys[:3], values[:3], first=2)[0]
    for result, numbers in (
        (step[0], "(0.212, 0.576, 0.212, 0)"),
        (step[1], "(0.245, 0.090, 0.665, 0)"),
        (without_itself[0], "(0.269, 0.731, 0, 0)"),
        (unscaled[1], "(0.117, 0.016, 0.867, 0)"),
    ):
        assert numbers in TEXT + NOTES
        by_hand = [float(number) for number in numbers.strip("()").split(",")]
        assert result.tolist() == pytest.approx(by_hand, abs=5e-4)


# ---- bytes per token -----------------------------------------------------------------------------


def test_the_cache_really_takes_that_many_bytes():
    cache = lesson.KVCache(SMALL, 32, torch.empty(0, dtype=torch.float16))
    assert cache.keys.nbytes + cache.values.nbytes == 32 * lesson.kv_bytes_per_token(SMALL)


# ---- kernels -------------------------------------------------------------------------------------


def test_the_scripts_own_proof_holds(device):
    """It compares with float64; `test_every_lesson.py` has the exercise's checks of `append_kernel`."""
    assert lesson.verify_kernels(device)["largest_error"] < 2e-3


@pytest.mark.parametrize("large", [1e4, -1e4])
def test_decode_attention_survives_large_scores(large, device):
    """One key outweighs all others: exp must not overflow, and the answer is that key's value."""
    keys, values = torch.randn(2, 1, 210, 1, 64, device=device)
    keys[:, 200:] = values[:, 200:] = torch.nan  # slots without a token
    keys[0, 70], q = large, torch.full((1, 1, 64), 1.0 if large > 0 else -1.0, device=device)
    length = torch.tensor([199], dtype=torch.int32, device=device)
    assert_close(lesson.decode_batch(q, q, q, keys, values, length)[0, 0], values[0, 70, 0])


@pytest.mark.parametrize(("head_dim", "group"), [(64, 8), (80, 4), (128, 1)])
def test_decode_kernel_compiles_everywhere(head_dim, group):
    pointers = dict.fromkeys(("out", "q", "keys", "values"), "*bf16")
    assert_compiles(
        lesson.decode_kernel,
        {
            **pointers, "lengths": "*i32", "slots": 2048, "scale": 0.1, "GROUP": group, "KV_HEADS": 8,
            "HEAD_DIM": head_dim, "BLOCK_D": 64 if head_dim == 64 else 128, "BLOCK_T": lesson.BLOCK_T,
        },
        load_bytes=16,
    )  # fmt: skip


def test_append_kernel_compiles_everywhere():
    pointers = dict.fromkeys(("keys", "values", "k", "v"), "*bf16")
    sizes = {"lengths": "*i32", "slots": 2048, "WIDTH": 4096, "BLOCK": 4096}
    assert_compiles(lesson.append_kernel, {**pointers, **sizes}, load_bytes=16)


# ---- the ledger ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def reserved():
    """Return the shares of reserved slots that stay empty, by kind of request, as in the lesson's
    table.
    """
    return unused_shares((2048, 4096, 8192))


def test_replay_counts_only_requests_that_fit(reserved):
    assert set(reserved["alpaca"]["unused"]) == {"2048", "4096", "8192"}
    for name, share in (("sharegpt", 0.756), ("alpaca", 0.962)):  # 1 - mean / 2048, by the paper's means
        assert reserved[name]["unused"]["2048"] == pytest.approx(share, abs=0.01)
    for kind in reserved.values():
        assert sorted(kind["unused"].values()) == list(kind["unused"].values()), "longer slots waste more"
    shares = [kind["unused"]["2048"] for kind in reserved.values()]
    assert f"Between {min(shares):.0%} and".replace("%", "") in TEXT
    assert f"and {max(shares):.0%} of the reserved slots".replace("%", " %") in TEXT


@pytest.mark.parametrize(
    ("name", "counted"), [("azure-conversation", [0.518, 0.731, 0.833]), ("azure-code", [0.581, 0.658, 0.747])]
)
def test_the_replay_is_near_the_released_trace(reserved, name, counted):
    """`counted` was computed on all requests of the Azure files themselves."""
    assert list(reserved[name]["unused"].values()) == pytest.approx(counted, abs=0.05)


# ---- the exercise --------------------------------------------------------------------------------


test_the_checks_catch = exercise_test("01")


def test_the_pool_is_as_large_as_the_learner_counts():
    """Counting query heads leaves room for a quarter of the requests: the embedded model has 8 on 2
    KV heads.
    """
    wrong = load_mutant(script_path("01"), mutants_of("01")["counts the query heads"])
    plug = plug_of("01")
    blocks = [plug(module).engine_args["num_gpu_blocks_override"] - 1 for module in (lesson, wrong)]
    assert blocks == [4, 1]
    assert plug(wrong).ours["num_gpu_blocks_override"] == 5


# ---- the script from outside ---------------------------------------------------------------------


def test_numbers_of_the_text(reserved):
    """The lesson says in words: 14 requests, 4 %, 379; how the card's memory is shared out; and 3
    requests of 8,192 slots.
    """
    config = known_model("Llama-3.1-8B")
    ledger = memory_ledger(config, "L4", max_model_len=2048)
    card = lesson.break_it(ledger, config, reserved)
    assert card["running"] == 14
    assert sum(card["memory"].values()) == ledger.device.memory_bytes
    assert f"{card['alpaca']['used']:.0%}" == "4%"
    assert f"the card would hold {card['alpaca']['unreserved']}, not 14" in TEXT
    weights, *step, cache = (card["memory"][row.name] / 2**30 for row in ledger.rows[:5])
    usable, server = ledger.device.memory_bytes / 2**30, weights + sum(step) + cache
    for words, gib in (
        ("usable, of the 24 GB on the box", usable),
        (f"the server takes {server / usable:.0%} (`--gpu-memory-utilization`)", server),
        ("less the weights", weights),
        ("less what the largest step needs, and [CUDA graphs](GLOSSARY.md#cuda-graph), estimated", sum(step)),
        ("left for the cache", cache),
    ):
        assert f"| {words} | {gib:.1f} |".replace("%", " %") in TEXT
    assert f"At 128 KiB a token, that is {ledger.tokens:,} tokens, or 14 regions" in TEXT
    assert memory_ledger(config, "L4", max_model_len=8192).longest_request // 8192 == 3
    with pytest.raises(MinivllmError) as refusal:
        memory_ledger(config, "L4")
    assert str(refusal.value) in TEXT
    cached = 64 * memory.kv_bytes_per_token(config, "bfloat16") / card["memory"]["weights and rotary table"]
    assert 100 * cached < 0.06, "hardly"
    assert 2048 * cached == pytest.approx(1, abs=0.1), "twice as much"


def test_the_ridges_of_the_text():
    assert f"While an H100 reads a byte it can do {HARDWARE['H100'].ridge():.0f} operations" in TEXT
    assert f"rises to the ridge at {HARDWARE['H100'].ridge():.0f} operations a byte" in TEXT
    assert f"an H200 ({HARDWARE['H200'].ridge():.0f})" in NOTES


def test_the_intensity_of_latent_attention():
    config = known_model("DeepSeek-V3")
    latent, rope = config.kv_lora_rank, config.qk_rope_head_dim
    operations = config.num_attention_heads * 2 * (latent + rope + latent)
    assert f"{operations:,} operations for {2 * (latent + rope):,} bytes" in NOTES
    assert f"bytes, {operations / (2 * (latent + rope)):.0f} a byte" in NOTES


def test_the_followed_request_of_the_text():
    run = followed()
    lengths = [step.rows[0].seq_len for step in run.steps]
    assert (len(run.request.prompt), len(run.request.output)) == (9, 6)
    passes = f"{sum(lengths)} *token passes* through the model, with one only {lengths[-1]}."
    assert f"Without a cache this request takes {passes}" in TEXT
    assert memory.kv_bytes_per_token(ModelConfig.from_pretrained(EMBEDDED_MODEL), "bfloat16") == 1024


def test_quick_run(tmp_path):
    figures = figures_of_quick_run("01", tmp_path)
    run = figures["generation"]
    prompt, new = run["prompt_tokens"], run["new_tokens"]
    assert run["token_passes_without"] == new * prompt + new * (new - 1) // 2
    assert run["token_passes_with"] == prompt + new - 1
    assert figures["intensity"]["cache_group_4"]["intensity"] == 4 * figures["intensity"]["cache_group_1"]["intensity"]
    assert figures["bytes_per_token"]["Llama-3.1-8B"] == 131072


# ---- the pictures and the race -------------------------------------------------------------------


def test_the_pictures_show_what_the_ledger_and_the_data_sheet_say(reserved):
    ledger = memory_ledger(known_model("Llama-3.1-8B"), "L4", max_model_len=2048)
    running = ledger.longest_request // 2048
    fitting = int(ledger.tokens / (2048 * (1 - reserved["alpaca"]["unused"]["2048"])))
    drawn = opening.stills()
    assert f"{running} requests" in drawn["bet"]
    assert "4% of the cache" in drawn["reveal"]
    assert f"{fitting} requests fit" in drawn["reveal"]
    assert f"{fitting} such requests would fit" in TEXT
    assert f"ridge: {HARDWARE['H100'].ridge():.0f}" in drawn["roofline"]


def test_the_cone_holds_what_a_key_depends_on():
    """The model confirms the blue cells: a token in the cone changes the key, one outside does not."""
    config = replace(SMALL, num_hidden_layers=3)
    model, tokens = attentive_model(config), torch.arange(5, 14)

    def key_of_layer_3(tokens):
        cache = lesson.KVCache(config, len(tokens), model.embed_tokens.weight)
        model(tokens, torch.arange(len(tokens)), cache.attend)
        return cache.keys[2, cone.KEY]

    for position in range(len(tokens)):
        other = tokens.index_fill(0, torch.tensor(position), 90)
        differs = (key_of_layer_3(other) - key_of_layer_3(tokens)).abs().max() > 1e-3
        assert bool(differs) == (position <= cone.KEY)


def written(text, seconds):
    """Yield a generation of `text`, each of whose steps took `seconds`."""
    result = lesson.Generation([], 0, [])
    for letter in text:
        result.tokens.append(ord(letter))
        result.seconds.append(seconds)
        yield result


def test_at_any_moment_of_the_race_both_have_had_the_same_time(capsys):
    letters = SimpleNamespace(decode=lambda tokens: "".join(map(chr, tokens)))
    slow, fast = race(written("abcdef", 3.0), written("abcdef", 1.0), letters)
    assert slow.tokens == fast.tokens
    out = capsys.readouterr().out
    assert "6 tokens in 6.0 s, done" in out
    assert "2 tokens in 6.0 s, writing" in out
    assert "in 18.0 s without a cache, in 6.0 s with one" in out
