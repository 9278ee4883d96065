"""The engine's tokens are those of transformers, and the same under any engine settings.

Sums in another order change the last digits of the logits, which matters only where two tokens are
almost equally likely. So compared with transformers, each token's logit must be within 1e-3 of the
greatest, and the engine is compared with itself on prompts whose greedy tokens win by more than
that.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from engine.mixed_requests import completions_of

from minivllm import LLM, SamplingParams
from minivllm.config import EMBEDDED_MODEL

pytestmark = pytest.mark.usefixtures("warm_processes")

FAMILIES = {
    "llama": {"rope_parameters": {"rope_type": "llama3", "rope_theta": 1e4, "factor": 4.0, "low_freq_factor": 1.0,
                                  "high_freq_factor": 4.0, "original_max_position_embeddings": 32}},
    "mistral": {"sliding_window": 12},
    "qwen2": {},
    "qwen3": {"head_dim": 32},
}  # fmt: skip
SHAPE = {
    "vocab_size": 151, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 128, "initializer_range": 0.3, "tie_word_embeddings": False,
    "eos_token_id": 3, "dtype": "float32",
}  # fmt: skip
SHARED = [(7 * position + 5) % 150 for position in range(33)]
PROMPTS = [
    SHARED, [*SHARED, 11, 12], SHARED[:17], [9], [*SHARED[:16], 1, 2, 3, 4],
    [(3 * position) % 149 for position in range(40)], [*SHARED, 11, 12, 13, 14, 15, 16], [5, 6],
]  # fmt: skip
TIGHT = {"max_model_len": 80, "num_gpu_blocks_override": 12, "block_size": 8}
NGRAM = {"num_speculative_tokens": 3, "prompt_lookup_max": 3, "prompt_lookup_min": 1}
SETTINGS = {"dtype": "float32", "device": "cpu"}


def random_checkpoint(model_type: str, folder: Path, seed: int, **shape: Any) -> Any:
    """Make a random model with transformers, and store it in a folder."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(seed)
    config = transformers.AutoConfig.for_model(model_type, **shape)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    model.save_pretrained(folder)
    return model


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    """Store a random model of each family, and add the embedded one."""
    transformers, stored = pytest.importorskip("transformers"), {}
    for seed, (family, changes) in enumerate(FAMILIES.items()):
        folder = tmp_path_factory.mktemp(family)
        stored[family] = random_checkpoint(family, folder, seed, **SHAPE | changes), folder
    embedded = transformers.AutoModelForCausalLM.from_pretrained(EMBEDDED_MODEL, dtype=torch.float32).eval()
    stored["embedded"] = embedded, EMBEDDED_MODEL
    return stored


@pytest.mark.parametrize("family", [*FAMILIES, "embedded"])
def test_the_tokens_of_transformers(checkpoints, family):
    model, folder = checkpoints[family]
    llm = LLM(folder, **SETTINGS, skip_tokenizer_init=True, max_num_seqs=5, max_num_batched_tokens=24, block_size=8)
    outputs = llm.generate(PROMPTS, SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True))
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        tokens = output.outputs[0].token_ids
        assert len(tokens) == 24
        assert_most_likely(model, prompt, tokens)


def assert_most_likely(model, prompt: list[int], tokens: list[int]) -> None:
    """Expect each token's logit to be within 1e-3 of the greatest."""
    with torch.inference_mode():
        logits = model(torch.tensor([[*prompt, *tokens]])).logits[0, len(prompt) - 1 : -1]
    chosen = logits.gather(-1, torch.tensor(tokens).unsqueeze(-1)).squeeze(-1)
    assert (chosen >= logits.amax(-1) - 1e-3).all(), prompt


def test_the_log_probabilities_of_transformers(checkpoints):
    model, folder = checkpoints["qwen2"]
    llm = LLM(folder, **SETTINGS, skip_tokenizer_init=True, max_num_batched_tokens=9, block_size=4)
    params = SamplingParams(temperature=0.0, max_tokens=5, logprobs=0, prompt_logprobs=2, ignore_eos=True)
    for output in llm.generate(PROMPTS[:3], params):
        tokens = [*output.prompt_token_ids, *output.outputs[0].token_ids]
        with torch.inference_mode():
            theirs = model(torch.tensor([tokens])).logits[0].log_softmax(-1)
        entries = [*output.prompt_logprobs, *output.outputs[0].logprobs]
        assert len(entries) == len(tokens)
        assert entries[0] is None
        for position, entry in enumerate(entries[1:], start=1):
            chosen = entry[tokens[position]]
            assert chosen.logprob == pytest.approx(theirs[position - 1, tokens[position]].item(), abs=1e-4)
            assert chosen.rank == 1 + (theirs[position - 1] > theirs[position - 1, tokens[position]] + 1e-5).sum()
        assert all(len(entry) >= 2 for entry in output.prompt_logprobs[1:])


