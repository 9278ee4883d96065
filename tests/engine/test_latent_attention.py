"""Latent attention (MLA) in the engine: the tokens of transformers in any kind of step, and exact
byte counts.
"""

import dataclasses

import pytest
from engine.captured import capture_with
from engine.mixed_requests import completions_of, greedy_answers
from engine.test_equivalence import SHAPE, assert_most_likely, random_checkpoint
from refusals import assert_refused
from server.serving import free_port

from minivllm import LLM, SamplingParams
from minivllm.config import ModelConfig
from minivllm.errors import UnsupportedModelError
from minivllm.kernels.mla_attention import mla_attention
from minivllm.memory import kv_bytes_per_token
from minivllm.models.latent_attention import plain_attention, plain_form_is_cheaper
from minivllm.models.loader import random_model
from minivllm.worker import latent_attention
from minivllm_lab.engines.inside import core_of, runner_of

pytestmark = pytest.mark.usefixtures("warm_processes")

SHAPE = {
    **{name: value for name, value in SHAPE.items() if name != "num_key_value_heads"}, "kv_lora_rank": 24,
    "q_lora_rank": None, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 12, "first_k_dense_replace": 2,
}  # fmt: skip
VARIANTS = {
    "plain queries": {},
    "queries from a latent, yarn": {
        "q_lora_rank": 20,
        "rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "mscale": 1.0, "mscale_all_dim": 0.7,
                            "original_max_position_embeddings": 32},
    },
}  # fmt: skip
SHARED = [(7 * position + 5) % 150 for position in range(33)]
PROMPTS = [[5, 6, 9] * 16, SHARED, [*SHARED, 11, 12], SHARED[:17], [9], [*SHARED[:16], 1, 2, 3, 4]]
GREEDY = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True)
SETTINGS = {"dtype": "float32", "device": "cpu", "skip_tokenizer_init": True, "max_num_seqs": 5}
LATENT_BYTES = 2 * (24 + 8) * 4  # layers, rank and rotated part, fp32
DEEPSEEK_V2_LITE = ModelConfig(
    27, 16, 16, 128, kv_lora_rank=512, qk_rope_head_dim=64, qk_nope_head_dim=128, v_head_dim=128,
    model_type="deepseek_v2",
)  # fmt: skip


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    """Make random models with transformers, and store them in folders."""
    stored = {}
    for seed, (name, changes) in enumerate(VARIANTS.items()):
        folder = tmp_path_factory.mktemp("deepseek")
        stored[name] = random_checkpoint("deepseek_v2", folder, seed, **SHAPE | changes), folder
    return stored


@pytest.fixture(scope="module")
def folder(checkpoints):
    return checkpoints["plain queries"][1]


def tokens_of(llm: LLM) -> list[list[int]]:
    return greedy_answers(llm, PROMPTS, max_tokens=16)


@pytest.fixture(scope="module")
def expected(folder):
    return tokens_of(LLM(folder, **SETTINGS))


# ---- the same tokens -----------------------------------------------------------------------------


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_tokens_of_transformers(checkpoints, monkeypatch, variant):
    model, folder = checkpoints[variant]
    sizes = set()

    def watched(q_nope, q_rope, latents, *others):
        sizes.add((len(q_nope), len(latents)))
        return plain_attention(q_nope, q_rope, latents, *others)

    monkeypatch.setattr(latent_attention, "plain_attention", watched)
    for prompt, tokens in zip(PROMPTS, tokens_of(LLM(folder, **SETTINGS, max_num_batched_tokens=24)), strict=True):
        assert_most_likely(model, prompt, tokens)
    assert {(24, 24), (24, 48)} <= sizes, "the plain form, at a prompt's beginning and with what was cached before"


NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 2}
CHANGES = [
    {"block_size": 1, "enable_prefix_caching": False, "max_num_batched_tokens": 9},
    {"block_size": 4, "num_gpu_blocks_override": 26, "max_model_len": 66, "max_num_batched_tokens": 24},
    {"async_scheduling": True, "block_size": 5, "speculative_config": NGRAM},
    {"use_kv_cache": False},
    {"speculative_config": {"method": "draft_model", "model": "itself", "num_speculative_tokens": 2}},
]


@pytest.mark.parametrize("changes", CHANGES, ids=str)
def test_the_same_tokens_whatever_the_settings(folder, expected, changes):
    speculative = changes.get("speculative_config", {})
    if speculative.get("model") == "itself":
        changes = {"speculative_config": {**speculative, "model": str(folder)}}
    llm = LLM(folder, **{**SETTINGS, **changes})
    assert tokens_of(llm) == expected
    stats = llm.llm_engine.stats
    assert "num_gpu_blocks_override" not in changes or stats.num_preemptions > 0
    if changes.get("enable_prefix_caching", True) and changes.get("use_kv_cache", True):
        assert tokens_of(llm) == expected, "with the prefixes of the first call"


@pytest.mark.parametrize("changes", [{"tensor_parallel_size": 2}, {"pipeline_parallel_size": 2}], ids=str)
def test_the_same_tokens_on_two_ranks(request, folder, expected, changes):
    llm = LLM(folder, **SETTINGS, **changes, max_num_batched_tokens=24)
    request.addfinalizer(llm.shutdown)
    assert tokens_of(llm) == expected
    counted = LATENT_BYTES // changes.get("pipeline_parallel_size", 1)
    assert core_of(llm).ledger.bytes_per_token == counted, "a rank has whole latents, of its own layers"


def test_the_same_tokens_with_graphs(folder, expected):
    """A "graph" without a GPU is the same step again on the same buffers; its decodes all use the
    absorbed form.
    """
    llm = LLM(folder, **SETTINGS)
    capture_with(runner_of(llm), lambda function: function)
    assert tokens_of(llm) == expected
    assert runner_of(llm).cuda_graphs.decode.replays > 10


