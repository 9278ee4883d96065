"""Test what the host tier stores and loads, with a scheduler, slow copies and no model."""

import json
from random import Random
from typing import Any

import pytest
from core.connector_double import config_double
from core.offload_double import OffloadingWorkerDouble
from core.test_random_workloads import SEEDS, toy_model
from core.test_remote_kv import ConnectorRun
from hypothesis import given, settings
from refusals import assert_refused

from minivllm.config import DraftingConfig, KVTransferConfig
from minivllm.core.block_pool import KVCacheBlock
from minivllm.core.kv_connector import KVConnectorOutput
from minivllm.core.kv_offload import LookupResult
from minivllm.core.request import Request, RequestStatus
from minivllm.engine.step_recorder import StepRecorder
from minivllm.kv_connector.offload.scheduler import OffloadScheduler

SIZE = 4


def connector_of(use_eagle: bool = False, num_usable: int | None = 30, **extra: Any) -> OffloadScheduler:
    """Make a connector whose tier has `num_usable` blocks of 100 bytes each besides the null block."""
    transfer = KVTransferConfig(
        kv_connector="SimpleCPUOffloadConnector",
        kv_connector_extra_config={"num_cpu_blocks": num_usable and num_usable + 1} | extra,
    )
    config = config_double(SIZE)
    object.__setattr__(config, "kv_transfer_config", transfer)
    object.__setattr__(config, "use_eagle", use_eagle)
    connector = OffloadScheduler(config)
    connector.set_xfer_handshake_metadata({0: 100})
    return connector


class OffloadRun(ConnectorRun):
    """A scheduler with a pool of 10 usable blocks of 4 tokens, a tier of 30, and a worker that
    copies.
    """

    worker: OffloadingWorkerDouble

    def __init__(
        self, tier: OffloadScheduler, *, rng: Random | None = None, most_steps: int = 1, **settings: Any
    ) -> None:
        self.tier, rng = tier, rng or Random(0)
        super().__init__(tier, OffloadingWorkerDouble(SIZE, toy_model, rng, most_steps), rng, **settings)

    def answer(self, name: str, prompt: list[int], max_tokens: int = 1, **arguments: Any) -> Request:
        """Add a request and step until none is left."""
        request = self.add(name, prompt, max_tokens, **arguments)
        self.finish()
        return request

    def has(self, request: Request) -> list[bool]:
        """Return, for each of a request's blocks, whether the tier has it."""
        return [self.tier.manager.lookup(key) is LookupResult.HIT for key in request.block_hashes]

    def finish(self) -> int:
        total = super().finish()
        assert self.tier.manager.block_pool.get_usage() == 0, "a block of the tier stays pinned"
        assert not self.tier._loads
        assert not self.tier._stores
        assert not self.tier._followed
        return total


def run_with_evicted_blocks(**settings: Any) -> tuple[OffloadRun, Request]:
    """Serve `first`, then another request that takes its blocks; the tier keeps a copy of them."""
    run = OffloadRun(connector_of(), **settings)
    first = run.answer("first", prompt_of(0, 12))
    run.answer("other", prompt_of(1, 37))
    return run, first


def prompt_of(number: int, length: int) -> list[int]:
    """Return a prompt that shares no block with the prompts of other numbers."""
    return [number + 4 * (place % 50) for place in range(length)]


def hits(run: OffloadRun) -> int:
    stats = run.scheduler.make_stats().connector_prefix_cache_stats
    assert stats is not None
    return stats.hits + stats.preempted_hits


def test_eager_store_and_load_roundtrip() -> None:
    """A second request with the first one's prompt gets back the blocks that the pool has lost."""
    run, first = run_with_evicted_blocks()
    assert run.has(first) == [True] * 3
    assert run.scheduler.kv_cache_manager.get_computed_blocks(first)[1] == 0
    again = run.add("again", [*prompt_of(0, 12), 9], 2)
    assert run.step() == {}, "its blocks are on their way"
    assert again.status is RequestStatus.WAITING_FOR_REMOTE_KVS
    run.finish()
    assert again.num_external_computed_tokens == 12
    assert hits(run) == 12


def test_a_drafter_that_looks_ahead_leaves_out_the_last_block_that_matches() -> None:
    run = OffloadRun(connector_of(use_eagle=True))
    first = run.answer("first", prompt_of(0, 12))
    assert run.tier.get_num_new_matched_tokens(Request("x", first.prompt_token_ids, max_tokens=1), 0) == (0, False)
    longer = Request("y", [*first.prompt_token_ids, 1], max_tokens=1)
    longer.enable_block_hashes(SIZE)
    assert run.tier.get_num_new_matched_tokens(longer, 0) == (8, True)
    run.tier.request_finished(longer, [])


def test_chunked_prefill_stores_the_blocks_that_each_chunk_fills() -> None:
    run = OffloadRun(connector_of(), max_num_batched_tokens=6, num_gpu_blocks=12)
    request = run.add("r", prompt_of(0, 20))
    stored = []
    while run.scheduler.has_unfinished_requests():
        output = run.schedule()
        table = run.scheduler.kv_cache_manager.get_block_ids("r")
        for job in output.kv_connector_metadata.stores.values():
            stored.append([table.index(block_id) for block_id in job.block_ids])
        run.update()
    assert stored == [[0], [1, 2], [3], [4]]
    assert run.has(request) == [True] * 5


