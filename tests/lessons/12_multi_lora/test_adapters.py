"""Random adapters depend on their seed, are in PEFT's format, and merge as PEFT merges them."""

import json

import pytest
import torch

from minivllm.config import EMBEDDED_DRAFT, EMBEDDED_MODEL, ModelConfig
from minivllm_lab.multi_lora import adapters

CONFIG = ModelConfig.from_pretrained(EMBEDDED_MODEL)


def test_an_adapter_depends_on_its_seed_alone(tmp_path):
    few = adapters.write_random_adapters(tmp_path / "few", 2, rank=4, seed=5)
    many = adapters.write_random_adapters(tmp_path / "many", 5, rank=4, seed=5)
    assert [path.name for path in many] == [f"adapter-{index:04d}" for index in range(5)]
    assert json.loads((many[0] / adapters.CONFIG_FILE).read_text())["r"] == 4
    for each, another in zip(few, many, strict=False):
        ours, theirs = adapters.read_adapter(each)[1], adapters.read_adapter(another)[1]
        assert ours.keys() == theirs.keys()
        assert all(torch.equal(ours[key], theirs[key]) for key in ours)
    first, third = (adapters.read_adapter(many[index])[1] for index in (0, 2))
    assert not any(torch.equal(first[key], third[key]) for key in first)


def test_keys_and_shapes_are_pefts():
    tensors = adapters.random_adapter(CONFIG, 8, targets=("q_proj", "down_proj"), dtype="float32")
    name = "base_model.model.model.layers.3.mlp.down_proj.lora_A.weight"
    assert adapters.peft_key(3, "down_proj", "A") == name
    assert tensors[name].shape == (8, CONFIG.intermediate_size)
    assert tensors["base_model.model.model.layers.0.self_attn.q_proj.lora_B.weight"].shape == (256, 8)
    assert len(tensors) == 2 * 2 * CONFIG.num_hidden_layers
    assert {tensor.dtype for tensor in tensors.values()} == {torch.float32}


@pytest.mark.parametrize("rank", [1, 8, 64])
def test_strength_is_how_much_is_added(rank: int):
    tensors = adapters.random_adapter(CONFIG, rank, seed=rank, targets=("gate_proj",), dtype="float32", strength=0.25)
    a, b = (tensors[adapters.peft_key(0, "gate_proj", matrix)] for matrix in "AB")
    x = torch.randn(256, CONFIG.hidden_size, generator=torch.Generator().manual_seed(0))
    added = (x @ a.T @ b.T).square().mean().sqrt() / x.square().mean().sqrt()
    assert added == pytest.approx(0.25, rel=0.5 if rank == 1 else 0.15)


@pytest.mark.parametrize("more", [{}, {"use_rslora": True}], ids=str)
def test_peft_reads_what_is_written_and_merges_alike(more: dict, tmp_path):
    import peft
    from transformers import AutoModelForCausalLM

    targets = ("q_proj", "up_proj")
    tensors = adapters.random_adapter(ModelConfig.from_pretrained(EMBEDDED_DRAFT), 4, targets=targets)
    folder = adapters.write_adapter(tmp_path / "one", tensors, 4, 8.0, targets, "draft", **more)
    base, merged = (AutoModelForCausalLM.from_pretrained(EMBEDDED_DRAFT, dtype=torch.float32) for _ in range(2))
    theirs = peft.PeftModel.from_pretrained(base, folder).merge_and_unload()
    adapters.merge_adapter(merged, folder)
    for name, weight in theirs.named_parameters():
        torch.testing.assert_close(merged.get_parameter(name), weight)
