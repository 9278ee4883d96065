"""The executors by name, and what the core may rely on: steps in flight, a reset, and an exception anywhere."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import Future
from itertools import count

import psutil
import pytest
from executor.rank_double import Ending
from executor.test_rank_processes import have_ended, interrupted_after, interrupted_at_line, pids_of, quickest
from patience import PATIENCE

from minivllm.config import EMBEDDED_DRAFT, ModelConfig
from minivllm.core.scheduler_output import CachedRequestData, ModelRunnerOutput, NewRequestData, SchedulerOutput
from minivllm.engine.arg_utils import EngineArgs
from minivllm.errors import MinivllmError, WorkerDiedError
from minivllm.executor.abstract import Executor
from minivllm.executor.factory import get_class, make_executor
from minivllm.executor.kv_output_aggregator import KVOutputAggregator
from minivllm.executor.multiproc_executor import MultiprocExecutor
from minivllm.executor.rank_processes import RankProcesses
from minivllm.executor.uniproc_executor import UniprocExecutor
from minivllm.sampling_params import SamplingParams
from minivllm.worker.settings import WorkerSettings

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
    args = EngineArgs(
        model=EMBEDDED_DRAFT,
        device="cpu",
        tensor_parallel_size=size,
        max_model_len=96,
        max_num_seqs=4,
        block_size=BLOCK_SIZE,
    )
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
    """What one rank in this process samples, step by step."""
    return tokens_of(started(1))


def steps() -> Iterator[SchedulerOutput]:
    """Prompts, then decodes: made without a look at any token, as a scheduler does that is a step ahead."""
    blocks = count(1)
    new = [
        NewRequestData(
            req_id,
            prompt,
            prompt,
            [next(blocks) for _ in range(0, len(prompt) + NUM_STEPS, BLOCK_SIZE)],
            0,
            PARAMS[req_id],
        )
        for req_id, prompt in PROMPTS.items()
    ]
    counts = {req_id: len(prompt) for req_id, prompt in PROMPTS.items()}
    yield SchedulerOutput(new, CachedRequestData(), counts, sum(counts.values()), {}, set(), set())
    for step in range(NUM_STEPS - 1):
        known = [length + step for length in counts.values()]
        cached = CachedRequestData(list(counts), [None] * len(counts), known)
        yield SchedulerOutput([], cached, dict.fromkeys(counts, 1), len(counts), {}, set(), set())


def tokens_of(executor: Executor, in_flight: bool = False) -> list[dict[str, list[int]]]:
    executor.collective_rpc("reset")
    if not in_flight:
        return [executor.execute_model(step).sampled_token_ids for step in steps()]
    futures: list[Future[ModelRunnerOutput]] = [executor.execute_model(step, non_block=True) for step in steps()]
    return [future.result().sampled_token_ids for future in futures]


@pytest.mark.parametrize(
    ("backend", "size", "chosen"),
    [
        (None, 1, UniprocExecutor),
        (None, 2, MultiprocExecutor),
        ("uni", 1, UniprocExecutor),
        ("mp", 1, MultiprocExecutor),
    ],
)
def test_executors_by_name(backend, size, chosen):
    assert get_class(backend, size) is chosen


@pytest.mark.parametrize("backend", ["roy", "MP", "", 3, ["mp"]])
def test_a_name_that_there_is_not(backend):
    with pytest.raises(
        MinivllmError, match=r'^there is no distributed_executor_backend .*: use one of "mp", "ray", "uni"'
    ):
        make_executor(settings_for(1), backend)


def test_one_process_cannot_be_two_ranks():
    with pytest.raises(MinivllmError, match=r'"uni" runs 1 rank, but tensor_parallel_size is 2: use "mp"$'):
        make_executor(settings_for(2), "uni")


def test_one_rank_in_a_process_of_its_own(expected):
    executor = started(1, "mp")
    assert isinstance(executor, MultiprocExecutor)
    try:
        assert tokens_of(executor) == expected
    finally:
        executor.shutdown()
    assert have_ended(pids_of(executor.ranks), 0.0)


def test_steps_in_flight_give_the_same_tokens(pair, expected):
    """No step waits for the engine to read the one before: rank 0 tells the others what it sampled."""
    assert tokens_of(pair) == expected
    assert tokens_of(pair, in_flight=True) == expected
    assert tokens_of(started(1), in_flight=True) == expected
    assert [len(tokens) for tokens in expected] == [len(PROMPTS)] * NUM_STEPS


def test_a_future_of_one_process_holds_the_error(monkeypatch):
    executor = started(1)
    monkeypatch.setattr(executor, "worker", None)
    future = executor.execute_model(next(steps()), non_block=True)
    assert future.done()
    assert isinstance(future.exception(), AttributeError)


def test_a_reset_forgets_requests_in_the_middle(pair, expected):
    for executor in (pair, started(1)):
        executor.collective_rpc("reset")
        for step in list(steps())[:3]:
            executor.execute_model(step)
        assert tokens_of(executor) == expected


def test_after_an_interrupt_at_any_line_of_the_executor_the_tokens_are_right(pair, expected):
    number, interrupted = 1, True
    while interrupted:
        interrupted = interrupted_at_line(number, lambda: tokens_of(pair), where=f"minivllm{os.sep}executor")
        assert tokens_of(pair) == expected, number
        number += 43
    assert number > 300


def test_after_a_signal_at_any_moment_the_tokens_are_right(pair, expected):
    a_run, interrupted = quickest(lambda: tokens_of(pair)), 0
    for number in range(30):
        moment = a_run * (1 + number) / 20
        interrupted += interrupted_after(moment, lambda: tokens_of(pair, in_flight=number % 2 == 0))  # noqa: B023
        assert tokens_of(pair) == expected, number
    assert interrupted > 8


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
    """Address and port of each socket on which one of the processes waits for connections."""
    places = [place for pid in pids for place in psutil.Process(pid).net_connections()]
    return {(place.laddr.ip, place.laddr.port) for place in places if place.status == "LISTEN"}


KILLED = """
import os, signal
from executor.test_executors import pids_of, started
print(*pids_of(started(1, "mp").ranks), flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_parent_that_is_killed_leaves_no_file_and_no_process(tmp_path):
    environment = {**os.environ, "TMPDIR": str(tmp_path), "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-P", "-c", KILLED], env=environment, capture_output=True, text=True)
    assert done.returncode == -signal.SIGKILL
    assert have_ended([int(done.stdout)])
    assert not list(tmp_path.iterdir())


def test_ray_that_is_not_installed_is_one_line(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(MinivllmError, match=r"^ray is not installed: run `uv sync --group dist`"):
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
    assert sorted(one.name for one in tmp_path.iterdir()) == noted
