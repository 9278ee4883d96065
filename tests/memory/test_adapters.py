"""The size of an adapter, counted by hand and in the file that is written."""

import pytest
from refusals import assert_refused
from safetensors.torch import load_file

from minivllm.config import EMBEDDED_MODEL, EMBEDDED_SIBLINGS, ModelConfig
from minivllm.memory.adapters import ATTENTION_LINEARS, linear_shapes
from minivllm_lab.multi_lora.adapters import WEIGHTS_FILE, write_random_adapters
from minivllm_simulate.known_models import known_model
from minivllm_simulate.memory.adapters import adapter_bytes, adapter_parameters


def test_the_published_size():
    """Rank 16 on all linears of Llama-3-8B takes 84 MB in bf16."""
    assert adapter_bytes(known_model("Meta-Llama-3-8B"), 16) == 83_886_080


@pytest.mark.parametrize("model", ["Qwen3-0.6B", "Qwen2.5-0.5B", "Llama-3.2-1B"])
def test_shapes_are_those_of_the_models_linears(model: str):
    """Together, the heads need not be as wide as the model (Qwen3)."""
    config = known_model(model)
    shapes = linear_shapes(config)
    assert shapes["q_proj"] == (config.num_attention_heads * config.head_dim, config.hidden_size)
    assert shapes["o_proj"] == shapes["q_proj"][::-1]
    assert shapes["down_proj"] == shapes["up_proj"][::-1] == (config.hidden_size, config.intermediate_size)


@pytest.mark.parametrize("targets", [("q_proj",), ATTENTION_LINEARS])
def test_the_file_has_as_many_numbers(targets, tmp_path):
    (folder,) = write_random_adapters(tmp_path, 1, rank=4, targets=targets)
    stored = load_file(folder / WEIGHTS_FILE)
    config = ModelConfig.from_pretrained(EMBEDDED_MODEL)
    assert sum(tensor.numel() for tensor in stored.values()) == adapter_parameters(config, 4, targets)


def test_what_cannot_be_counted_is_refused():
    config = known_model("Llama-3.1-8B")
    for wrong, about in (((config, 0), "rank"), ((config, 8, ("lm_head",)), "lm_head")):
        assert_refused(about, adapter_parameters, *wrong)
    assert_refused("ordinary attention", adapter_parameters, ModelConfig.from_pretrained(EMBEDDED_SIBLINGS["mla"]), 8)
