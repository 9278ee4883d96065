"""Test what an adapter's folder may hold, and what is refused in one line."""

import json
import math
import os
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from refusals import assert_refused
from safetensors.torch import save, save_file

from minivllm.config import EMBEDDED_MODEL, ModelConfig
from minivllm.core.lora_request import LoRARequest
from minivllm.errors import MinivllmError
from minivllm.lora.lora_model import fingerprint_of, read_adapter
from minivllm.lora.peft_helper import PEFTHelper
from minivllm.lora.request import LoRARequest as UnderVLLMsName
from minivllm.memory.adapters import linear_shapes

LEAST = {"r": 4, "lora_alpha": 8}
MODULE = "model.layers.0.self_attn.q_proj"


def helper(**settings) -> PEFTHelper:
    return PEFTHelper.from_dict(LEAST | settings, Path("folder"), 64)


def shape_of(module):
    """Return the shape of a projection of the embedded model."""
    config = ModelConfig.from_pretrained(EMBEDDED_MODEL)
    layer, projection = module
    return tuple(reversed(linear_shapes(config)[projection])) if layer < config.num_hidden_layers else None


def written(folder: Path, tensors: dict[str, torch.Tensor], **settings) -> Path:
    (folder / "adapter_config.json").write_text(json.dumps(LEAST | settings))
    save_file(tensors, folder / "adapter_model.safetensors")
    return folder


def pair(layer: int = 0, projection: str = "q_proj", rank: int = 4) -> dict[str, torch.Tensor]:
    inputs, outputs = shape_of((0, projection))
    where = "mlp" if projection in ("gate_proj", "up_proj", "down_proj") else "self_attn"
    name = f"base_model.model.model.layers.{layer}.{where}.{projection}"
    return {f"{name}.lora_A.weight": torch.randn(rank, inputs), f"{name}.lora_B.weight": torch.randn(outputs, rank)}


def test_the_name_is_vllms():
    assert UnderVLLMsName is LoRARequest


NO_REQUESTS = [
    ("", 1, "p"), ("a", 1, ""), ("a", 0, "p"), ("a", True, "p"), (None, 1, "p"), ("\ud800", 1, "p"),
    ("a", 1, "\udcff"),
]  # fmt: skip


@pytest.mark.parametrize("arguments", NO_REQUESTS)
def test_a_request_needs_a_name_a_number_and_a_path(arguments):
    assert_refused("", LoRARequest, *arguments)


def test_the_scale_is_alpha_over_the_rank_or_its_root():
    assert helper().scale_of(MODULE, 4) == 2
    assert helper(use_rslora=True).scale_of(MODULE, 4) == 4
    by_module = helper(alpha_pattern={"0.self_attn.q_proj": 3}, use_rslora=True)
    assert by_module.scale_of(MODULE, 16) == 3 / math.sqrt(16)
    assert by_module.scale_of(MODULE.replace(".0.", ".10."), 4) == 4, "a name ends behind a dot"
    assert helper(alpha_pattern={"q_proj": 2, MODULE: 9}).scale_of(MODULE, 1) == 2, "the first one counts"
    assert helper(alpha_pattern={"^q_proj": 2, f"^{MODULE}": 9}).scale_of(MODULE, 1) == 9


