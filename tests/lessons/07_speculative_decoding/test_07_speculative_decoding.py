"""Lesson 07: its guesses change no token, its rule changes no distribution; its kernel is right,
its checks catch mistakes.
"""

import re
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from kernels.harness import assert_compiles
from lessons.harness import REPOSITORY, exercise_test, figures_of_quick_run, script_path
from refusals import assert_refused

from minivllm import LLM, SamplingParams
from minivllm.config import EMBEDDED_MODEL
from minivllm.kernels.rejection_arguments import RejectionArguments
from minivllm.models.loader import load_model
from minivllm_lab.checks.kernel_trace import trace_kernel
from minivllm_lab.checks.plugged import serve
from minivllm_lab.exercise import load, plug_of
from minivllm_lab.speculative_decoding import exactness, opening, pictures, report
from minivllm_lab.speculative_decoding.cached_model import CachedModel
from minivllm_lab.speculative_decoding.learner_policy import rejection_of
from minivllm_lab.speculative_decoding.speculation import RECORDED, draft_model, eagle_head
from minivllm_simulate.hardware import get_hardware
from minivllm_simulate.known_models import known_model

lesson = load(script_path("07"))
TEXT = (REPOSITORY / "lessons" / "07_speculative_decoding.md").read_text()
NOTES = (REPOSITORY / "lessons" / "notes" / "07_speculative_decoding.md").read_text()

# ---- the kernels ---------------------------------------------------------------------------------


@pytest.mark.parametrize("vocabulary", [1, 127, 129])
@pytest.mark.parametrize("counts", [[1], [0, 0], [3, 0, 1, 3, 2], [7, 4]], ids=str)
def test_the_kernels_do_what_the_rule_says(counts, vocabulary, device):
    torch.manual_seed(vocabulary)
    arguments = exactness.draft_batch(counts, vocabulary)
    arguments[2][1:2] = -1
    result = lesson.rejection_launch(*(argument.to(device) for argument in arguments), block=128)
    assert result.tolist() == exactness.verified_one_by_one(lesson.verify, arguments)


@pytest.mark.interpreted
def test_the_kernels_read_the_bytes_that_they_say():
    counts, vocabulary, k = [2, 0, 3], 200, 3
    p, q, drafts, starts, uniforms, noise = exactness.draft_batch(counts, vocabulary)
    q_row = torch.tensor([0, 1, -1, -1, 2, 3, 4, -1], dtype=torch.int32)
    instead, output = torch.empty(8, dtype=torch.int32), torch.empty(3, k + 1, dtype=torch.int32)
    race = trace_kernel(lesson.recover_kernel, 8, instead, p, q, noise, q_row, vocabulary, BLOCK=128)
    assert [race.arguments[name].bytes_read for name in ("p", "q", "noise")] == [6400, 4000, 6400]
    assert race.bytes_read == (12 * 5 + 8 * 3) * vocabulary + 4 * 8
    trace = trace_kernel(
        lesson.rejection_kernel, 3, output, drafts, instead, p, q, uniforms, starts, k + 1, vocabulary, BLOCK=4
    )
    assert trace.bytes_read == 16 * 5 + 12 * 3
    assert trace.bytes_written == 4 * (k + 1) * 3
    for item in (race, trace):
        assert not item.out_of_bounds + item.races


def test_the_kernels_compile():
    integers, numbers = torch.zeros(4, dtype=torch.int32), torch.zeros(4, 128)
    shared = {"instead": integers, "p": numbers, "q": numbers, "vocab_size": 128}
    rejection = {"output": integers, "drafts": integers, "uniforms": numbers[0], "draft_start": integers, "width": 4}
    assert_compiles(lesson.rejection_kernel, {**shared, **rejection, "BLOCK": 4})
    assert_compiles(lesson.recover_kernel, {**shared, "noise": numbers, "q_row": integers, "BLOCK": 1024})


# ---- the loop ------------------------------------------------------------------------------------


def test_the_engine_counts_the_same():
    """The lesson's loop and the engine generate the same tokens and accept as many drafts, position
    by position.
    """
    (prompt,) = report.held_out_prompts(str(EMBEDDED_MODEL), 1)
    model, _ = load_model(EMBEDDED_MODEL, "cpu", torch.float32)
    ours = lesson.generate(CachedModel(model, 256), lesson.Ngram(4096), prompt, 48, 3)
    settings = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1, "prompt_lookup_max": 3}
    sizes = {"max_model_len": 256, "num_gpu_blocks_override": 40}
    llm = LLM(EMBEDDED_MODEL, device="cpu", dtype="float32", speculative_config=settings, **sizes)
    params = SamplingParams(temperature=0.0, max_tokens=48, ignore_eos=True)
    (output,) = llm.generate([{"prompt_token_ids": prompt}], params, use_tqdm=False)
    assert output.outputs[0].token_ids == ours.tokens
    assert llm.llm_engine.stats.spec_decoding_stats == ours.stats


