"""The EAGLE-3 head: what it computes, which checkpoints it takes, and what its training script
makes.
"""

import json
import shutil

import pytest
import torch
from refusals import assert_refused
from safetensors.torch import load_file, save_file

from minivllm.config import EMBEDDED_DRAFT, EMBEDDED_EAGLE3, EMBEDDED_MODEL, ModelConfig
from minivllm.errors import MinivllmError, UnsupportedModelError
from minivllm.models.attention import CausalAttention
from minivllm.models.eagle3 import Eagle3Config, load_eagle3
from minivllm.models.loader import load_model

PLACES, FIRST = 12, 5


@pytest.fixture(scope="module")
def target():
    return load_model(EMBEDDED_MODEL, dtype="float32")[0]


@pytest.fixture(scope="module")
def script(load_script):
    return load_script("train_eagle3")


def changed_head(directory, config=(), **tensors):
    """Write the embedded head with changed settings and tensors; None leaves a tensor out."""
    contents = json.loads((EMBEDDED_EAGLE3 / "config.json").read_text()) | dict(config)
    (directory / "config.json").write_text(json.dumps(contents))
    stored = load_file(EMBEDDED_EAGLE3 / "model.safetensors") | tensors
    save_file({name: tensor for name, tensor in stored.items() if tensor is not None}, directory / "model.safetensors")
    return directory


class GrowingAttention:
    """Attention of one sequence over all keys so far, the last of which can be dropped."""

    def __init__(self, config):
        self.attention, self.keys, self.values = CausalAttention(config), [], []

    def __call__(self, layer, q, k, v):
        self.keys, self.values = [*self.keys, *k], [*self.values, *v]
        missing = q.new_zeros(len(self.keys) - len(q), *q.shape[1:])
        whole = self.attention(layer, torch.cat((missing, q)), torch.stack(self.keys), torch.stack(self.values))
        return whole[len(missing) :]

    def keep(self, places):
        del self.keys[places:], self.values[places:]


@torch.inference_mode()
def test_drafting_step_by_step_is_what_was_trained_all_at_once(target, script):
    """Compare three drafts from each position, over a cache, with the unrolled form with dense
    attention.
    """
    head = load_eagle3(EMBEDDED_EAGLE3, target)
    plain = script.Head(json.loads((EMBEDDED_MODEL / "config.json").read_text()))
    plain.load_state_dict(load_file(EMBEDDED_EAGLE3 / "model.safetensors"))
    features = torch.randn(PLACES, 3 * 256, generator=torch.Generator().manual_seed(0))
    following = torch.arange(100, 100 + PLACES)  # the token after each place
    expected = plain.unrolled(features[None], target.embed_tokens(following)[None], FIRST)

    attention, places = GrowingAttention(head.config), torch.arange(PLACES)
    for place in range(PLACES):
        mine = slice(place, place + 1)
        attention.keep(place)
        normed, hidden = head(following[mine], places[mine], head.combine_hidden_states(features[mine]), attention)
        for step, of_step in enumerate(expected):
            at = slice(place + step, place + step + 1)
            if step:
                if at.stop > PLACES:
                    break
                normed, hidden = head(following[at], places[at], hidden, attention)
            index = place + step - (PLACES - of_step.shape[1])
            if index >= 0 and place + step >= FIRST:
                torch.testing.assert_close(normed[0], of_step[0, index], atol=2e-5, rtol=1e-4)


