"""Lesson 07: its guesses change no token, its rule no distribution; its kernel is right, its checks catch mistakes."""

import numpy as np
import pytest
import torch
from hypothesis import given as drawn
from hypothesis import strategies as st
from kernels.harness import assert_compiles
from lessons.harness import script_path

from minivllm.config import EMBEDDED_DRAFT, EMBEDDED_MODEL, SpeculativeConfig
from minivllm.lab.cached_model import CachedModel
from minivllm.lab.exercise import load
from minivllm.models.loader import load_model
from minivllm.worker.spec_decode.ngram_proposer import NgramProposer

lesson = load(script_path("07"))

# ---- lesson form and engine form -------------------------------------------------------------------------------------


@drawn(
    st.lists(st.integers(0, 3), min_size=1, max_size=40), st.integers(1, 4), st.integers(1, 4), st.integers(1, 5)
)  # fmt: skip
def test_the_proposer_looks_up_what_the_engines_does(token_ids, one, other, k):
    least, most = min(one, other), max(one, other)
    config = SpeculativeConfig(num_speculative_tokens=k, prompt_lookup_max=most, prompt_lookup_min=least)
    engines = NgramProposer(config, max_model_len=1000).drafts_after(np.array(token_ids, np.int32))
    assert lesson.propose_ngram(token_ids, least, most, k) == engines


# ---- the kernel ------------------------------------------------------------------------------------------------------


def batch(requests, k, vocabulary, seed):
    """Random p, q, drafts drawn from q (some of them missing), uniforms and noise, as `rejection_launch` takes them."""
    torch.manual_seed(seed)
    p = torch.randn(requests, k + 1, vocabulary).softmax(-1)
    q = (p[:, :k].log() + torch.randn(requests, k, vocabulary) / 2).softmax(-1)
    drafts = q.flatten(0, 1).multinomial(1).view(requests, k).int()
    present = torch.arange(k) < torch.randint(0, k + 1, (requests, 1)) if requests > 1 else torch.ones(1, k) > 0
    drafts[~present], q[~present] = -1, 0.0
    return p, q, drafts, torch.rand(requests, k), torch.empty_like(p).exponential_()


@pytest.mark.parametrize(("k", "vocabulary"), [(1, 1), (3, 31), (3, 128), (4, 129), (7, 300)])
def test_the_kernel_does_what_the_rule_says(k, vocabulary, device):
    p, q, drafts, uniforms, noise = given = batch(6, k, vocabulary, seed=k)
    found = lesson.rejection_launch(*(one.to(device) for one in given), block=128)
    for i, row in enumerate(found.tolist()):
        theirs = [draft for draft in drafts[i].tolist() if draft >= 0]
        right = lesson.verify(p[i], q[i], theirs, uniforms[i], noise[i])
        assert row == right + [-1] * (k + 1 - len(right))


def test_the_kernels_compile():
    numbers, integers = torch.zeros(4, 4, 128), torch.zeros(4, 4, dtype=torch.int32)
    arguments = {
        "out": integers, "p": numbers, "q": numbers, "draft_token_ids": integers, "uniforms": numbers[0],
        "noise": numbers, "k": 3, "vocab_size": 128, "BLOCK_K": 4, "BLOCK": 1024,
    }  # fmt: skip
    assert_compiles(lesson.rejection_kernel, arguments)


# ---- the loop --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def models():
    """Target and draft, float32."""
    return [load_model(path, "cpu", torch.float32)[0] for path in (EMBEDDED_MODEL, EMBEDDED_DRAFT)]


def no_drafts(_token_ids, _k):
    return [], torch.empty(0)


def test_drafts_change_no_token_and_save_passes(models):
    prompt, runs = list(range(300, 330)) * 2, {}
    draft = lesson.DraftModel(CachedModel(models[1], 256))
    for name, propose in {"none": no_drafts, "n-gram": lesson.Ngram(4096), "draft model": draft}.items():
        target = CachedModel(models[0], 256)
        runs[name] = lesson.generate(target, propose, prompt, 32, 3).tokens, target.passes
    assert runs["n-gram"][0] == runs["draft model"][0] == runs["none"][0]
    assert max(runs["n-gram"][1], runs["draft model"][1]) < runs["none"][1] == 32
