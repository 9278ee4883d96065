"""Parameters of language models, and of the towers beside them: counted in full, or
refused by name.
"""

import json

import pytest
import torch
from refusals import assert_refused
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, AutoModelForImageTextToText

from minivllm.config import ModelConfig
from minivllm.config.units import GIB
from minivllm.errors import UnsupportedModelError
from minivllm_simulate.known_models import HYBRIDS, known_model
from minivllm_simulate.memory import memory_ledger, num_parameters, parameter_groups, routed_parameters, weight_bytes
from minivllm_simulate.memory.adapters import adapter_bytes

TEXT = {
    "vocab_size": 96, "hidden_size": 64, "intermediate_size": 80, "num_hidden_layers": 8, "num_attention_heads": 4,
    "num_key_value_heads": 2,
}  # fmt: skip
GDN = {
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 8,
}  # fmt: skip
EXPERTS = {"num_experts": 4, "moe_intermediate_size": 48}
SHARED = {**EXPERTS, "shared_expert_intermediate_size": 40}
TEXTS = {
    "gemma": {}, "gemma2": {}, "gemma3_text": {}, "gpt_oss": {"num_local_experts": 4},
    "qwen3_next": {**GDN, **SHARED}, "qwen3_5_text": GDN, "qwen3_5_moe_text": {**GDN, **SHARED},
}  # fmt: skip


def stored(auto, config):
    with torch.device("meta"):
        return sum(parameter.numel() for parameter in auto.from_config(config).parameters())


@pytest.mark.parametrize("model_type", TEXTS)
@pytest.mark.parametrize("head_dim", [16, 24])
def test_language_models_have_the_parameters_of_transformers(model_type, head_dim):
    config = CONFIG_MAPPING[model_type](**TEXT, head_dim=head_dim, **TEXTS[model_type])
    assert num_parameters(config.to_dict()) == stored(AutoModelForCausalLM, config)


@pytest.mark.parametrize("tied", [False, True])
def test_gemma_3_has_the_parameters_of_transformers(tied):
    tower = {
        "model_type": "siglip_vision_model", "vision_use_head": False, "hidden_size": 32, "intermediate_size": 72,
        "num_hidden_layers": 3, "num_attention_heads": 2, "image_size": 56, "patch_size": 14,
    }  # fmt: skip
    text = {"model_type": "gemma3_text", **TEXT, "head_dim": 16, "tie_word_embeddings": tied}
    config = CONFIG_MAPPING["gemma3"](text_config=text, vision_config=tower, tie_word_embeddings=tied)
    assert num_parameters(config.to_dict()) == stored(AutoModelForImageTextToText, config)


@pytest.mark.parametrize(
    ("name", "billions"),  # arXiv 2508.10925, table 1; huggingface.co pages of the others, rounded
    [("gpt-oss-20b", 20.91), ("gpt-oss-120b", 116.83), ("gemma-3-4b-it", 4.30), ("gemma-3-27b-it", 27.43)],
)
def test_published_parameters(name, billions):
    assert num_parameters(known_model(name)) / 1e9 == pytest.approx(billions, abs=0.005)


@pytest.mark.parametrize(("name", "billions"), [("gpt-oss-20b", 3.61), ("gpt-oss-120b", 5.13)])  # the same table
def test_published_parameters_that_a_token_passes(name, billions):
    """OpenAI's count excludes the embedding."""
    model = known_model(name)
    resting = routed_parameters(model) * (1 - model.num_experts_per_tok / model.num_experts)
    passed = num_parameters(model) - resting - parameter_groups(model)["embedding"]
    assert passed / 1e9 == pytest.approx(billions, abs=0.005)


@pytest.mark.parametrize(("name", "gib"), [("gpt-oss-20b", 12.8), ("gpt-oss-120b", 60.8)])  # arXiv 2508.10925, table 1
def test_checkpoints_in_mxfp4(name, gib):
    assert weight_bytes(known_model(name)) / GIB == pytest.approx(gib, abs=0.05)


def test_an_adapter_has_the_published_size():
    """Rank 16 on all linears of Llama-3-8B takes 84 MB in bf16."""
    assert adapter_bytes(known_model("Meta-Llama-3-8B"), 16) == 83_886_080


def test_weights_equal_a_start_up_log():
    """vLLM 0.19.0 logs "Model loading took 51.45 GiB" for gemma-3-27b-it, including what its
    kernels keep beside the weights.
    """
    assert 51.45 * 0.99 < weight_bytes(known_model("gemma-3-27b-it")) / GIB < 51.45


UNCOUNTED = [
    ({"model_type": "llava", "vision_config": {"model_type": "clip_vision_model"}}, "llava.*vision_config"),
    ({"model_type": "gemma3", "vision_config": {"model_type": "brand_new"}}, "gemma3.*vision_config"),
    ({"model_type": "qwen2_audio", "audio_config": {"model_type": "qwen2_audio_encoder"}}, "audio_config"),
    ({"model_type": "both", "vision_config": {"x": 1}, "audio_config": {"x": 1}}, "vision_config and audio_config"),
]


@pytest.mark.parametrize(("outer", "named"), UNCOUNTED)
def test_parts_that_are_not_counted_are_refused_by_name(outer, named):
    model = {**outer, "text_config": {"model_type": "llama", **TEXT}}
    with pytest.raises(UnsupportedModelError, match=named) as refused:
        weight_bytes(model)
    assert "give the size of all weights" in str(refused.value)
    assert memory_ledger(model, "L4", max_model_len=100, weights=GIB).rows[0].bytes == GIB


def test_a_checkpoint_at_hand_says_its_size(tmp_path):
    model = {"model_type": "got_ocr2", "dtype": "bfloat16", "vision_config": {"model_type": "x"}}
    (tmp_path / "config.json").write_text(json.dumps({**model, "text_config": {"model_type": "qwen2", **TEXT}}))
    with pytest.raises(UnsupportedModelError):
        weight_bytes(ModelConfig.from_pretrained(tmp_path))
    header = b'{"a":{"dtype":"BF16","shape":[50],"data_offsets":[0,100]}}'
    (tmp_path / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(100))
    config = ModelConfig.from_pretrained(tmp_path)
    assert weight_bytes(config) == 100
    assert_refused("", weight_bytes, config, tp=2)
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {"total_size": 12345}}))
    assert weight_bytes(ModelConfig.from_pretrained(tmp_path)) == 12345


def test_a_tower_is_divided_over_gpus():
    whole, half = (parameter_groups(ModelConfig.from_dict(HYBRIDS["google/gemma-3-4b-it"]), tp) for tp in (1, 2))
    assert whole["vision"] / 2 < half["vision"] < whole["vision"]
