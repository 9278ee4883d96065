"""`quantization`: bytes are counted exactly, tokens do not depend on scheduling, what cannot be is refused."""

import pytest
import torch

from minivllm import LLM, SamplingParams
from minivllm.config import EMBEDDED_MODEL, ModelConfig
from minivllm.engine.arg_utils import EngineArgs
from minivllm.errors import MinivllmError
from minivllm.kernels.packed_weights import default_group_size, dequantize_weight
from minivllm.lab.inside import core_of, runner_of
from minivllm.models.attention import CausalAttention
from minivllm.models.decoder import Linear
from minivllm.models.loader import load_model, random_model
from minivllm.models.quantized import QuantizedLinear, quantize_linears
from minivllm.worker.cpu import packed_forms

SETTINGS = {"device": "cpu", "skip_tokenizer_init": True, "max_model_len": 96}
SHARED = [(7 * position + 5) % 900 for position in range(40)]
PROMPTS = [SHARED, [*SHARED, 11, 12], SHARED[:17], [9], [*SHARED[:16], 1, 2, 3, 4], SHARED[3:35]]
PARAMS = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
CONFIG = ModelConfig.from_pretrained(EMBEDDED_MODEL)


def engine(**changes) -> LLM:
    return LLM(EMBEDDED_MODEL, **{**SETTINGS, **changes})


def tokens(llm: LLM) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in llm.generate(PROMPTS, PARAMS)]


def shapes() -> list[tuple[int, int]]:
    """[out, in] of the four linears of a layer."""
    heads, width = CONFIG.num_attention_heads * CONFIG.head_dim, CONFIG.intermediate_size
    both = 2 * CONFIG.num_key_value_heads * CONFIG.head_dim
    return [(heads + both, CONFIG.hidden_size), (CONFIG.hidden_size, heads), (2 * width, CONFIG.hidden_size),
            (CONFIG.hidden_size, width)]  # fmt: skip


def bytes_of_linears(quantization: str) -> int:
    """From the definition of each kind alone."""
    layer = 0
    for rows, width in shapes():
        if quantization == "int8":
            layer += rows * width + 4 * rows
        else:
            layer += rows * width // 2 + 2 * rows * (width // default_group_size(width))
    return CONFIG.num_hidden_layers * layer


@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_the_count_is_what_is_there(quantization):
    model = load_model(EMBEDDED_MODEL)[0]
    before = sum(parameter.nbytes for parameter in model.parameters())
    linears = [module for module in model.layers.modules() if isinstance(module, Linear)]
    assert [tuple(linear.weight.shape) for linear in linears[:4]] == shapes()
    quantize_linears(model, quantization)
    after = sum(parameter.nbytes for parameter in model.parameters())
    assert before - after == sum(linear.weight.nbytes for linear in linears) - bytes_of_linears(quantization)
    assert not [module for module in model.layers.modules() if isinstance(module, Linear)]
    assert isinstance(model.lm_head, Linear)


@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_the_engines_ledger_counts_the_packed_bytes(quantization):
    core = core_of(engine(quantization=quantization, dtype="bfloat16"))
    config = CONFIG
    norms = (2 * config.num_hidden_layers + 1) * config.hidden_size * 2
    embedding = config.vocab_size * config.hidden_size * 2  # the head is the same tensor, or packed beside it
    head = sum(form.nbytes for form in packed_forms(runner_of(core).model))
    found = next(row.bytes for row in core.ledger.rows if "weights" in row.name)
    assert found == runner_of(core).weight_bytes()
    rotary = sum(buffer.nbytes for buffer in runner_of(core).model.buffers())
    assert found == bytes_of_linears(quantization) + norms + embedding + head + rotary


@torch.inference_mode()
@pytest.mark.parametrize("quantization", ["int8", "int4"])
@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_a_quantized_model_computes_with_the_numbers_that_its_integers_stand_for(quantization, family):
    config = ModelConfig.from_dict({
        "model_type": family, "vocab_size": 50, "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 32,
        "dtype": "float32",
    })  # fmt: skip
    quantized, plain = random_model(config, seed=3), random_model(config, seed=3)
    quantize_linears(quantized, quantization, group_size=16)
    for name, module in quantized.named_modules():
        if isinstance(module, QuantizedLinear):
            weight = plain.get_submodule(name).weight
            numbers = dequantize_weight(module.packed, module.scales)
            assert 0 < (numbers - weight).abs().max() < 0.15 * weight.abs().max()
            weight.copy_(numbers)
    ids, positions = torch.arange(20), torch.arange(20)
    found, expected = (
        model.compute_logits(model(ids, positions, CausalAttention(config))) for model in (quantized, plain)
    )
    assert torch.allclose(found, expected, atol=1e-5)


@pytest.fixture(scope="module", params=["int8", "int4"])
def expected(request):
    """Every request alone, in one step, without a prefix cache."""
    return request.param, tokens(engine(quantization=request.param, max_num_seqs=1, enable_prefix_caching=False))


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"max_num_batched_tokens": 7, "max_num_seqs": 5, "block_size": 8},
        {"max_num_batched_tokens": 24, "num_gpu_blocks_override": 13, "block_size": 8, "enable_prefix_caching": False},
    ],
    ids=str,
)
def test_the_same_tokens_however_they_are_scheduled(expected, changes):
    quantization, wanted = expected
    assert tokens(engine(quantization=quantization, **changes)) == wanted


def test_every_lever_of_bytes_at_once(expected):
    """Quantized weights, a quantized cache, random weights: it runs, and the cache changes little."""
    quantization, wanted = expected
    llm = engine(quantization=quantization, kv_cache_dtype="int8")
    found = tokens(llm)
    pairs = [
        (one, other) for row, same in zip(found, wanted, strict=True) for one, other in zip(row, same, strict=True)
    ]
    assert sum(one == other for one, other in pairs) > 0.6 * len(pairs)
    assert all(len(one) == 12 for one in tokens(engine(quantization=quantization, load_format="dummy")))


def test_unknown_ones_are_refused():
    with pytest.raises(MinivllmError, match="unknown quantization 'int3'; known are int8, int4"):
        EngineArgs(model="m", quantization="int3")
    with pytest.raises(MinivllmError, match=r"rows of 256 .* groups of 24: possible are 16, 32, 64, 128, 256"):
        quantize_linears(load_model(EMBEDDED_MODEL)[0], "int4", group_size=24)


@pytest.mark.gpu
@pytest.mark.parametrize("quantization", ["int8", "int4"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_on_a_gpu(quantization, dtype):
    llm = engine(device="cuda", quantization=quantization, dtype=dtype, num_gpu_blocks_override=64)
    assert all(len(one) == 12 for one in tokens(llm))
