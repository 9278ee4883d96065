"""Invalid settings are refused in one line that says what would be valid."""

from typing import Any

import pytest
from refusals import assert_refused

from minivllm import LLM
from minivllm.config import EMBEDDED_DRAFT, EMBEDDED_MODEL, Parts
from minivllm.core.block_pool import BlockPool
from minivllm.core.policy import SchedulingPolicy
from minivllm.engine.arg_utils import EngineArgs

TWO_DRAFTS: dict[str, Any] = {"num_speculative_tokens": 2}
DRAFT_MODEL = TWO_DRAFTS | {"method": "draft_model", "model": str(EMBEDDED_DRAFT)}
FILES = {"kv_connector": "ExampleConnector", "kv_connector_extra_config": {"shared_storage_path": "files"}}
OWN_POOL = Parts(policy=SchedulingPolicy(block_pool=type("OwnPool", (BlockPool,), {})))
APART = {
    "multiprocess": True, "tensor_parallel_size": 2, "pipeline_parallel_size": 2, "distributed_executor_backend": "mp",
}  # fmt: skip
OWN_STEPS = Parts(policy=SchedulingPolicy(schedule=lambda scheduler, step: None))
NO_CONNECTOR = Parts(policy=SchedulingPolicy(schedule=print, find_prefix=print))  # type: ignore[arg-type]