def test_partial_gpu_prefix_plus_cpu_load() -> None:
    """The pool still has the head of the prefix, the tier has the rest."""
    run = OffloadRun(connector_of())
    run.answer("first", prompt_of(0, 20))
    run.answer("other", prompt_of(1, 29))
    again = run.add("again", [*prompt_of(0, 20), 9], 2)
    num_local = run.scheduler.kv_cache_manager.get_computed_blocks(again)[1]
    assert 0 < num_local < 20
    run.finish()
    assert again.num_cached_tokens == 20
    assert again.num_external_computed_tokens == 20 - num_local


def test_toctou_what_is_being_loaded_is_pinned() -> None:
    """Until the promised blocks are loaded, the tier must not evict them."""
    run = OffloadRun(connector_of(num_usable=2))
    run.answer("first", prompt_of(0, 8))
    asking = Request("asking", [*prompt_of(0, 8), 1], max_tokens=1)
    asking.enable_block_hashes(SIZE)
    for _ in range(2):
        assert run.tier.get_num_new_matched_tokens(asking, 0) == (8, True)
        assert run.tier.manager.block_pool.get_usage() == 0, "a question changes nothing"
    blocks = [KVCacheBlock(block_id) for block_id in (1, 2, 3)]
    run.tier.update_state_after_alloc(asking, blocks, 8)
    assert run.tier.manager.prepare_store([b"another key"]) is None
    run.tier.update_connector_output(KVConnectorOutput(finished_recving={"asking"}))
    assert run.tier.manager.block_pool.get_usage() == 0


def test_prompts_only_by_default_and_answers_where_it_is_asked() -> None:
    for prompt_only, expected in ((True, [True, False, False]), (False, [True, True, True])):
        run = OffloadRun(connector_of(offload_prompt_only=prompt_only))
        assert run.has(run.answer("r", prompt_of(0, 6), 7)) == expected


def test_blocks_that_wait_for_a_copy_are_given_back_before_anybody_is_preempted() -> None:
    """Stores take long, and the pool is just large enough once the blocks that they hold are given
    back.
    """
    run = OffloadRun(connector_of(num_usable=40), num_gpu_blocks=9, most_steps=50, rng=Random(3))
    run.add("short", prompt_of(0, 8), 1)
    run.step()
    run.add("long", prompt_of(1, 20), 12)
    run.finish()
    assert run.scheduler.num_preemptions == 0
    assert run.worker.num_flushes > 0


def test_a_step_that_fails_makes_the_tier_forget_all() -> None:
    run, first = run_with_evicted_blocks(most_steps=5)
    run.add("again", [*prompt_of(0, 12), 9], 2)
    run.step()
    run.fail_step()
    assert not any(run.has(first))
    run.finish()


def test_reset_cache_forgets_all_unless_a_copy_is_under_way() -> None:
    run = OffloadRun(connector_of(), most_steps=5)
    run.add("r", prompt_of(0, 12), 9)
    output = run.schedule()
    run.update()
    assert run.tier.tier_state() == {"blocks": 30, "used": 0, "loading": 0, "storing": 3}
    assert json.loads(StepRecorder(run.scheduler).snapshot(output))["tier"] == [30, 0, 0, 3]
    assert run.tier.reset_cache() is False
    run.finish()
    assert run.tier.reset_cache() is True
    assert run.tier.tier_state()["used"] == 0


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ({"num_usable": None}, "has no size"),
        ({"offload_prompts_only": True}, "no key 'offload_prompts_only'; did you mean 'offload_prompt_only'"),
        ({"color": 1}, "no key 'color'"),
        ({"offload_prompt_only": None}, "offload_prompt_only"),
        ({"store_threshold": 2}, "no key"),
        ({"num_usable": None, "cpu_bytes_to_use": 99}, "a block of 4 tokens takes 100"),
        ({"num_usable": 10**16}, "this machine has"),
        ({"num_cpu_blocks": 1}, "at least 2"),
    ],
)
def test_what_cannot_be_is_refused_in_one_line(extra: dict[str, Any], message: str) -> None:
    assert_refused(message, connector_of, **extra)


@settings(max_examples=50, deadline=None)
@given(seed=SEEDS)
def test_whatever_the_workload_the_tier_changes_no_token_and_leaks_no_block(seed: int) -> None:
    """Pools, slow copies, priorities, chunks, drafts, aborts and failed steps vary."""
    rng = Random(seed)
    ahead = rng.random() < 0.4
    extra = {"num_usable": rng.choice([1, 3, 8, 40]), "offload_prompt_only": rng.random() < 0.4}
    num_drafts = 0 if ahead else rng.choice([0, 0, 2])
    run = OffloadRun(
        connector_of(**extra), ahead=ahead, rng=rng, most_steps=rng.choice([1, 2, 6]),
        num_gpu_blocks=rng.randint(12, 20), max_num_seqs=rng.choice([2, 3, 16]),
        max_num_batched_tokens=rng.choice([16, 20, 64]), policy=rng.choice(["fcfs", "priority"]),
        scheduler_reserve_full_isl=rng.random() < 0.5, drafting=DraftingConfig(num_speculative_tokens=num_drafts),
    )  # fmt: skip
    heads = [[rng.randrange(4) for _ in range(30)] for _ in range(3)]
    run.serve(
        rng.choice(heads)[: rng.randint(1, 30)] + [rng.randrange(4) for _ in range(rng.randint(1, 4))]
        for _ in range(rng.randint(2, 12))
    )
    assert all(output.error is None for output in run.last.values())