@torch.inference_mode()
def test_only_the_rows_asked_for_are_drafted_after_and_what_is_given_stays(target):
    head = load_eagle3(EMBEDDED_EAGLE3, target)
    ids, hidden = torch.arange(6), torch.randn(6, 256, generator=torch.Generator().manual_seed(0))
    arguments = hidden.clone()
    every, every_hidden = head(ids, ids, hidden, CausalAttention(head.config))
    some, some_hidden = head(ids, ids, hidden, CausalAttention(head.config), torch.tensor([2, 5]))
    torch.testing.assert_close(some, every[[2, 5]], atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(some_hidden, every_hidden[[2, 5]], atol=1e-4, rtol=1e-4)
    assert torch.equal(hidden, arguments)


@torch.inference_mode()
def test_a_head_of_its_own_vocabulary_drafts_the_targets_ids(target, tmp_path):
    kept = torch.tensor([7, 9, 4000])
    rows = target.embed_tokens.weight[kept]
    tensors = {"lm_head.weight": rows.clone(), "d2t": kept - torch.arange(3), "t2d": torch.zeros(4096).bool()}
    small = load_eagle3(changed_head(tmp_path, {"draft_vocab_size": 3}, **tensors), target)
    hidden = torch.randn(4, 256)
    whole = load_eagle3(EMBEDDED_EAGLE3, target).compute_logits(hidden)
    logits = small.compute_logits(hidden)
    assert logits.shape == whole.shape
    torch.testing.assert_close(logits[:, kept], whole[:, kept], atol=1e-4, rtol=1e-4)
    assert logits.isfinite().sum() == 4 * 3


D2T = torch.zeros(8, dtype=torch.int64)
LM_HEAD = torch.zeros(8, 256)


UNFIT = [
    ({}, {"fc.weight": torch.zeros(256, 512)}, r"'fc.weight' .* \(256, 512\), but the config needs \(256, 768"),
    ({}, {"midlayer.self_attn.k_proj.weight": torch.zeros(64, 256)}, r"k_proj.weight' .* config needs \(64, 512"),
    ({}, {"norm.weight": None}, r"lacks 1 of the model's 12 tensors, such as norm.weight"),
    ({}, {"layers.1.norm.weight": torch.zeros(1)}, r"'layers.1.norm.weight' that this model does not have"),
    ({}, {"d2t": D2T}, r"has a tensor 'd2t', though draft_vocab_size is the target's vocab_size \(4096\)"),
    ({"draft_vocab_size": 8}, {"lm_head.weight": LM_HEAD}, r"lacks 'd2t', .* drafts 8 of 4096"),
    ({"draft_vocab_size": 8}, {"d2t": D2T}, r"lacks 'lm_head.weight', .* drafts 8 of 4096"),
    ({"draft_vocab_size": 8}, {"lm_head.weight": LM_HEAD, "d2t": D2T[:3]}, r"one integer for each of 8 tokens"),
    ({"draft_vocab_size": 8}, {"lm_head.weight": LM_HEAD, "d2t": D2T - 1}, r"different tokens from 0 to 4095"),
]  # fmt: skip


@pytest.mark.parametrize(("config", "tensors", "message"), UNFIT)
def test_a_checkpoint_that_does_not_fit_is_refused_by_name(target, tmp_path, config, tensors, message):
    assert_refused(message, load_eagle3, changed_head(tmp_path, config, **tensors), target)


OTHER_HEADS = [
    ({"hidden_size": 128}, MinivllmError, "hidden_size is 128, but the target's is 256"),
    ({"vocab_size": 100}, MinivllmError, "vocab_size is 100, but the target's is 4096"),
    ({"draft_vocab_size": 5000}, MinivllmError, "draft_vocab_size is 5000; .* from 1 to 4096"),
    ({"eagle_aux_hidden_state_layer_ids": [1, 2]}, MinivllmError, r"is \[1, 2\]; it must list 3 different layers"),
    ({"eagle_aux_hidden_state_layer_ids": None}, MinivllmError, r"is \[2, 2, 1\]; .* each from 0 to 3"),
    ({"eagle_aux_hidden_state_layer_ids": [1, 2, 4]}, MinivllmError, "each from 0 to 3"),
    ({"num_hidden_layers": 2}, UnsupportedModelError, "the head has 2 layers"),
    ({"norm_before_fc": True}, UnsupportedModelError, "the head has norm_before_fc=True"),
]


@pytest.mark.parametrize(("changes", "kind", "message"), OTHER_HEADS)
def test_a_config_of_another_head_is_refused(changes, kind, message):
    contents = json.loads((EMBEDDED_EAGLE3 / "config.json").read_text())
    config = ModelConfig.from_pretrained(EMBEDDED_MODEL)
    assert Eagle3Config.from_dict(contents, config).aux_layer_ids == (1, 2, 3)
    with pytest.raises(kind, match=message):
        Eagle3Config.from_dict(contents | changes, config)
    with pytest.raises(UnsupportedModelError, match=r"tiny-python-draft: LlamaForCausalLM is not an EAGLE-3 head"):
        Eagle3Config.from_pretrained(EMBEDDED_DRAFT, config)


def hasty(build_optimizers):
    """Let Muon orthogonalize its matrices in one step instead of five, which took half of the test."""

    def build(*arguments):
        muon, *others = build_optimizers(*arguments)
        muon.param_groups[0]["ns_steps"] = 1
        return [muon, *others]

    return build


def test_the_script_trains_a_head_that_loads(target, script, tmp_path, monkeypatch):
    """It goes on from the head that comes with the repository."""
    shutil.copytree(EMBEDDED_EAGLE3, tmp_path, dirs_exist_ok=True)
    before = json.loads((tmp_path / "training.json").read_text())
    monkeypatch.setattr(script, "NEW_TOKENS", 12)
    monkeypatch.setattr(script, "BATCH_ROWS", 4)
    monkeypatch.setattr(script, "build_optimizers", hasty(script.build_optimizers))
    script.main(["--quick", "--resume", "--seed", "1", "--out", str(tmp_path)])
    facts = json.loads((tmp_path / "training.json").read_text())
    assert facts["parameters"] == sum(parameter.numel() for parameter in load_eagle3(tmp_path, target).parameters())
    assert facts["batches"] == before["batches"] + 2
    assert facts["seeds"] == [*before["seeds"], 1]
    assert 1 <= facts["mean_acceptance_length"] <= 4