SIZES = [
    ({"dtype": "int3"}, "dtype is 'int3'; it must be one of auto, float32"),
    ({"device": "tpu"}, "unknown device"),
    ({"load_format": "gguf"}, "load_format is 'gguf'"),
    ({"kv_cache_dtype": "int4"}, "kv_cache_dtype is 'int4'; it must be one of auto, int8"),
    ({"kv_cache_dtype": "fp8"}, r'compute capability 8.9 .* CPU.*use "int8"'),
    ({"quantization": "int3"}, "quantization is 'int3'; it must be one of int8, int4"),
    ({"scheduling_policy": "random"}, "policy is 'random'; it must be one of fcfs, priority"),
    ({"runner": "pooling"}, "EngineArgs has no argument 'runner'"),
    ({"max_num_sequences": 3}, "did you mean 'max_num_seqs'"),
    ({"block_size": 0}, "block_size is 0"),
    ({"block_size": "16"}, "block_size is '16'"),
    ({"watermark": "x"}, "watermark is 'x'"),
    ({"tokenizer": 5}, "tokenizer is 5; it must be a directory"),
    ({"max_model_len": 4096}, "made for 2048 tokens"),
    ({"gpu_memory_utilization": 1.5}, "a fraction above 0"),
    ({"gpu_memory_utilization": 1e-9}, "nothing is left for the KV cache"),
    ({"num_gpu_blocks_override": 1}, "at least 2"),
    ({"num_gpu_blocks_override": 10**12}, r"takes 30,517,578.12 GiB, and this machine has .* fewer"),
    ({"block_size": 10**12, "num_gpu_blocks_override": 9}, "a KV cache of 9 blocks of 1000000000000 tokens takes"),
    ({"max_num_seqs": 10**12}, "the batch of max_num_seqs = 1000000000000 .* lower max_num_seqs"),
    ({"enable_chunked_prefill": False, "max_num_batched_tokens": 64}, "without chunked prefill"),
    ({"enable_chunked_prefill": "no"}, "enable_chunked_prefill is 'no'; it must be True or False"),
    ({"async_scheduling": "yes"}, "async_scheduling is 'yes'; it must be True or False"),
]
RANKS = [
    ({"tensor_parallel_size": 3}, "use one of 1, 2, 4, 8$"),
    ({"tensor_parallel_size": 0}, "tensor_parallel_size is 0; it must be a whole number of at least 1"),
    ({"tensor_parallel_size": "2"}, "at least 1"),
    ({"pipeline_parallel_size": 99}, r"pipeline_parallel_size is 99, but .* has \d+ layers, .* at most \d+$"),
    ({"tensor_parallel_size": 2, "distributed_executor_backend": "uni"}, r'"uni" runs 1 rank, but .* is 2: use "mp"$'),
    ({"pipeline_parallel_size": 2, "distributed_executor_backend": "uni"}, r'x pipeline_parallel_size is 2: use "mp"$'),
    ({"distributed_executor_backend": "MP"}, "^distributed_executor_backend is 'MP'; it must be one of mp, ray, uni$"),
    ({"distributed_executor_backend": ["mp"]}, "^distributed_executor_backend is"),
]
COMBINATIONS = [
    ({"pipeline_parallel_size": 2, "speculative_config": TWO_DRAFTS}, "speculative_config conflicts with"),
    ({"pipeline_parallel_size": 2, "async_scheduling": True}, "async_scheduling conflicts with pipeline_parallel_s"),
    ({"pipeline_parallel_size": 2, "kv_transfer_config": FILES}, "pipeline_parallel_size"),
    ({"data_parallel_size": 2, "kv_transfer_config": FILES}, "data_parallel_size"),
    ({"use_kv_cache": False, "kv_transfer_config": FILES}, "use_kv_cache"),
    ({"async_scheduling": True, "parts": OWN_STEPS}, "needs the engine's own schedule: leave it out"),
    ({"parts": {}}, "it must be Parts"),
    ({"parts": Parts(policy=3)}, "the part policy is 3; it must be SchedulingPolicy"),  # type: ignore[arg-type]
    ({"parts": NO_CONNECTOR, "kv_transfer_config": FILES}, r"parts\.policy: leave out its schedule and find_prefix"),
    *(({"parts": OWN_POOL, name: value}, r"pool\) cannot go to another process") for name, value in APART.items()),
]
DRAFTS = [
    ("ngram", "dictionary"),
    ({"method": "ngram"}, "num_speculative_tokens"),
    (TWO_DRAFTS | {"method": "draft_model"}, "needs a model"),
    (TWO_DRAFTS | {"method": "ngram", "model": "some"}, "leave model out"),
    (TWO_DRAFTS | {"method": 0}, "method is 0; it must be one of ngram"),
    (DRAFT_MODEL | {"draft_sample_method": "random"}, "greedy, probabilistic"),
    (TWO_DRAFTS | {"draft_sample_method": "probabilistic"}, "needs a method with a model"),
    (TWO_DRAFTS | {"rejection_sample_method": "block"}, "no key 'rejection_sample_method'"),
    (TWO_DRAFTS | {"num_speculative_tokens_per_batch_size": []}, "must be a list"),
    (TWO_DRAFTS | {"num_speculative_tokens_per_batch_size": [(1, 2)]}, "that ascend from 1"),
    (TWO_DRAFTS | {"num_speculative_tokens_per_batch_size": [(2, 3, 1)]}, "that ascend from 1"),
    (TWO_DRAFTS | {"num_speculative_tokens_per_batch_size": [(1, 3, 2), (3, 4, 1)]}, "that ascend from 1"),
    (TWO_DRAFTS | {"num_speculative_tokens_per_batch_size": [(2, 1, 2)]}, "that ascend from 1"),
    ({"num_speculative_tokens": True}, "at least 1"),
    (TWO_DRAFTS | {"lookup": 3}, "prompt_lookup_max"),
    (TWO_DRAFTS | {"prompt_lookup_max": 2, "prompt_lookup_min": 3}, "exceeds"),
]
CONNECTORS = [
    ("ExampleConnector", "must be a dictionary"),
    ({"kv_connector": "Nothing"}, "there is no kv_connector"),
    ({"kv_connector": "ExampleConnector"}, "needs a folder"),
    ({"kv_role": "kv_both"}, "lacks kv_connector"),
    (FILES | {"kv_role": "both"}, "kv_role is 'both'"),
    (FILES | {"color": 1}, "no key 'color'"),
    (FILES | {"kv_connector_extra_config": {"x": "\ud800"}}, "extra_config is not valid text: it has half a char"),
    (FILES | {"kv_connector_extra_config": {"shared_storage_path": "a\0"}}, "null byte"),
]
TIERS = [
    ({"kv_offloading_size": 0}, "must be a number of GiB above 0"),
    ({"kv_offloading_size": 1.0, "enable_prefix_caching": False}, "leave enable_prefix_caching on"),
    ({"kv_offloading_size": 1.0, "use_kv_cache": False}, "leave it True"),
    ({"kv_offloading_size": 0.5, "kv_transfer_config": {"kv_connector": "TCPConnector"}}, "engine has one connector"),
]
REFUSED = [
    *SIZES,
    *RANKS,
    *COMBINATIONS,
    *(({"speculative_config": config}, said) for config, said in DRAFTS),
    *(({"kv_transfer_config": config}, said) for config, said in CONNECTORS),
    *TIERS,
]


@pytest.mark.parametrize(("settings", "said"), REFUSED, ids=[said for _, said in REFUSED])
def test_settings_that_cannot_be_are_refused_in_one_line(settings: dict[str, Any], said: str) -> None:
    assert_refused(said, LLM, EMBEDDED_MODEL, **{"device": "cpu", **settings})


def test_parts_that_are_none_are_refused() -> None:
    assert_refused("the part attention is 3", Parts, attention=3)
    assert_refused("the policy's victim is 3; it must be a function", SchedulingPolicy, victim=3)


def test_parts_of_the_front_end_go_with_other_processes_and_a_rule_for_victims_with_a_connector() -> None:
    EngineArgs(parts=Parts(stop_strings=list), multiprocess=True, tensor_parallel_size=2)
    EngineArgs(kv_transfer_config=FILES, parts=Parts(policy=SchedulingPolicy(victim=min)))
