"""`quantization` and `kv_cache_dtype`: bytes are counted exactly, and tokens do not depend on
scheduling.
"""

import functools

import pytest
import torch
from engine.mixed_requests import PROMPTS, greedy_answers
from models.small import SMALL

from minivllm import LLM, SamplingParams
from minivllm.config import EMBEDDED_MODEL, ModelConfig
from minivllm.errors import MinivllmError
from minivllm.kernels.packed_weights import default_group_size, dequantize_weight
from minivllm.memory import kv_bytes_per_token
from minivllm.models.attention import CausalAttention
from minivllm.models.linear import Linear, weight_bytes
from minivllm.models.loader import load_model, random_model
from minivllm.models.parallel import GroupCoordinator
from minivllm.worker.kv_cache import allocate_kv_caches
from minivllm.worker.kv_connector_runner import tensors_of
from minivllm_lab.engines.inside import core_of, runner_of

SETTINGS = {"device": "cpu", "skip_tokenizer_init": True, "max_model_len": 96}
CONFIG = ModelConfig.from_pretrained(EMBEDDED_MODEL)


def engine(**changes) -> LLM:
    return LLM(EMBEDDED_MODEL, **{**SETTINGS, **changes})


def tokens(llm: LLM) -> list[list[int]]:
    return greedy_answers(llm, PROMPTS, max_tokens=12)


def bytes_of_linears(quantization: str) -> int:
    """Count the bytes of the four linears of each layer from the definition of the format."""
    hidden, heads, width = CONFIG.hidden_size, CONFIG.num_attention_heads * CONFIG.head_dim, CONFIG.intermediate_size
    both = 2 * CONFIG.num_key_value_heads * CONFIG.head_dim
    shapes = [(heads + both, hidden), (hidden, heads), (2 * width, hidden), (hidden, width)]  # [out, in]
    weights, scales = sum(rows * columns for rows, columns in shapes), sum(rows for rows, _ in shapes)
    if quantization == "int8":
        return CONFIG.num_hidden_layers * (weights + 4 * scales)
    scales = sum(rows * columns // default_group_size(columns) for rows, columns in shapes)
    return CONFIG.num_hidden_layers * (weights // 2 + 2 * scales)


@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_the_engines_ledger_counts_the_packed_bytes(quantization):
    core = core_of(engine(quantization=quantization, dtype="bfloat16"))
    model = runner_of(core).model
    norms = (2 * CONFIG.num_hidden_layers + 1) * CONFIG.hidden_size * 2
    embedding = CONFIG.vocab_size * CONFIG.hidden_size * 2  # the head is the same tensor, or packed beside it
    head = weight_bytes(model.lm_head) if model.lm_head.weight is None else 0
    result = next(row.bytes for row in core.ledger.rows if "weights" in row.name)
    assert result == weight_bytes(model)
    assert result == bytes_of_linears(quantization) + norms + embedding + head + model.rotary.table.nbytes


@torch.inference_mode()
@pytest.mark.parametrize("quantization", ["int8", "int4"])
@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_a_quantized_model_computes_with_the_numbers_that_its_integers_stand_for(quantization, family):
    config = ModelConfig.from_dict(SMALL | {"model_type": family, "hidden_size": 48, "intermediate_size": 80})
    quantized, plain = random_model(config, seed=3, quantization=quantization), random_model(config, seed=3)
    for name, module in quantized.layers.named_modules(prefix="layers"):
        if isinstance(module, Linear):
            weight = plain.get_submodule(name).weight
            numbers = dequantize_weight(module.packed, module.scales)
            assert 0 < (numbers - weight).abs().max() < 0.15 * weight.abs().max()
            weight.copy_(numbers)
    ids, positions = torch.arange(20), torch.arange(20)
    result, expected = (
        model.compute_logits(model(ids, positions, CausalAttention(config))) for model in (quantized, plain)
    )
    assert torch.allclose(result, expected, atol=1e-5)


@pytest.mark.parametrize("kv_cache_dtype", ["auto", "int8", "int8_per_token_head", "fp8", "fp8_e4m3"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_count_of_a_cache_is_what_is_allocated(kv_cache_dtype, dtype):
    block_size = 3
    caches = allocate_kv_caches(CONFIG, 5, block_size, torch.device("cpu"), dtype, kv_cache_dtype)
    allocated = sum(tensor.nbytes for cache in caches for tensor in cache if tensor is not None)
    name = str(dtype).removeprefix("torch.") if kv_cache_dtype == "auto" else kv_cache_dtype
    assert allocated == 5 * block_size * kv_bytes_per_token(CONFIG, name)
    assert caches[0].keys.shape == (5, block_size, CONFIG.num_key_value_heads, CONFIG.head_dim)


@pytest.mark.parametrize("num_blocks", [5, 5000], ids=["small", "in huge pages"])
def test_on_a_cpu_a_head_reads_its_slots_in_one_run_of_a_block_that_is_contiguous(num_blocks):
    cache = allocate_kv_caches(CONFIG, num_blocks, 4, torch.device("cpu"), torch.float32)[0]
    assert cache.keys.stride(1) == CONFIG.head_dim
    assert all(tensor[0].is_contiguous() for tensor in tensors_of(cache))
    assert not cache.keys.any()


INT4 = {"quantization": "int4"}
INT8 = {"quantization": "int8", "kv_cache_dtype": "int8"}
SINGLE_SLOTS = {"block_size": 1, "enable_prefix_caching": False}


@functools.cache
def tokens_one_by_one(**settings):
    """Return the tokens of requests computed alone, prefilled in one step, without a prefix cache."""
    return tokens(engine(**settings, max_num_seqs=1, enable_prefix_caching=False))


SCHEDULES = [
    (INT4, {}),
    (INT8, {}),
    (INT8, {"max_num_batched_tokens": 24, "num_gpu_blocks_override": 13, "block_size": 8}),
    (INT4, SINGLE_SLOTS | {"max_num_batched_tokens": 7, "num_gpu_blocks_override": 97}),
]


@pytest.mark.parametrize(("settings", "changes"), SCHEDULES, ids=str)
def test_the_same_tokens_however_they_are_scheduled(settings, changes):
    expected = tokens_one_by_one(**settings)
    llm = engine(**settings, **changes)
    assert tokens(llm) == expected
    assert ("num_gpu_blocks_override" in changes) == (llm.llm_engine.stats.num_preemptions > 0)
    if not changes:
        assert llm.generate(PROMPTS[:1], SamplingParams(max_tokens=1))[0].num_cached_tokens == 32
        assert tokens(llm) == expected, "with the prefixes of the first call"


def test_groups_that_ranks_would_cut_are_refused():
    with pytest.raises(MinivllmError, match=r"rows of 688 weights in groups of 16 .* over 2 ranks: .* pieces of 8"):
        load_model(EMBEDDED_MODEL, group=GroupCoordinator(0, 2), quantization="int4")


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    "settings",
    [{"quantization": "int8"}, {"quantization": "int4"}, {"kv_cache_dtype": "int8"}, {"kv_cache_dtype": "fp8"}],
    ids=lambda settings: " ".join(*settings.items()),
)
def test_on_a_gpu(settings, dtype):
    if settings.get("kv_cache_dtype") == "fp8" and torch.cuda.get_device_capability() < (8, 9):
        pytest.xfail("this GPU has no fp8")
    llm = engine(device="cuda", **settings, dtype=dtype, num_gpu_blocks_override=64)
    assert all(len(token) == 12 for token in tokens(llm))