class OnlyPositions:
    """A target that counts to three, whatever it reads: guesses behind a wrong one are right."""

    length = passes = 0

    def forward(self, token_ids):
        before, self.length = self.length, self.length + len(token_ids)
        self.passes += 1
        return torch.eye(3)[torch.arange(before + 1, self.length + 1) % 3]


def test_jacobi_passes_its_last_guesses_again():
    result = lesson.jacobi(OnlyPositions(), [0, 1, 2], 8, 3)
    assert result.tokens == [0, 1, 2, 0, 1, 2, 0, 1]
    assert (result.passes, result.stats.num_accepted_tokens) == (3, 5)


# ---- the rule ------------------------------------------------------------------------------------


def test_the_rule_is_exact_and_its_look_alikes_are_caught():
    rounds = 3_000
    result = exactness.try_rules(lesson.RULES, rounds, seed=1)
    rules = result["rules"]
    exact = rules.pop("the rule")
    assert exact["p"] > 0.01
    assert all(rule["p"] < 1e-3 for rule in rules.values()), rules
    off = (result["sum_min"] * (1 - result["sum_min"]) / rounds) ** 0.5
    assert exact["accepted"] == pytest.approx(result["sum_min"], abs=3 * off)


# ---- what the text says --------------------------------------------------------------------------


def test_break_even_is_where_the_speed_up_falls_below_one():
    assert report.break_even({1: 2.0, 16: 1.5, 64: 0.5}) == pytest.approx(32)
    assert report.break_even({1: 2.0, 64: 1.0}) is None
    assert report.break_even({1: 0.9, 8: 0.8}) is None


P, Q = np.array(pictures.TARGET), np.array(pictures.GUESSED)
KEPT = np.minimum(P, Q).sum()


def test_the_cell_that_draws_prints_what_the_page_shows(capsys):
    """The shares that the text quotes come out of its cell, and are near the model's."""
    cell, shown = re.findall(r"```python exec\n(import random\n.*?)```\n\n```text\n(.*?)```", TEXT, re.DOTALL)[0]
    exec(cell, {})
    printed = capsys.readouterr().out
    assert printed == shown
    *lines, accepted = printed.splitlines()
    for line, p in zip(lines, P, strict=True):
        assert float(line.split()[-1]) == pytest.approx(p, abs=0.015)
    assert float(accepted.split()[-1]) == pytest.approx(KEPT, abs=0.015)


def test_a_wrong_replacement_by_hand():
    """The text bets on how often `*` comes out if a rejected draft is replaced from p; the notes offer only `*`."""
    assert f"**{np.minimum(P, Q)[2] + (1 - KEPT) * P[2]:.2f}**: the 0.2 that are accepted" in TEXT
    assert f"`*` comes out in {P[2] + (1 - Q[2]) * P[2]:.2f} of all cases" in NOTES


def test_each_row_of_the_tree_sees_its_branch():
    """Drafts follow the node before them, their chances multiply, and the accepted path is a branch."""
    for node, (token, parent, _) in enumerate(pictures.NODES):
        assert parent < node
        if parent == 0:
            assert pictures.CHANCES[node] == Q[pictures.TOKENS.index(token)]
        elif parent > 0:
            assert pictures.CHANCES[node] < pictures.CHANCES[parent]
    assert pictures.NODES[pictures.SAMPLED[1]][1] == pictures.SAMPLED[0]
    assert all(f">{token}<" in pictures.tree() for token, _, _ in pictures.NODES)


def test_tokens_and_cost_by_hand():
    assert lesson.expected_tokens(0.7, 3) == pytest.approx((1 - 0.7**4) / (1 - 0.7))
    assert lesson.expected_tokens(1.0, 3) == 4
    assert lesson.speed_up(0.5, 1, draft_cost=0.5) == pytest.approx(1.0), "it pays only if alpha exceeds c"
    assert lesson.speed_up(0.6, 3, draft_cost=0.1) == pytest.approx(1.67, abs=0.005)
    assert lesson.speed_up(0.6, 3, 0, verify_cost=4) == pytest.approx(0.55, abs=0.01)


def test_counts_and_formula_by_hand():
    """The text quotes vLLM's counters, also in the widget, as vLLM logs them, the rates that follow,
    and what the formula gives from the first. For the draft model the formula is nearly right.
    """
    lookup, model = RECORDED["ngram"], RECORDED["draft_model"]
    shares = ", ".join(f"{count / lookup.drafts:.3f}" for count in lookup.accepted)
    assert f"Mean acceptance length: {1 + sum(lookup.accepted) / lookup.drafts:.2f}, …" in TEXT
    assert f"Per-position acceptance rate: {shares}, …" in TEXT
    for number in (*map("{:.2f}".format, lookup.rates), f"{lesson.expected_tokens(lookup.rates[0], 3):.2f}"):
        assert number in TEXT
    counted = 1 + sum(model.accepted) / model.drafts
    assert (
        f"on the same texts, {lesson.expected_tokens(model.rates[0], 3):.2f} by the formula, {counted:.2f} counted."
        in TEXT
    )


