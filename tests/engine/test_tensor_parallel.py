"""Check that `tensor_parallel_size=2` gives the tokens of one process, moves the bytes of the
formula, and reports failures.

One engine of two ranks serves all of these tests; to change what is scheduled, they give it another
scheduler. Its ranks fail only where a test tells them to.
"""

import os
import signal
import subprocess
from dataclasses import replace

import pytest
import torch
from engine.mixed_requests import GREEDY, PROMPTS, SHARED, WISHES, completions_of, reschedule, run_out
from executor.failing_worker import PLACES, failing_worker_of_rank
from executor.test_rank_processes import have_ended, pids_of
from refusals import assert_refused
from warm_processes import WarmSubprocess

from minivllm import LLM, SamplingParams, StructuredOutputsParams
from minivllm.config import EMBEDDED_DRAFT, EMBEDDED_MODEL, ModelConfig
from minivllm.core.async_scheduler import AsyncScheduler
from minivllm.engine.arg_utils import EngineArgs
from minivllm.errors import WorkerDiedError, WorkerFailedError
from minivllm.executor.multiproc_executor import check_devices
from minivllm.memory import kv_bytes_per_token
from minivllm_lab.engines.inside import core_of, runner_of

SETTINGS = {
    "device": "cpu", "max_model_len": 96, "max_num_seqs": 6,
    "speculative_config": {"method": "draft_model", "model": str(EMBEDDED_DRAFT), "num_speculative_tokens": 2},
}  # fmt: skip
PROMPTS = [*PROMPTS, SHARED]
WISHES = [
    *WISHES,
    SamplingParams(temperature=0.9, seed=3, structured_outputs=StructuredOutputsParams(regex="(ab|x y ){2,5}")),
]


class OneWarm(WarmSubprocess):
    """A starter that forks the first rank and starts the second as a fresh interpreter, whose sets
    of strings have another order.
    """

    num_started = 0

    def Popen(self, command, **options):
        self.num_started += 1
        start = super().Popen if self.num_started == 1 else subprocess.Popen
        return start(command, **options)


