"""`kv_cache_dtype`: bytes are counted exactly, tokens do not depend on scheduling, what cannot be is refused."""

import math

import pytest
import torch

from minivllm import LLM, SamplingParams
from minivllm.config import EMBEDDED_MODEL, ModelConfig
from minivllm.errors import MinivllmError
from minivllm.memory import kv_bytes_per_token
from minivllm.worker.kv_cache import allocate_kv_caches
from minivllm_lab.inside import core_of, runner_of

SETTINGS = {"device": "cpu", "skip_tokenizer_init": True}
SHARED = [(7 * position + 5) % 900 for position in range(40)]
PROMPTS = [SHARED, [*SHARED, 11, 12], SHARED[:17], [9], [*SHARED[:16], 1, 2, 3, 4], [5, 6], SHARED[3:35]]
PARAMS = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True)


def engine(**changes) -> LLM:
    return LLM(EMBEDDED_MODEL, **{**SETTINGS, "kv_cache_dtype": "int8", "max_model_len": 96, **changes})


def tokens(llm: LLM) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in llm.generate(PROMPTS, PARAMS)]


@pytest.mark.parametrize("kv_cache_dtype", ["auto", "int8", "int8_per_token_head", "fp8", "fp8_e4m3"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("block_size", [1, 16])
def test_the_count_is_what_is_allocated(kv_cache_dtype, dtype, block_size):
    config = ModelConfig.from_pretrained(EMBEDDED_MODEL)
    caches = allocate_kv_caches(config, 5, block_size, torch.device("cpu"), dtype, kv_cache_dtype)
    allocated = sum(tensor.nbytes for cache in caches for tensor in cache if tensor is not None)
    name = str(dtype).removeprefix("torch.") if kv_cache_dtype == "auto" else kv_cache_dtype
    assert allocated == 5 * block_size * kv_bytes_per_token(config, name)


def test_the_engines_ledger_counts_the_scales_too():
    llm = engine(max_num_seqs=4)
    core = core_of(llm)
    config, ledger = core.model_config, core.ledger
    a_token = config.num_hidden_layers * 2 * config.num_key_value_heads * (config.head_dim + 4)
    assert ledger.bytes_per_token == a_token
    allocated = sum(tensor.nbytes for cache in runner_of(core).attention.kv_caches for tensor in cache)
    assert allocated == ledger.num_blocks * 16 * a_token == ledger.kv_bytes
    assert core_of(engine(kv_cache_dtype="auto")).ledger.bytes_per_token == a_token * 4 * 32 // 36


@pytest.fixture(scope="module")
def expected():
    """Every request alone, in one step, without a prefix cache."""
    return tokens(engine(max_num_seqs=1, enable_prefix_caching=False))


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"enable_prefix_caching": False},
        {"max_num_batched_tokens": 7, "max_num_seqs": 5, "block_size": 8},
        {"max_num_batched_tokens": 24, "num_gpu_blocks_override": 13, "block_size": 8},
        {"max_num_batched_tokens": 24, "num_gpu_blocks_override": 97, "block_size": 1, "enable_prefix_caching": False},
        {"kv_cache_dtype": "int8_per_token_head", "max_num_seqs": 3},
    ],
    ids=str,
)
def test_the_same_tokens_however_they_are_scheduled(expected, changes):
    llm = engine(**changes)
    assert tokens(llm) == expected
    if "num_gpu_blocks_override" in changes:
        assert llm.llm_engine.stats.num_preemptions > 0, "this pool was to be too small"


def test_a_prefix_from_the_cache_gives_the_same(expected):
    llm = engine()
    assert tokens(llm) == expected
    again = llm.generate(PROMPTS, PARAMS)
    assert again[0].num_cached_tokens == 32
    assert [output.outputs[0].token_ids for output in again] == expected


def test_the_quantized_cache_is_what_is_read():
    """Its log probabilities are near those of the full cache, and not the same."""
    params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0)
    found = [
        [entry[token].logprob for token, entry in zip(SHARED[1:], output.prompt_logprobs[1:], strict=True)]
        for output in (engine(kv_cache_dtype=kind).generate([SHARED], params)[0] for kind in ("auto", "int8"))
    ]
    apart = max(abs(full - quantized) for full, quantized in zip(*found, strict=True))
    assert 1e-5 < apart < 0.5
    assert math.fsum(found[0]) == pytest.approx(math.fsum(found[1]), abs=0.5)


def test_fp8_is_refused_where_there_is_none():
    with pytest.raises(MinivllmError, match=r'compute capability 8.9 .* CPU.*"int8" takes as little room'):
        engine(kv_cache_dtype="fp8")


def test_unknown_ones_are_refused():
    with pytest.raises(MinivllmError, match="unknown kv_cache_dtype 'int4'; known are auto, int8"):
        engine(kv_cache_dtype="int4")


@pytest.mark.gpu
@pytest.mark.parametrize("kv_cache_dtype", ["int8", "fp8"])
def test_on_a_gpu(kv_cache_dtype):
    if kv_cache_dtype == "fp8" and torch.cuda.get_device_capability() < (8, 9):
        pytest.xfail("this GPU has no fp8")
    llm = engine(device="cuda", kv_cache_dtype=kv_cache_dtype, dtype="float32", num_gpu_blocks_override=64)
    assert all(len(one) == 16 for one in tokens(llm))