NOT_SERVED = [
    ({"r": 128}, "rank 128.*max_lora_rank 64"), ({"r": 0}, "whole number"), ({"r": True}, "whole number"),
    ({"r": 8.0}, "whole number"), ({"use_rslora": "false"}, "use_rslora.*True or False"),
    ({"lora_alpha": "16"}, "lora_alpha"), ({"lora_alpha": math.inf}, "lora_alpha"),
    ({"alpha_pattern": {"(a+)+$": 4}}, "name of a module.*regular expressions are not evaluated"),
    ({"alpha_pattern": {r"layers\.\d+\.q_proj": 4}}, "regular expressions are not evaluated"),
    ({"alpha_pattern": {"q_proj": "x"}}, "numbers by the name"),
    ({"alpha_pattern": ["q_proj"]}, "numbers by the name"), ({"bias": "lora_only"}, "bias 'lora_only'"),
    ({"lora_bias": True}, "lora_bias"), ({"use_dora": True}, "use_dora"),
    ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
    ({"layer_replication": [[0, 4], [2, 5]]}, "layer_replication"),
    ({"init_lora_weights": "pissa_niter_4"}, "init_lora_weights"),
    ({"init_lora_weights": "olora"}, "init_lora_weights"),
    ({"alora_invocation_tokens": [1]}, "alora_invocation_tokens"), ({"use_qalora": True}, "use_qalora"),
    ({"peft_type": "LOHA"}, "peft_type"), ({"target_parameters": ["experts"]}, "target_parameters"),
]  # fmt: skip


@pytest.mark.parametrize(("settings", "message"), NOT_SERVED)
def test_what_is_not_served_is_refused_in_one_line(settings, message):
    assert_refused(message, helper, **settings)


def test_what_changes_nothing_is_taken():
    helper(target_modules="all-linear", init_lora_weights="gaussian", bias="none", modules_to_save=[], loftq_config={})
    helper(target_modules=r".*\.(q|v)_proj")


@pytest.mark.parametrize("missing", LEAST)
def test_a_config_names_what_it_lacks(missing):
    given = {key: LEAST[key] for key in LEAST if key != missing}
    assert_refused(f"lacks {missing};", PEFTHelper.from_dict, given, Path("folder"), 64)


@settings(max_examples=30, deadline=None)
@given(
    st.dictionaries(
        st.sampled_from([*LEAST, "rank_pattern", "alpha_pattern", "bias", "use_rslora", "init_lora_weights"]),
        st.recursive(
            st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
            lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=5), inner, max_size=2),
            max_leaves=4,
        ),
    )
)
def test_any_config_is_taken_or_refused(config):
    try:
        result = PEFTHelper.from_dict(LEAST | config, Path("folder"), 64)
    except MinivllmError:
        return
    assert 1 <= result.r <= 64
    assert isinstance(result.scale_of(MODULE, 9), float)


def test_ranks_by_regular_expressions_are_read_as_peft_has_them(tmp_path):
    import peft
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(EMBEDDED_MODEL, dtype=torch.float32)
    patterns = {r".*layers\.[13]\..*q_proj": 2, "v_proj": 3, r"^model\.layers\.(0|2)\.mlp\.up_proj": 5}
    config = peft.LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj", "up_proj"], rank_pattern=patterns)
    adapted = peft.get_peft_model(model, config)
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_B" in name:
                parameter.normal_()
    adapted.save_pretrained(tmp_path)
    pairs = read_adapter(tmp_path, 16, shape_of)
    assert {len(pair.lora_a) for pair in pairs.values()} == {2, 3, 4, 5}
    for (layer, projection), ours in pairs.items():
        where = "mlp" if projection == "up_proj" else "self_attn"
        module = adapted.get_submodule(f"base_model.model.model.layers.{layer}.{where}.{projection}")
        torch.testing.assert_close(ours.lora_b @ ours.lora_a, module.get_delta_weight("default"))


def test_what_was_read_does_not_change_with_its_file(tmp_path):
    """Safetensors maps a file: tensors that were not copied change with it, and kill the process
    once it is truncated.
    """
    first, second = pair(), pair()
    pairs = read_adapter(written(tmp_path, first), 16, shape_of)
    before = fingerprint_of(pairs, torch.float32)
    with (tmp_path / "adapter_model.safetensors").open("r+b") as file:
        file.write(save(second))
    assert torch.equal(pairs[0, "q_proj"].lora_a, next(iter(first.values())))
    other = read_adapter(tmp_path, 16, shape_of)
    assert fingerprint_of(pairs, torch.float32) == before != fingerprint_of(other, torch.float32)


