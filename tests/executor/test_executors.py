"""The executors by name, where they listen, and what they do at their end."""

import os
import time
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import Mock

import psutil
import pytest
from executor.rank_double import Ending
from executor.test_rank_processes import have_ended, pids_of
from patience import PATIENCE, eventually
from refusals import assert_refused

from minivllm.config import EMBEDDED_DRAFT, ModelConfig
from minivllm.engine.arg_utils import EngineArgs
from minivllm.errors import WorkerFailedError
from minivllm.executor.factory import make_executor
from minivllm.executor.kv_output_aggregator import KVOutputAggregator
from minivllm.executor.multiproc_executor import MultiprocExecutor
from minivllm.executor.rank_processes import RankProcesses
from minivllm.executor.ray_executor import interface_of
from minivllm.executor.uniproc_executor import UniprocExecutor
from minivllm.worker.settings import WorkerSettings
from minivllm.worker.worker import LOOPBACK_INTERFACE

pytestmark = pytest.mark.usefixtures("warm_processes")


def settings_for(size: int) -> WorkerSettings:
    limits = {"max_model_len": 96, "max_num_seqs": 4, "block_size": 16}
    args = EngineArgs(model=EMBEDDED_DRAFT, device="cpu", tensor_parallel_size=size, **limits)
    scheduler = args.scheduler_config(ModelConfig.from_pretrained(EMBEDDED_DRAFT), None)
    return args.worker_settings(scheduler, "cpu", 2)


def test_a_future_of_one_process_holds_the_error(monkeypatch):
    executor = make_executor(settings_for(1))
    monkeypatch.setattr(executor, "worker", None)
    future = executor.start_model(cast(Any, None))
    assert future.done()
    assert isinstance(future.exception(), AttributeError)


def test_steps_that_wait_in_the_queue_are_dropped_by_a_failure_and_by_a_reset(monkeypatch):
    worker, nothing = Mock(), cast(Any, None)
    monkeypatch.setattr("minivllm.executor.uniproc_executor.Worker", lambda _: worker)
    executor = UniprocExecutor(cast(Any, SimpleNamespace(max_concurrent_batches=2)))
    worker.execute_model.side_effect = KeyError("a bug")
    for future in (executor.start_model(nothing), executor.sample_tokens(nothing)):
        with pytest.raises(KeyError):
            future.result()
    executor.collective_rpc("reset")
    worker.execute_model.side_effect = lambda _: eventually(lambda: executor._failure, 1.0)
    executor.start_model(nothing)
    waiting = executor.sample_tokens(nothing)
    executor.collective_rpc("reset")
    with pytest.raises(WorkerFailedError):
        waiting.result()
    executor.shutdown()


def test_engines_have_ports_of_their_own_and_listen_on_the_loopback_address_only():
    before = listeners([os.getpid()])  # UCX, if this process has loaded NIXL for another test
    executors = [make_executor(settings_for(2)), make_executor(settings_for(1), "mp")]
    pids = [pid for executor in executors for pid in pids_of(executor.ranks)]
    added = listeners([os.getpid(), *pids]) - before
    for executor in executors:
        executor.shutdown()
    assert len(pids) == 3
    assert have_ended(pids, 0.0)
    assert added
    assert {address for address, _ in added} <= {"127.0.0.1", "::1"}


def listeners(pids: list[int]) -> set[tuple[str, int]]:
    """Return the address and port of each socket on which the processes listen."""
    places = [place for pid in pids for place in psutil.Process(pid).net_connections()]
    return {(place.laddr.ip, place.laddr.port) for place in places if place.status == "LISTEN"}


def test_the_interface_of_an_address_is_named():
    assert interface_of("127.0.0.1") == LOOPBACK_INTERFACE
    assert_refused("no network interface has the address 192", interface_of, "192.0.2.1")  # kept for documentation


def test_ray_that_is_not_installed_is_one_line(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert_refused(r"^ray is not installed: run `uv sync --group dist`", make_executor, settings_for(2), "ray")


def test_a_ray_cluster_that_does_not_answer_is_one_line(monkeypatch):
    def init(**_):
        raise ConnectionError("nobody at 10.78.0.1:6390")

    ray = SimpleNamespace(is_initialized=lambda: False, init=init)
    monkeypatch.setattr("minivllm.executor.ray_executor.import_ray", lambda: ray)
    assert_refused("^cannot join .*: nobody at 10.78.0.1:6390; is RAY_ADDRESS", make_executor, settings_for(2), "ray")


@pytest.mark.parametrize(
    ("has_connector", "seconds", "noted"), [(True, 0.0, ["0", "1"]), (True, 2 * PATIENCE, []), (False, 0.0, [])]
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
