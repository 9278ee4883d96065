"""The executors by name, and what the core may rely on: steps in flight, a reset, and an
exception anywhere.
"""

import os
import time
from collections.abc import Iterator
from concurrent.futures import Future
from itertools import count
from types import SimpleNamespace

import psutil
import pytest
from executor.rank_double import Ending
from executor.test_rank_processes import have_ended, interrupted_at_line, pids_of
from patience import PATIENCE
from refusals import assert_refused

from minivllm.config import EMBEDDED_DRAFT, ModelConfig
from minivllm.core.scheduler_output import CachedRequestData, ModelRunnerOutput, NewRequestData, SchedulerOutput
from minivllm.engine.arg_utils import EngineArgs
from minivllm.errors import MinivllmError, WorkerDiedError
from minivllm.executor.abstract import Executor
from minivllm.executor.factory import make_executor
from minivllm.executor.kv_output_aggregator import KVOutputAggregator
from minivllm.executor.multiproc_executor import MultiprocExecutor
from minivllm.executor.rank_processes import RankProcesses
from minivllm.executor.ray_executor import interface_of
from minivllm.sampling_params import SamplingParams
from minivllm.worker.settings import WorkerSettings
from minivllm.worker.worker import LOOPBACK_INTERFACE

pytestmark = pytest.mark.usefixtures("warm_processes")

BLOCK_SIZE, NUM_BLOCKS, NUM_STEPS = 16, 40, 6
PROMPTS = {
    "greedy": [(7 * position + 5) % 900 for position in range(40)],
    "penalized": [5, 6, 5, 6, 5],
    "seeded": [(3 * position + 1) % 900 for position in range(23)],
}
PARAMS = {
    "greedy": SamplingParams(temperature=0.0),
    "penalized": SamplingParams(temperature=0.0, repetition_penalty=1.4),
    "seeded": SamplingParams(temperature=0.9, seed=3),
}


def settings_for(size: int) -> WorkerSettings:
    limits = {"max_model_len": 96, "max_num_seqs": 4, "block_size": BLOCK_SIZE}
    args = EngineArgs(model=EMBEDDED_DRAFT, device="cpu", tensor_parallel_size=size, **limits)
    scheduler = args.scheduler_config(ModelConfig.from_pretrained(EMBEDDED_DRAFT), None)
    return args.worker_settings(scheduler, "cpu", 2)


def started(size: int, backend: str | None = None) -> Executor:
    executor = make_executor(settings_for(size), backend)
    executor.collective_rpc("initialize_kv_cache", NUM_BLOCKS)
    return executor


@pytest.fixture(scope="module")
def pair() -> Iterator[MultiprocExecutor]:
    executor = started(2)
    assert isinstance(executor, MultiprocExecutor)
    yield executor
    executor.shutdown()


@pytest.fixture(scope="module")
def expected() -> list[dict[str, list[int]]]:
    """Return the tokens that one rank in this process samples step by step."""
    return tokens_of(started(1))


def steps() -> Iterator[SchedulerOutput]:
    """Yield a step of prompts, then decodes, without looking at any token, like a scheduler that is
    one step ahead.
    """
    new, blocks = [], count(1)
    for req_id, prompt in PROMPTS.items():
        table = [next(blocks) for _ in range(0, len(prompt) + NUM_STEPS, BLOCK_SIZE)]
        new.append(NewRequestData(req_id, prompt, prompt, table, 0, PARAMS[req_id]))
    counts = {req_id: len(prompt) for req_id, prompt in PROMPTS.items()}
    yield SchedulerOutput(new, CachedRequestData(), counts, sum(counts.values()), {}, set(), set())
    for step in range(NUM_STEPS - 1):
        known = [length + step for length in counts.values()]
        cached = CachedRequestData(list(counts), [None] * len(counts), known)
        yield SchedulerOutput([], cached, dict.fromkeys(counts, 1), len(counts), {}, set(), set())


def tokens_of(executor: Executor, in_flight: bool = False) -> list[dict[str, list[int]]]:
    executor.collective_rpc("reset")
    if not in_flight:
        return [executor.start_model(step).result().sampled_token_ids for step in steps()]
    futures: list[Future[ModelRunnerOutput]] = [executor.start_model(step) for step in steps()]
    return [future.result().sampled_token_ids for future in futures]


def test_one_rank_in_a_process_of_its_own(expected):
    executor = started(1, "mp")
    assert isinstance(executor, MultiprocExecutor)
    try:
        assert tokens_of(executor) == expected
    finally:
        executor.shutdown()
    assert have_ended(pids_of(executor.ranks), 0.0)


