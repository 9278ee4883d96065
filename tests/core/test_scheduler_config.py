"""Test that a configuration that cannot work is refused in words that say what would work."""

import pytest
from refusals import assert_refused

from minivllm.config import CacheConfig, DraftingConfig, SchedulerConfig


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"max_num_seqs": 0}, "max_num_seqs is 0"), ({"max_num_batched_tokens": 0}, "max_num_batched_tokens is 0"),
        ({"max_model_len": 1}, "max_model_len is 1"), ({"long_prefill_token_threshold": -1}, "not negative"),
        ({"long_prefill_token_threshold": None}, "long_prefill_token_threshold is None"),
        ({"long_prefill_token_threshold": "8"}, "long_prefill_token_threshold is '8'"),
        ({"long_prefill_token_threshold": 65}, "exceeds max_model_len"), ({"max_loras": -1}, "max_loras is -1"),
        ({"watermark": 1.0}, "watermark is 1.0"), ({"watermark": -0.1}, "watermark is -0.1"),
        ({"enable_chunked_prefill": False, "max_num_batched_tokens": 63}, "without chunked prefill"),
    ],
)  # fmt: skip
def test_scheduler_config_refuses(arguments: dict[str, object], words: str) -> None:
    assert_refused(words, SchedulerConfig, **{"max_model_len": 64, **arguments})  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["num_speculative_tokens", "num_lookahead_tokens"])
def test_drafting_config_refuses(name: str) -> None:
    assert_refused(f"{name} is -1; .* not negative", DraftingConfig, **{name: -1})


@pytest.mark.parametrize(
    ("arguments", "words"), [({"block_size": 0}, "block_size is 0"), ({"num_gpu_blocks": 1}, "block 0 is the null")]
)
def test_cache_config_refuses(arguments: dict[str, int], words: str) -> None:
    assert_refused(words, CacheConfig, **{"num_gpu_blocks": 10, **arguments})


def test_the_edges_are_allowed() -> None:
    SchedulerConfig(max_model_len=2, max_num_seqs=8, max_num_batched_tokens=1, long_prefill_token_threshold=2)
    SchedulerConfig(max_model_len=64, max_num_batched_tokens=64, enable_chunked_prefill=False)
    CacheConfig(num_gpu_blocks=2, block_size=1)