@pytest.fixture(scope="module")
def engines(template):
    """Start an engine of one rank and one of two."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("minivllm.executor.multiproc_executor.worker_of_rank", failing_worker_of_rank)
        if template is not None:
            patch.setattr("minivllm.executor.rank_processes.subprocess", OneWarm(template))
        llms = [LLM(EMBEDDED_MODEL, **SETTINGS, tensor_parallel_size=size) for size in (1, 2)]
    yield llms
    llms[1].shutdown()


@pytest.fixture(scope="module")
def expected(engines):
    """Return the tokens of one rank."""
    return tokens_of(engines[0])


def tokens_of(llm: LLM) -> list[list[list[int]]]:
    return completions_of(llm, PROMPTS, WISHES)


@pytest.mark.parametrize(("caching", "budget", "num_blocks"), [(True, 7, None), (False, 2048, None), (True, 24, 11)])
def test_the_tokens_of_one_process(engines, caching, budget, num_blocks):
    results = []
    for llm in engines:
        reschedule(llm, budget, num_blocks, caching)
        results.append(tokens_of(llm))
        if num_blocks:
            assert llm.llm_engine.stats.num_preemptions > 0, "this pool was to be too small"
    assert results[0] == results[1]
    assert engines[1].llm_engine.stats.spec_decoding_stats.num_drafts > 0


def test_a_rank_has_half_of_the_cache_and_rank_0_all_of_the_drafters(engines):
    whole, half = (core_of(llm).ledger for llm in engines)
    target, drafter = (
        kv_bytes_per_token(ModelConfig.from_pretrained(path), "float32") for path in (EMBEDDED_MODEL, EMBEDDED_DRAFT)
    )
    assert whole.bytes_per_token == target + drafter
    assert half.bytes_per_token == target // 2 + drafter
    ledgers = core_of(engines[1]).executor.collective_rpc("memory_ledger", 0.9, 0)
    assert [any(row.name == "draft model" for row in ledger.rows) for ledger in ledgers] == [True, False]
    assert half.num_blocks == whole.num_blocks == 6 * 96 // 16 + 1, "as many as requests can fill"


def test_the_runner_is_elsewhere(engines):
    assert runner_of(engines[0]).settings.block_size == 16
    assert_refused("runs in other processes", runner_of, engines[1])


def test_more_ranks_than_gpus_are_refused(monkeypatch):
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    args = EngineArgs(model=EMBEDDED_MODEL, tensor_parallel_size=2, max_num_seqs=2, max_num_batched_tokens=32)
    scheduler = args.scheduler_config(ModelConfig.from_pretrained(EMBEDDED_MODEL), None)
    assert_refused("there are 1 here; use no more", check_devices, args.worker_settings(scheduler, "cuda", 2))
    check_devices(args.worker_settings(scheduler, "cpu", 2))


def few_tokens_of(llm: LLM) -> list[list[list[int]]]:
    """Return the tokens of a greedy request, of one with two answers, and of one constrained by a
    grammar.
    """
    few = [0, 2, len(PROMPTS) - 1]
    params = [replace(WISHES[index], max_tokens=6) for index in few]
    return completions_of(llm, [PROMPTS[index] for index in few], params)


@pytest.fixture(scope="module")
def few_expected(engines):
    return few_tokens_of(engines[0])


@pytest.mark.parametrize(("place", "ranks"), [*zip(PLACES, ([1], [0], [1], [0]), strict=True), ("sampling", [0, 1])])
def test_an_exception_on_any_rank_ends_the_step_and_not_the_engine(engines, few_expected, place, ranks):
    """This holds even where the other rank waits for the failing one, in a sum or for the tokens."""
    llm, core = engines[1], core_of(engines[1])
    reschedule(llm, 2048)
    pids = pids_of(core.executor.ranks)
    core.executor.collective_rpc("fail_in", place, ranks)
    with pytest.raises(WorkerFailedError, match=rf"^rank {ranks[0] if len(ranks) == 1 else '.'} of 2: KeyError"):
        llm.generate(PROMPTS, WISHES)
    assert few_tokens_of(llm) == few_expected
    assert pids_of(core.executor.ranks) == pids
    assert not have_ended(pids, 0.0)


def test_steps_in_flight_give_the_same_tokens(engines, expected):
    """Rank 0 sends its drafts to the others with its tokens; then a rank fails while another step
    is in flight.
    """
    llm, core = engines[1], core_of(engines[1])
    reschedule(llm, 2048)
    single = core.scheduler
    core.executor.collective_rpc("keep_drafts", True)
    config = replace(single.config, async_scheduling=True)
    core.scheduler, core._takes_drafts = AsyncScheduler(config, single.cache_config), False
    core.executor.max_concurrent_batches = 2
    assert tokens_of(llm) == expected
    assert core.scheduler.spec_decoding_stats.num_accepted_tokens > 0
    core.executor.collective_rpc("fail_in", "in the layers", [1])
    with pytest.raises(WorkerFailedError, match=r"^rank 1 of 2: KeyError"):
        llm.generate(PROMPTS, WISHES)
    assert tokens_of(llm) == expected
    run_out(core)
    core.executor.collective_rpc("reset")
    core.executor.collective_rpc("keep_drafts", False)
    core.scheduler, core._takes_drafts, core.executor.max_concurrent_batches = single, True, 1


def test_a_rank_that_is_killed_ends_the_run(engines):
    """This test runs last: the other rank is inside a sum and loses its peer."""
    core = core_of(engines[1])
    pids, start = pids_of(core.executor.ranks), core.executor.start_model

    def killed_before(scheduler_output):
        os.kill(pids[1], signal.SIGKILL)
        return start(scheduler_output)

    core.executor.start_model = killed_before
    with pytest.raises(WorkerDiedError, match=rf"rank 1 of 2 \(process {pids[1]}\) .* killed by SIGKILL"):
        engines[1].generate(PROMPTS, GREEDY)
    assert have_ended(pids, 0.0)


@pytest.mark.gpu
def test_on_two_gpus_the_same_tokens_with_graphs():
    if torch.cuda.device_count() < 2:
        pytest.xfail("there is one GPU here")
    results = [
        tokens_of(LLM(EMBEDDED_MODEL, **{**SETTINGS, "device": "cuda", "dtype": "float32"}, tensor_parallel_size=size))
        for size in (1, 2)
    ]
    assert results[0] == results[1]
