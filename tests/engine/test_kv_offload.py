"""A tier below the pool changes no token, whatever the settings, though most requests are
preempted.
"""

import functools
import re
from typing import Any

import pytest
from engine.mixed_requests import all_blocks_are_free, greedy_answers, random_prompts, run_out

from minivllm import LLM
from minivllm.config import EMBEDDED_DRAFT, EMBEDDED_MODEL
from minivllm.config.units import GIB
from minivllm.engine.arg_utils import EngineArgs
from minivllm.engine.prometheus import PrometheusStatLogger
from minivllm_lab.engines.inside import core_of

pytestmark = pytest.mark.usefixtures("warm_processes")

SMALL: dict[str, Any] = {
    "model": EMBEDDED_MODEL, "device": "cpu", "max_model_len": 96, "block_size": 8, "num_gpu_blocks_override": 15,
    "max_num_batched_tokens": 40,
}  # fmt: skip
DRAFTS = {"method": "draft_model", "model": str(EMBEDDED_DRAFT), "num_speculative_tokens": 2}
NGRAM = {"method": "ngram", "num_speculative_tokens": 3}


ASKED = random_prompts(0, 7, heads=(30, 60), tails=(1, 12))


def answers(llm: LLM) -> list[list[int]]:
    return greedy_answers(llm, ASKED, max_tokens=20)


def with_tier(size: float = 0.01, **extra: Any) -> dict[str, Any]:
    return {"kv_offloading_size": size, "kv_transfer_config": {"kv_connector_extra_config": extra}}


def check_nothing_is_held(llm: LLM) -> None:
    """Wait for the copies that a thread makes after the last answer, then expect every block to be
    free.
    """
    run_out(core_of(llm))
    side = core_of(llm).scheduler.remote.connector
    assert all_blocks_are_free(llm)
    assert side.manager.block_pool.get_usage() == 0
    assert (side.tier_state()["loading"], side.tier_state()["storing"]) == (0, 0)


@functools.cache
def expected(kv_cache_dtype: str = "auto") -> list[list[int]]:
    """Return the tokens of an engine with enough blocks for all requests."""
    plain = SMALL | {"num_gpu_blocks_override": 200, "max_num_batched_tokens": 512}
    return answers(LLM(**plain, kv_cache_dtype=kv_cache_dtype))


ENGINES = [
    ({"kv_cache_dtype": "int8", "scheduling_policy": "priority"}, {}),
    ({"speculative_config": DRAFTS}, {"offload_prompt_only": False}),
    ({"speculative_config": NGRAM, "async_scheduling": True}, {"num_cpu_blocks": 30}),
    ({"tensor_parallel_size": 2}, {}),
    ({"pipeline_parallel_size": 2}, {}),
]


@pytest.mark.parametrize(("settings", "extra"), ENGINES)
def test_the_same_tokens_with_a_tier(request: Any, settings: dict[str, Any], extra: dict[str, Any]) -> None:
    llm = LLM(**SMALL | settings, **with_tier(**extra))
    request.addfinalizer(llm.shutdown)
    for _ in range(2):
        assert answers(llm) == expected(settings.get("kv_cache_dtype", "auto"))
        check_nothing_is_held(llm)
    stats = core_of(llm).scheduler.make_stats()
    assert stats.connector_prefix_cache_stats.hits + stats.connector_prefix_cache_stats.preempted_hits > 64
    assert stats.num_preemptions > 3


def test_a_tier_counts_by_vllms_names_and_a_restart_empties_it_and_costs_nobody_a_token() -> None:
    llm = LLM(**SMALL, **with_tier())
    engine, core = llm.llm_engine, core_of(llm)
    engine.stat_logger = PrometheusStatLogger(engine.engine_args, engine.engine_core.engines, "m")
    assert [answers(llm), answers(llm)] == [expected(), expected()]
    families = engine.stat_logger.registry.collect()
    values = {sample.name: sample.value for family in families for sample in family.samples}
    queries, hits = (values[f"vllm:external_prefix_cache_{name}_total"] for name in ("queries", "hits"))
    assert queries > hits > 64
    assert values["vllm:kv_offload_load_bytes_total"] > 0
    assert 0 < values["vllm:kv_offload_cpu_cache_usage_perc"] < 1
    assert core.scheduler.remote.connector.tier_state()["used"] > 0
    assert core.reset_prefix_cache(reset_running_requests=True)
    assert core.scheduler.remote.connector.tier_state()["used"] == 0
    assert answers(llm) == expected()
    check_nothing_is_held(llm)


def test_the_tier_is_in_the_report_of_memory(caplog: pytest.LogCaptureFixture) -> None:
    """The tier takes its memory from the cache's share on a CPU."""
    settings = {name: value for name, value in SMALL.items() if name != "num_gpu_blocks_override"}
    plain, llm = LLM(**settings), LLM(**settings, **with_tier(0.25))
    rows = {row.name: row.bytes for row in core_of(llm).ledger.rows}
    assert rows["KV cache, second tier in host memory"] == GIB // 4
    assert sum(rows.values()) == core_of(llm).ledger.device.memory_bytes
    assert core_of(plain).ledger.num_blocks >= core_of(llm).ledger.num_blocks
    said = [record.getMessage() for record in caplog.records]
    assert any(re.match(r"Memory: 0\.2\d+ GiB KV cache in host memory \([\d,]+ blocks\)", line) for line in said)


def test_options_stand_where_vllm_has_them() -> None:
    explicit = {"kv_connector": "OffloadingConnector", "kv_connector_extra_config": {"cpu_bytes_to_use": 2**20}}
    assert EngineArgs(kv_transfer_config=explicit).host_tier_bytes == 2**20
    joined = EngineArgs(
        kv_offloading_size=0.5, kv_transfer_config={"kv_connector_extra_config": {"offload_prompt_only": False}}
    )
    assert joined.kv_transfer is not None
    assert joined.kv_transfer.kv_connector_extra_config == {"cpu_bytes_to_use": GIB // 2, "offload_prompt_only": False}
    assert EngineArgs(kv_offloading_size=0.5, pipeline_parallel_size=2, data_parallel_size=2).kv_transfer is not None