def test_steps_in_flight_give_the_same_tokens(pair, expected):
    """No step waits until the engine has read the one before: rank 0 tells the others what it
    sampled.
    """
    assert tokens_of(pair) == expected
    assert tokens_of(pair, in_flight=True) == expected
    assert tokens_of(started(1), in_flight=True) == expected
    assert [len(tokens) for tokens in expected] == [len(PROMPTS)] * NUM_STEPS


def test_a_future_of_one_process_holds_the_error(monkeypatch):
    executor = started(1)
    monkeypatch.setattr(executor, "worker", None)
    future = executor.start_model(next(steps()))
    assert future.done()
    assert isinstance(future.exception(), AttributeError)


def test_a_reset_forgets_requests_in_the_middle(pair, expected):
    for executor in (pair, started(1)):
        executor.collective_rpc("reset")
        for step in list(steps())[:3]:
            executor.start_model(step).result()
        assert tokens_of(executor) == expected


def test_after_an_interrupt_at_any_line_of_the_executor_the_tokens_are_right(pair, expected):
    number, interrupted = 1, True
    while interrupted:
        interrupted = interrupted_at_line(number, lambda: tokens_of(pair), where=f"minivllm{os.sep}executor")
        assert tokens_of(pair) == expected, number
        number += 61
    assert number > 300


def test_two_pairs_at_once_do_not_meet(pair, expected):
    other = started(2)
    assert isinstance(other, MultiprocExecutor)
    assert tokens_of(other) == tokens_of(pair) == expected
    other.shutdown()
    with pytest.raises(WorkerDiedError, match="shut down"):
        tokens_of(other)
    assert tokens_of(pair) == expected


def test_nothing_listens_but_on_the_loopback_address():
    before = listeners([os.getpid()])  # UCX, if this process has loaded NIXL for another test
    pair = started(2)
    assert isinstance(pair, MultiprocExecutor)
    added = listeners([os.getpid(), *pids_of(pair.ranks)]) - before
    pair.shutdown()
    assert added
    assert {address for address, _ in added} <= {"127.0.0.1", "::1"}


def listeners(pids: list[int]) -> set[tuple[str, int]]:
    """Return the address and port of each socket on which the processes listen."""
    places = [place for pid in pids for place in psutil.Process(pid).net_connections()]
    return {(place.laddr.ip, place.laddr.port) for place in places if place.status == "LISTEN"}


def test_the_interface_of_an_address_is_named():
    assert interface_of("127.0.0.1") == LOOPBACK_INTERFACE
    with pytest.raises(MinivllmError, match="no network interface has the address 192"):
        interface_of("192.0.2.1")  # kept for documentation


def test_ray_that_is_not_installed_is_one_line(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert_refused(r"^ray is not installed: run `uv sync --group dist`", make_executor, settings_for(2), "ray")


def test_a_ray_cluster_that_does_not_answer_is_one_line(monkeypatch):
    def init(**_):
        raise ConnectionError("nobody at 10.78.0.1:6390")

    ray = SimpleNamespace(is_initialized=lambda: False, init=init)
    monkeypatch.setattr("minivllm.executor.ray_executor.import_ray", lambda: ray)
    with pytest.raises(MinivllmError, match=r"^cannot join the Ray cluster: nobody at 10.78.0.1:6390; is RAY_ADDRESS"):
        make_executor(settings_for(2), "ray")


@pytest.mark.parametrize(
    ("has_connector", "seconds", "noted"),
    [(True, 0.0, ["0", "1"]), (True, 2 * PATIENCE, []), (False, 0.0, [])],
    ids=["connector", "connector that hangs", "none"],
)
def test_ranks_end_what_their_connector_has_started(tmp_path, monkeypatch, has_connector, seconds, noted):
    monkeypatch.setattr("minivllm.executor.multiproc_executor.SECONDS_TO_LEAVE", 0.5 if seconds else PATIENCE)
    executor = MultiprocExecutor.__new__(MultiprocExecutor)
    executor._aggregator = KVOutputAggregator(2, 0) if has_connector else None
    executor.ranks = RankProcesses(Ending, (str(tmp_path), seconds), 2)
    began = time.monotonic()
    executor.shutdown()
    executor.shutdown()
    assert time.monotonic() - began < PATIENCE
    assert have_ended(pids_of(executor.ranks))
    assert sorted(file.name for file in tmp_path.iterdir()) == noted
