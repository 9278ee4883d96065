"""Logits of the five families equal those of `transformers` on the same random weights, through
files on disk.
"""

import pytest
import torch

from minivllm.config import ModelConfig
from minivllm.models.latent_attention import causal_attention
from minivllm.models.loader import load_model
from minivllm.models.rotary import RotaryTable
from minivllm_simulate.memory import num_parameters

TOKENS = 40
SMALL = {
    "vocab_size": 97, "hidden_size": 64, "intermediate_size": 112, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64,
}  # fmt: skip
LLAMA3_ROPE = {
    "rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}  # fmt: skip
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 16}
LATENT = {
    "num_key_value_heads": 4, "kv_lora_rank": 32, "q_lora_rank": None, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8,
    "v_head_dim": 24, "first_k_dense_replace": 3,
}  # fmt: skip
LINEAR = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0}

CASES = {
    "llama, grouped heads, llama3 rope": ("llama", {"rope_parameters": LLAMA3_ROPE}),
    "llama, one head each, all biases, tied": (
        "llama", {"num_key_value_heads": 4, "attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True},
    ),
    "llama, one key-value head, wide heads, yarn": (
        "llama", {"num_key_value_heads": 1, "head_dim": 32, "rope_parameters": YARN},
    ),
    "llama, linear rope": ("llama", {"rope_parameters": LINEAR}),
    "qwen2, biases, tied": ("qwen2", {"tie_word_embeddings": True}),
    "qwen2, window switched off": ("qwen2", {"use_sliding_window": False, "sliding_window": 4}),
    "qwen3, norms of heads, wide heads": ("qwen3", {"head_dim": 32, "tie_word_embeddings": True}),
    "qwen3, with biases": ("qwen3", {"head_dim": 16, "attention_bias": True}),
    "mistral": ("mistral", {"sliding_window": None, "head_dim": 24}),
    "mistral, window": ("mistral", {"sliding_window": 8}),
    "deepseek_v2, plain queries, tied": ("deepseek_v2", {**LATENT, "tie_word_embeddings": True, "rms_norm_eps": 1e-2}),
    "deepseek_v2, queries from a latent, yarn": (
        "deepseek_v2", {**LATENT, "q_lora_rank": 20, "rope_parameters": {**YARN, "mscale": 1.0, "mscale_all_dim": 0.7}},
    ),
}  # fmt: skip


@pytest.fixture(scope="session")
def transformers():
    import transformers

    transformers.logging.set_verbosity_error()
    return transformers


@pytest.fixture(scope="session")
def stored(transformers, tmp_path_factory):
    """Return a function that makes each case's random `transformers` model and the directory of its
    shards, once.
    """
    built = {}

    def make(case):
        if case not in built:
            family, changes = CASES[case]
            torch.manual_seed(len(built))
            config = transformers.AutoConfig.for_model(family, **{**SMALL, **changes})
            model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
            for name, parameter in model.named_parameters():
                torch.nn.init.normal_(parameter, mean=float("norm" in name), std=0.15)
            directory = tmp_path_factory.mktemp("model")
            model.save_pretrained(directory, max_shard_size="100KB")
            assert len(list(directory.glob("*.safetensors"))) > 1
            built[case] = (model, directory)
        return built[case]

    return make


def tokens(seed):
    return torch.randint(SMALL["vocab_size"], (TOKENS,), generator=torch.Generator().manual_seed(seed))


def our_logits(model, config, ids):
    hidden = model(ids, torch.arange(len(ids)), causal_attention(config))
    return model.compute_logits(hidden).float()


@pytest.mark.parametrize("case", CASES)
@torch.inference_mode()
def test_logits_are_equal_and_parameters_are_counted(stored, case):
    theirs, directory = stored(case)
    model, config = load_model(directory)
    ids = tokens(1)
    expected = theirs(ids[None]).logits[0]
    error = (our_logits(model, config, ids) - expected).abs().max().item()
    print(f"{case}: max error {error:.1e}")
    assert expected.abs().max() > 1
    assert error < 1e-4
    assert num_parameters(config) == sum(parameter.numel() for parameter in theirs.parameters())


@pytest.mark.parametrize(
    "case",
    ["llama, grouped heads, llama3 rope", "qwen2, biases, tied", "mistral, window", "deepseek_v2, plain queries, tied"],
)
@torch.inference_mode()
def test_bfloat16_is_no_farther_from_float32_than_theirs(stored, transformers, case):
    theirs, directory = stored(case)
    ids = tokens(2)
    exact = theirs(ids[None]).logits[0]
    rounded = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.bfloat16)
    model, config = load_model(directory, dtype="bfloat16")
    their_error = (rounded(ids[None]).logits[0].float() - exact).abs().mean()
    our_error = (our_logits(model, config, ids) - exact).abs().mean()
    assert 0 < our_error < 1.2 * their_error


def angle_error(positions: torch.Tensor) -> torch.Tensor:
    """Return two units in the last place of a float32 frequency (at most 1), which each position
    adds to the angle.
    """
    return positions * 2 * 2**-23


OPTIONS = [{"mscale": 1.0, "mscale_all_dim": 0.7}, {"attention_factor": 1.3}, {"truncate": False}]
ROPES = [LLAMA3_ROPE, LINEAR, YARN, *(YARN | more for more in OPTIONS), {"rope_type": "default", "rope_theta": 5e5}]


@pytest.mark.parametrize("rope", ROPES)
@pytest.mark.parametrize("head_dim", [16, 64, 128])
def test_rotary_table_at_far_positions(transformers, rope, head_dim):
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    shape = {**SMALL, "head_dim": head_dim, "max_position_embeddings": 4096, "rope_parameters": rope}
    theirs = LlamaRotaryEmbedding(transformers.LlamaConfig(**shape))
    positions = torch.tensor([0, 1, 31, 32, 1000, 4095])
    cos, sin = theirs(torch.zeros(1), positions[None])
    ours = RotaryTable(ModelConfig.from_dict({"model_type": "llama", **shape})).table[positions]
    theirs_once = torch.cat((cos[0, :, : head_dim // 2], sin[0, :, : head_dim // 2]), dim=-1)
    assert ((ours - theirs_once).abs().amax(-1) <= angle_error(positions + 32)).all()


OTHER_FAMILIES = {
    "gpt2": {"n_embd": 64, "n_layer": 2, "n_head": 4, "vocab_size": 97, "n_positions": 32},
    "opt": {
        "hidden_size": 64, "ffn_dim": 96, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 97,
        "word_embed_proj_dim": 64, "max_position_embeddings": 32,
    },
    "mixtral": {**SMALL, "num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen3_moe": {**SMALL, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48, "head_dim": 32},
    "deepseek_v3": {
        **SMALL, "num_key_value_heads": 4, "kv_lora_rank": 32, "q_lora_rank": 24, "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 16, "v_head_dim": 16, "n_routed_experts": 8, "n_shared_experts": 1, "n_group": 2,
        "topk_group": 1, "num_experts_per_tok": 2, "moe_intermediate_size": 48, "first_k_dense_replace": 1,
    },
}  # fmt: skip


@pytest.mark.parametrize("family", OTHER_FAMILIES)
def test_parameters_of_other_families(transformers, family):
    config = transformers.AutoConfig.for_model(family, **OTHER_FAMILIES[family])
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    stored_buffers = sum(b.numel() for name, b in model.named_buffers() if name.endswith("correction_bias"))
    expected = sum(parameter.numel() for parameter in model.parameters()) + stored_buffers
    assert num_parameters(ModelConfig.from_dict(config.to_dict())) == expected