def test_a_fingerprint_is_of_the_numbers_and_of_where_they_belong(tmp_path):
    tensors = pair()
    elsewhere = {name.replace("layers.0", "layers.1"): tensor for name, tensor in tensors.items()}
    cases = (tensors, {}), (elsewhere, {}), (tensors, {"lora_alpha": 9}), (tensors, {"bias": "none"})
    wholes = [read_adapter(written(tmp_path, case, **settings), 16, shape_of) for case, settings in cases]
    first, moved, scaled, as_the_first = (fingerprint_of(whole, torch.float32) for whole in wholes)
    assert len({first, moved, scaled, fingerprint_of(wholes[0], torch.bfloat16)}) == 4
    assert first == as_the_first


def test_a_pickle_is_named_and_not_opened(tmp_path):
    written(tmp_path, pair())
    (tmp_path / "adapter_model.safetensors").rename(tmp_path / "adapter_model.bin")
    assert_refused(r"adapter_model\.bin is a pickle", read_adapter, tmp_path, 16, shape_of)


def test_files_that_cannot_be_looked_at_or_opened_are_no_adapter(tmp_path, monkeypatch):
    """The refusal is one line; any other exception would end a step."""
    assert_refused("no adapter", read_adapter, tmp_path / ("x" * 300), 16, shape_of)

    def denied(*arguments, **named):
        raise PermissionError(13, "Permission denied")

    folder = written(tmp_path, pair())
    with monkeypatch.context() as patch:
        patch.setattr("safetensors.safe_open", denied)
        assert_refused("cannot be read as safetensors.*Permission denied", read_adapter, folder, 16, shape_of)
    os.truncate(folder / "adapter_model.safetensors", 300)
    assert_refused("cannot be read as safetensors", read_adapter, folder, 16, shape_of)
    (folder / "adapter_config.json").write_text("{")
    assert_refused("adapter_config.json", read_adapter, folder, 16, shape_of)


WRONG = {
    "a layer too many": (lambda: pair(layer=99), "layer that the model does not have"),
    "only one of two": (lambda: dict(list(pair().items())[:1]), "only lora_. of q_proj in layer 0"),
    "embeddings": (lambda: {"base_model.model.model.embed_tokens.lora_embedding_A": torch.ones(4, 4)}, "embed_tokens"),
    "the head": (lambda: {"base_model.model.lm_head.lora_A.weight": torch.ones(4, 4)}, "lm_head"),
    "a magnitude": (
        lambda: {"base_model.model.model.layers.0.self_attn.q_proj.lora_magnitude_vector": torch.ones(4)},
        "magnitude",
    ),
    "another rank": (lambda: pair(rank=5), r"\[5, .*\[4, "),
    "NaN": (lambda: {name: tensor * torch.nan for name, tensor in pair().items()}, "NaN or infinity"),
    "integers": (lambda: {name: tensor.int() for name, tensor in pair().items()}, "int32"),
    "nothing": (dict, "no tensors"),
}


def test_where_the_tensors_tell_the_ranks_both_have_one_and_a_slot_has_room_for_it(tmp_path):
    told = {"rank_pattern": {".*_proj": 3}}
    tensors = {name: (pair(rank=3) if "lora_A" in name else pair(rank=4))[name] for name in pair()}
    assert_refused(r", 4\].*, 3\]", read_adapter, written(tmp_path, tensors, **told), 16, shape_of)
    folder = written(tmp_path, pair(rank=17), **told)
    assert_refused("rank 17 .* greater than max_lora_rank 16", read_adapter, folder, 16, shape_of)
    assert_refused(r"\[0, ", read_adapter, written(tmp_path, pair(rank=0), **told), 16, shape_of)


@pytest.mark.parametrize("case", WRONG)
def test_tensors_that_do_not_fit_are_named(tmp_path, case):
    make, message = WRONG[case]
    assert_refused(message, read_adapter, written(tmp_path, make()), 16, shape_of)


def test_a_scale_beyond_fp32_is_refused(tmp_path):
    folder = written(tmp_path, pair(), lora_alpha=1e300)
    assert_refused("lora_alpha", read_adapter, folder, 16, shape_of)