PULLED = [[(3 * token + seed) % 149 for token in range(60 - 7 * seed)] for seed in range(4)]
TO_DECODE = {"do_remote_decode": True, "do_remote_prefill": False, "remote_engine_id": None, "remote_block_ids": None}


def pulling_engine(folder, name: str, role: str, **others) -> LLM:
    extra = {"secret": "known to both of them"} if name == "TCPConnector" else {}
    settings = {"kv_connector": name, "kv_role": role, "engine_id": role, "kv_connector_extra_config": extra}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_NIXL_SIDE_CHANNEL_HOST", "127.0.0.1")
        patch.setenv("VLLM_NIXL_SIDE_CHANNEL_PORT", str(free_port()))
        patch.setenv("UCX_TLS", "sm,tcp,self")
        return LLM(folder, **SETTINGS, block_size=8, num_gpu_blocks_override=64, kv_transfer_config=settings, **others)


@pytest.mark.parametrize("name", ["TCPConnector", pytest.param("NixlConnector", marks=pytest.mark.nixl)])
def test_latents_pulled_from_a_prefill_engine(request, folder, name):
    expected = greedy_answers(LLM(folder, **SETTINGS), PULLED, max_tokens=16)
    prefill = pulling_engine(folder, name, "kv_producer", multiprocess=True)
    request.addfinalizer(prefill.shutdown)
    asked = SamplingParams(temperature=0.0, max_tokens=1, extra_args={"kv_transfer_params": TO_DECODE})
    told = [output.kv_transfer_params for output in prefill.generate(PULLED, asked)]
    wishes = [dataclasses.replace(GREEDY, extra_args={"kv_transfer_params": where}) for where in told]
    decode = pulling_engine(folder, name, "kv_consumer")
    assert completions_of(decode, PULLED, wishes) == [[tokens] for tokens in expected]
    assert core_of(decode).scheduler.make_stats().connector_prefix_cache_stats.hits > 100
    core_of(decode).shutdown()


@pytest.mark.interpreted
def test_the_triton_kernel_in_the_engine(monkeypatch, folder, expected):
    def interpreted(*args, backend, **options):
        return mla_attention(*args, backend="triton", **options)

    monkeypatch.setattr(latent_attention, "mla_attention", interpreted)
    llm = LLM(folder, **SETTINGS)
    assert greedy_answers(llm, PROMPTS[:2], max_tokens=4) == [tokens[:4] for tokens in expected[:2]]


# ---- the two forms -------------------------------------------------------------------------------


def multiplications(new: int, keys: int, config: ModelConfig) -> tuple[int, int]:
    """Count one head's multiply-adds in the plain and the absorbed form, matmul by matmul."""
    nope, value, rope, rank = config.qk_nope_head_dim, config.v_head_dim, config.rotary_dim, config.kv_lora_rank
    pairs = sum(keys - new + place + 1 for place in range(new))
    plain = keys * rank * nope + keys * rank * value + pairs * (nope + rope) + pairs * value
    absorbed = new * nope * rank + pairs * (rank + rope) + pairs * rank + new * rank * value
    return plain, absorbed


def test_the_rule_counts_operations():
    sizes = [(1, 1), (1, 2), (1, 5000), (3, 3), (64, 64), (100, 4000), (171, 4000), (180, 4000), (170, 100_000)]
    for new, keys in sizes:
        plain, absorbed = multiplications(new, keys, DEEPSEEK_V2_LITE)
        assert plain_form_is_cheaper(new, keys, DEEPSEEK_V2_LITE) == (plain < absorbed), (new, keys)


# ---- bytes, and what is refused ------------------------------------------------------------------


def test_the_cache_takes_the_bytes_that_the_calculator_gives(folder):
    llm = LLM(folder, **SETTINGS, block_size=8)
    ledger, caches = core_of(llm).ledger, runner_of(llm).attention.kv_caches
    counted = kv_bytes_per_token(ModelConfig.from_pretrained(folder), "float32")
    assert counted == ledger.bytes_per_token == LATENT_BYTES
    assert sum(tensor.nbytes for cache in caches for tensor in cache) == ledger.num_blocks * 8 * counted


UNCOMBINED = [
    ({"enable_lora": True}, "adapters work with .* ordinary attention, not with 'deepseek_v2'"),
    ({"kv_cache_dtype": "int8"}, r"keeps latents \(MLA\): leave it out"),
    ({"quantization": "int8"}, r"leave quantization out, or use the unquantized"),
    ({"attention_backend": "naive"}, r"nor attention_backend 'naive': leave it out"),
]


@pytest.mark.parametrize(("settings", "message"), UNCOMBINED)
def test_what_does_not_combine_is_refused_in_one_line(folder, settings, message):
    assert_refused(message, LLM, folder, **SETTINGS, **settings)


LLAMA = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "n_routed_experts": None}


def config_with(**changes) -> ModelConfig:
    return ModelConfig.from_dict({**SHAPE, "model_type": "deepseek_v2", "n_routed_experts": 4, **changes})


OTHER_MODELS = [
    ({"first_k_dense_replace": 1}, "experts from layer 1 onward"),
    ({"attention_bias": True}, "biases"),
    ({"qk_rope_head_dim": 3}, "rotates 3 elements of a head; .* must be even"),
    (LLAMA, "outside DeepSeek-V2"),
    ({"kv_lora_rank": None}, "or lacks it there"),
]


@pytest.mark.parametrize(("changes", "message"), OTHER_MODELS)
def test_other_models_are_refused(changes, message):
    with pytest.raises(UnsupportedModelError, match=message):
        random_model(config_with(**changes), device="meta")
    assert config_with().num_experts == 0