def test_the_opening_shows_drafts_that_fail_that_stand_and_that_stand_in_part(capfd):
    """Both guessers give the request's tokens, and no log line comes between picture and reader."""
    opening.recorded.cache_clear()
    looked_up, drafted = opening.recorded(), opening.recorded("draft_model")
    tokens = [[token.id for step in steps for token in step.kept] for steps in (looked_up, drafted)]
    assert tokens[0] == tokens[1]
    assert {step.num_accepted for step in looked_up if len(step.drafts) == 3} == {0, 3}
    assert {step.num_accepted for step in drafted if len(step.drafts) == 3} == {0, 1, 2, 3}
    assert f"27 tokens in {len(looked_up)} passes" in opening.frames().captions[-1]
    assert f"27 tokens in {len(looked_up)} passes" in TEXT
    assert "".join(capfd.readouterr()) == ""


def test_the_memory_of_guessers_is_counted():
    """The notes' table of guessers gives gigabytes and KiB per token for Llama-3.1-8B."""
    target, gpu = known_model("Llama-3.1-8B"), get_hardware("H100")
    head, small = eagle_head(target, gpu), draft_model(known_model("Llama-3.2-1B"), gpu)
    assert f"{head.weight_bytes / 1e9:.2f} GB, {head.kv_bytes_per_token // 1024} KiB a token" in NOTES
    assert f"{small.weight_bytes / 1e9:.1f} GB, {small.kv_bytes_per_token // 1024} KiB a token: Llama-3.2-1B" in NOTES
    assert f"{2 * target.hidden_size * (target.hidden_size + target.vocab_size) / 1e9:.1f} GB each head" in NOTES


def test_what_lesson_01_measured_is_what_it_says():
    first = " ".join((REPOSITORY / "lessons" / "01_kv_cache.md").read_text().split())
    ((many, alone),) = re.findall(r"takes ([\d.]+) ms a step for 64 sequences and ([\d.]+) ms for one", first)
    assert float(alone) < float(many) < 2 * float(alone)
    assert "in lesson 01, 64 sequences took less than twice one's time." in " ".join(TEXT.split())


# ---- the script from outside ---------------------------------------------------------------------


def test_quick_run(tmp_path):
    figures = figures_of_quick_run("07", tmp_path)
    family = figures["family"]
    assert family["no drafts"]["tokens_per_pass"] == 1
    assert min(family[name]["tokens_per_pass"] for name in ("n-gram", "draft model")) > 1.2
    assert all(figures["length"] <= 4 for figures in family.values())
    assert 4096 in figures["kernel"]["vocabularies"]
    for figure in figures["batches"]["batches"].values():
        assert figure["same"] == 1.0
        assert figure["predicted"] == pytest.approx(figure["free"] / figure["cost"])
        assert 1.2 < figure["length"] < 3.6
    kept, likeliest = (figures["temperature"][name] for name in ("kept", "likeliest"))
    assert kept["0.0"] == likeliest["0.0"], "greedy, both are how often the two agree"
    assert kept["1.5"] > likeliest["1.5"]


# ---- the exercise --------------------------------------------------------------------------------


test_the_checks_catch = exercise_test("07")


def test_drafts_that_were_not_asked_for_are_told():
    plugged = plug_of("07")(SimpleNamespace(propose_ngram=lambda tokens, low, high, k: [1] * 9, verify=None))
    assert_refused("9 drafts, but at most 3 are allowed", serve, plugged, plugged.parts)


def test_the_learners_verdict_is_that_of_the_engine():
    """A random request gets each token as often as the model says."""
    verify = rejection_of(lesson.verify)
    requests, p, q = 1500, torch.tensor([0.25, 0.45, 0.2, 0.1]), torch.tensor([0.7, 0.1, 0.1, 0.1])
    draws = torch.multinomial(q, requests, replacement=True, generator=torch.Generator().manual_seed(0)).int()
    keys = torch.randint(-(2**31), 2**31, (2 * requests, 2), generator=torch.Generator().manual_seed(1)).int()
    random, first = torch.zeros(requests, dtype=torch.bool), torch.ones(requests, dtype=torch.int32)
    for drawn_from, drafts in ((q.log().expand(requests, -1), draws), (None, draws), (None, -torch.ones_like(draws))):
        table = verify(RejectionArguments(p.log().expand(2 * requests, -1), drafts, first, drawn_from, random, keys))
        result = torch.bincount(table[:, 0], minlength=4) / requests
        assert torch.allclose(result, p, atol=0.04)
