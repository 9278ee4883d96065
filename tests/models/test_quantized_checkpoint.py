"""Quantized checkpoints: the model computes with the numbers that GPTQ's definition says they
hold.
"""

import json

import pytest
import torch
from refusals import assert_refused
from safetensors.torch import load_file, save_file

from minivllm import LLM
from minivllm.config import EMBEDDED_MODEL, ModelConfig
from minivllm.errors import UnsupportedModelError
from minivllm.kernels.packed_weights import dequantize_weight
from minivllm.models.attention import CausalAttention
from minivllm.models.decoder import Decoder
from minivllm.models.linear import Linear, UnquantizedLinearMethod, weight_bytes
from minivllm.models.loader import SINGLE_FILE, checkpoint_slots, load_model, random_model
from minivllm.models.parallel import GroupCoordinator
from minivllm.models.quantized import QuantizedLinearMethod
from minivllm.models.quantized_checkpoint import packed_format
from minivllm_lab.engines.inside import core_of, runner_of

HF = json.loads((EMBEDDED_MODEL / "config.json").read_text())
HF = {**HF, "num_hidden_layers": 2, "dtype": "float32"}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 16, "sym": True, "desc_act": False}
LAYERS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def as_int32(stored: torch.Tensor, bits: int) -> torch.Tensor:
    """Pack unsigned integers [rows, n] along n into int32 [rows, n × bits / 32], one number at a
    time.
    """
    count = 32 // bits
    words = torch.zeros(len(stored), stored.shape[1] // count, dtype=torch.int64)
    for place in range(count):
        words |= stored[:, place::count].long() << (bits * place)
    return torch.where(words >= 2**31, words - 2**32, words).to(torch.int32)


class Source:
    """A small checkpoint: embedded weights, rounded here, as `numbers`; and each linear's
    integers and scales.
    """

    def __init__(self, bits: int, group_size: int):
        self.bits, self.group_size = bits, group_size
        stored = load_file(EMBEDDED_MODEL / SINGLE_FILE)
        self.others = {name: tensor.float() for name, tensor in stored.items() if "layers" not in name}
        self.linears, self.numbers = {}, dict(self.others)
        for name, tensor in stored.items():
            if not name.startswith(("model.layers.0.", "model.layers.1.")):
                continue
            linear = name.removesuffix(".weight")
            if not linear.endswith(LAYERS):
                self.others[name] = self.numbers[name] = tensor.float()
                continue
            rows, width = tensor.shape
            group = width if group_size == -1 else group_size
            grouped, half = tensor.float().view(rows, -1, group), 2 ** (bits - 1)
            scales = (grouped.abs().amax(-1) / (half - 0.5)).half().float()
            integers = (grouped / scales[..., None]).round().clamp(-half, half - 1)
            self.linears[linear] = integers.view(rows, width).long(), scales
            self.numbers[name] = (integers * scales[..., None]).view(rows, width)

    def gptq(self, zero_off: int = 1) -> dict[str, torch.Tensor]:
        tensors, middle = dict(self.others), 2 ** (self.bits - 1)
        for linear, (integers, scales) in self.linears.items():
            rows, width = integers.shape
            zeros = torch.full((scales.shape[1], rows), middle - zero_off)
            group = width if self.group_size == -1 else self.group_size
            tensors |= {
                f"{linear}.qweight": as_int32(integers + middle, self.bits).T.contiguous(),
                f"{linear}.scales": scales.half().T.contiguous(),
                f"{linear}.qzeros": as_int32(zeros, self.bits),
                f"{linear}.g_idx": torch.tensor([place // group for place in range(width)], dtype=torch.int32),
            }
        return tensors


def write(directory, tensors, quantization_config):
    config = {**HF, "quantization_config": quantization_config}
    (directory / "config.json").write_text(json.dumps(config))
    save_file(tensors, directory / SINGLE_FILE)
    return directory


def gptq_config(source: Source):
    return {**GPTQ, "bits": source.bits, "group_size": source.group_size}


@torch.inference_mode()
def logits(model):
    ids = (torch.arange(40) * 7 + 5) % 900
    return model.compute_logits(model(ids, torch.arange(40), CausalAttention(model.config)))


def plain_model(source: Source) -> Decoder:
    """Make an ordinary model from the numbers that the checkpoint stands for."""
    model = random_model(ModelConfig.from_dict(HF))
    slots = checkpoint_slots(model)
    assert slots.keys() == source.numbers.keys()
    for name, slot in slots.items():
        slot.fill(source.numbers[name])
    return model


@pytest.mark.parametrize(("bits", "group_size"), [(4, 16), (4, -1), (8, 16), (8, -1)])
def test_a_checkpoint_holds_what_its_definition_says(tmp_path, bits, group_size):
    source = Source(bits, group_size)
    expected = logits(plain_model(source))
    for zero_off in (1, 0):  # of GPTQ's first format, and of its second
        model, _ = load_model(write(tmp_path, source.gptq(zero_off), gptq_config(source)))
        linears = [module for module in model.layers.modules() if isinstance(module, Linear)]
        assert len(linears) == 2 * 4
        assert all(isinstance(linear.method, QuantizedLinearMethod) for linear in linears)
        assert torch.allclose(logits(model), expected, atol=2e-4)


def test_the_engine_runs_one_and_counts_its_bytes(tmp_path):
    source = Source(4, 16)
    directory = write(tmp_path, source.gptq(), gptq_config(source))
    settings = {"device": "cpu", "skip_tokenizer_init": True, "max_model_len": 64}
    quantized = LLM(directory, **settings)
    core = core_of(quantized)
    linears = sum(integers.numel() // 2 + 4 * scales.numel() for integers, scales in source.linears.values())
    held = sum(p.nbytes for p in runner_of(core).model.layers.parameters() if p.ndim == 2)
    assert held == linears
    assert next(row.bytes for row in core.ledger.rows if "weights" in row.name) == weight_bytes(runner_of(core).model)
    assert_refused(r"gptq.*int8.*quantization", LLM, directory, **settings, quantization="int8")
    assert LLM(directory, **settings, load_format="dummy").generate([[1, 2, 3]])[0].outputs[0].token_ids


def test_what_tools_add_is_passed_over(tmp_path):
    source = Source(4, 16)
    tensors = source.gptq()
    tensors |= {f"{linear}.bias": torch.zeros(len(integers)) for linear, (integers, _) in source.linears.items()}
    model, _ = load_model(write(tmp_path, tensors, gptq_config(source)))
    assert torch.allclose(logits(model), logits(plain_model(source)), atol=2e-4)
    tensors["model.layers.0.mlp.up_proj.bias"] += 1
    assert_refused(r"up_proj\.bias", load_model, write(tmp_path, tensors, gptq_config(source)))


CHECKPOINTS = [{**GPTQ, "bits": bits, "group_size": size} for bits, size in ((4, 16), (4, 64), (8, -1))]
DIVIDED = [(688, "int8", None), (704, "int4", None), *((704, None, checkpoint) for checkpoint in CHECKPOINTS)]


@pytest.mark.parametrize(("width", "quantization", "checkpoint"), DIVIDED)
def test_ranks_have_the_scales_of_whole_rows(width, quantization, checkpoint):
    """Each of four ranks has 176 of 704 weights, and the pieces of a divided group keep its scale."""
    config = ModelConfig.from_dict({**HF, "intermediate_size": width, "quantization_config": checkpoint})
    whole = random_model(config, seed=1, quantization=quantization).layers[0]

    def numbers(layer, name):
        linear = layer.get_submodule(name)
        return dequantize_weight(linear.packed, linear.scales)

    for size in (2, 4):
        groups = [GroupCoordinator(rank, size) for rank in range(size)]
        parts = [random_model(config, seed=1, group=group, quantization=quantization).layers[0] for group in groups]
        for name in ("self_attn.o_proj", "mlp.down_proj"):
            assert torch.equal(torch.cat([numbers(part, name) for part in parts], dim=1), numbers(whole, name))
        if quantization == "int8":
            assert all(torch.equal(part.mlp.down_proj.scales, whole.mlp.down_proj.scales) for part in parts)
        halves = [numbers(part, "mlp.gate_up_proj").chunk(2) for part in parts]
        together = torch.cat([*(half[0] for half in halves), *(half[1] for half in halves)])
        assert torch.equal(together, numbers(whole, "mlp.gate_up_proj"))


def config_with(quantization_config) -> ModelConfig:
    return ModelConfig.from_dict({**HF, "quantization_config": quantization_config})


NOT_COMPUTED = [
    ({"quant_method": "awq", "bits": 4}, "'awq'"),
    ({"quant_method": "fp8"}, "'fp8'"),
    ({**GPTQ, "desc_act": True}, "desc_act=True"),
    ({**GPTQ, "sym": False}, "sym=False"),
    ({**GPTQ, "bits": 3}, "3 bits"),
    ({**GPTQ, "lm_head": True}, "lm_head=True"),
    ({**GPTQ, "dynamic": {"-:.*down.*": {}}}, "dynamic"),
    ({"quant_method": "compressed-tensors", "format": "pack-quantized"}, "'compressed-tensors'"),
]


@pytest.mark.parametrize(("quantization_config", "named"), NOT_COMPUTED, ids=str)
def test_what_is_not_computed_is_refused_and_what_works_is_named(quantization_config, named):
    config = config_with(quantization_config)
    with pytest.raises(UnsupportedModelError, match=f'{named}.*GPTQ.*quantization="int8"'):
        packed_format(config)
    with pytest.raises(UnsupportedModelError, match="LlamaForCausalLM"):
        random_model(config)


def test_groups_that_do_not_fit_are_refused():
    assert_refused(r"\b688\b.*\b128\b.*16, 688", random_model, config_with({**GPTQ, "group_size": 128}))
    assert_refused("many", packed_format, config_with({**GPTQ, "group_size": "many"}))


def test_tensors_that_say_otherwise_than_the_config_are_refused(tmp_path):
    source = Source(4, 16)
    linear = "model.layers.1.self_attn.k_proj"
    for suffix, change, named in (
        ("qzeros", lambda zeros: zeros + 1, "asymmetric"),
        ("g_idx", lambda groups: groups.flip(0), "not in order"),
        ("scales", lambda scales: scales[1:], "shape"),
    ):
        tensors = source.gptq()
        tensors[f"{linear}.{suffix}"] = change(tensors[f"{linear}.{suffix}"]).contiguous()
        assert_refused(f"k_proj.*{named}", load_model, write(tmp_path, tensors, gptq_config(source)))


def test_an_ordinary_model_is_not_touched_by_any_of_this():
    config = ModelConfig.from_dict(HF)
    assert packed_format(config) is None
    assert config.quantization_config is None
    linears = [module for module in random_model(config).modules() if isinstance(module, Linear)]
    assert all(isinstance(linear.method, UnquantizedLinearMethod) for linear in linears)
    assert_refused("already quantized", random_model, config_with(GPTQ), quantization="int4")