MIXED = [
    SamplingParams(temperature=0.0, max_tokens=14, ignore_eos=True),
    SamplingParams(temperature=0.9, seed=1, max_tokens=20),
    SamplingParams(temperature=0.7, top_p=0.8, seed=2, max_tokens=9, n=2),
    SamplingParams(temperature=1.2, top_k=20, seed=3, max_tokens=25, presence_penalty=0.6, ignore_eos=True),
    SamplingParams(temperature=0.0, max_tokens=12, repetition_penalty=1.4, ignore_eos=True),
    SamplingParams(temperature=1.0, min_p=0.05, seed=4, max_tokens=18, min_tokens=10, frequency_penalty=0.3),
    SamplingParams(temperature=0.8, seed=5, max_tokens=11, logit_bias={4: 3.0}, prompt_logprobs=1),
    SamplingParams(temperature=0.0, max_tokens=30, stop_token_ids=[8, 9], min_tokens=3),
]
"""Sampling parameters of each kind; those that draw have a seed."""


def tokens_of(folder, order=None, **changes) -> list[list[list[int]]]:
    """Return the tokens of each request's completions in the order of PROMPTS, whatever order they
    are sent in.
    """
    order = order or range(len(PROMPTS))
    if drafter := changes.pop("drafter", None):
        model = {"itself": folder, "another": folder.with_name("mistral0")}[drafter]
        changes["speculative_config"] = {"model": str(model), "num_speculative_tokens": 3}
    llm = LLM(folder, **SETTINGS, skip_tokenizer_init=True, **{"max_num_seqs": 6, **changes})
    completions = completions_of(llm, [PROMPTS[index] for index in order], [MIXED[index] for index in order])
    if changes.get("num_gpu_blocks_override"):
        assert llm.llm_engine.stats.num_preemptions > 0, "this pool was to be too small"
    return [completions[order.index(index)] for index in range(len(PROMPTS))]


@pytest.fixture(scope="module")
def expected(checkpoints):
    """Compute each request alone, prefilled in one step, without a prefix cache."""
    folder = checkpoints["qwen3"][1]
    llm = LLM(folder, **SETTINGS, skip_tokenizer_init=True, max_num_seqs=1, enable_prefix_caching=False)
    for prompt, request_params in zip(PROMPTS, MIXED, strict=True):
        if not request_params.is_greedy or request_params.repetition_penalty != 1.0:
            continue
        params = SamplingParams(temperature=0.0, max_tokens=request_params.max_tokens, ignore_eos=True, logprobs=2)
        for entry in llm.generate([prompt], params)[0].outputs[0].logprobs:
            best, second = sorted((logprob.logprob for logprob in entry.values()), reverse=True)[:2]
            assert best - second > 1e-3, "two tokens are as good as equally likely: choose other prompts"
    return [completions_of(llm, [prompt], params)[0] for prompt, params in zip(PROMPTS, MIXED, strict=True)]


SHUFFLED = [3, 0, 6, 1, 7, 2, 5, 4]
UNCACHED = {"enable_prefix_caching": False}
CHANGES = [
    {**UNCACHED, "block_size": 1, "max_num_batched_tokens": 7},
    {"block_size": 8, "max_num_batched_tokens": 7},
    {**UNCACHED, "block_size": 16, "max_num_batched_tokens": 2048},
    {**TIGHT, "block_size": 1, "num_gpu_blocks_override": 81, "max_num_batched_tokens": 24},
    {**TIGHT, **UNCACHED, "block_size": 16, "num_gpu_blocks_override": 6, "max_num_batched_tokens": 24},
    {"order": SHUFFLED, "max_num_seqs": 3, "long_prefill_token_threshold": 5, "scheduling_policy": "priority"},
    {"enable_chunked_prefill": False, "max_num_batched_tokens": 128},
    {"max_num_seqs": 2, "max_num_batched_tokens": 3},
    {"use_kv_cache": False, "max_num_batched_tokens": 13, "speculative_config": NGRAM},
    {"block_size": 128, "static_batching": True, "max_num_seqs": 4, "attention_backend": "naive"},
    {**TIGHT, "speculative_config": NGRAM},
    {"drafter": "itself", "max_num_batched_tokens": 11, "block_size": 4},
    {**TIGHT, "drafter": "another"},
    {**TIGHT, "drafter": "itself", "multiprocess": True},
]


@pytest.mark.parametrize("changes", CHANGES, ids=str)
def test_the_same_tokens_in_any_blocks_chunks_and_order_and_under_any_policy(checkpoints, expected, changes):
    assert tokens_of(checkpoints["qwen3"][1], **changes) == expected


def test_a_second_call_finds_the_first_ones_prefix_and_gives_the_same(checkpoints, expected):
    llm = LLM(checkpoints["qwen3"][1], **SETTINGS, skip_tokenizer_init=True, block_size=8)
    first, second = (llm.generate(PROMPTS, MIXED) for _ in range(2))
    for outputs in (first, second):
        assert [[completion.token_ids for completion in output.outputs] for output in outputs] == expected
    assert first[0].num_cached_tokens == 0
    assert second[0].num_cached_tokens == 32, "all but the last token, in whole blocks"
    assert second[6].num_cached_tokens == 0, "a request for prompt log probabilities reads no cache"
