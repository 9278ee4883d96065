"""Test that each of several cores gets its own GPUs, that their answers are joined, and that they
end with their client.
"""

import gc
import threading
import weakref

import pytest
import zmq
from patience import PATIENCE
from refusals import assert_refused

from minivllm.core.engine_messages import UtilityOutput
from minivllm.engine.arg_utils import EngineArgs
from minivllm.engine.core_client import joined_answers
from minivllm.engine.core_process_manager import VISIBLE_DEVICES, CoreProcesses, _gpus


def test_a_core_has_a_gpu_for_each_rank_of_each_stage(monkeypatch):
    monkeypatch.setattr("torch.cuda.device_count", lambda: 8)
    monkeypatch.delenv(VISIBLE_DEVICES, raising=False)
    args = EngineArgs(data_parallel_size=2, tensor_parallel_size=2, pipeline_parallel_size=2)
    assert [_gpus(args, rank) for rank in (0, 1)] == [["0", "1", "2", "3"], ["4", "5", "6", "7"]]
    monkeypatch.setattr("torch.cuda.device_count", lambda: 7)
    assert_refused("with 4 GPUs for each core, which needs 8: only 7 are here", _gpus, args, 0)


ANSWERS = [([True, True], True), ([True, False], False), (["a", "b"], "a"), ([None, None], None)]


@pytest.mark.parametrize(("results", "joined"), ANSWERS)
def test_of_several_answers_booleans_are_joined_and_else_the_first_is_kept(results, joined):
    answers = [UtilityOutput(1, result, None) for result in results]
    assert joined_answers("stop_step_events", answers) == joined


def test_the_garbage_collector_can_end_the_cores_of_an_unreferenced_client():
    """The finalizer must not wait forever for sockets that are collected with the client."""

    class Client:
        pass

    client, cores = Client(), CoreProcesses(EngineArgs())
    client.itself, client.socket = client, cores.bind(zmq.PULL, "output")
    ended = weakref.finalize(client, cores.end)
    del client, cores
    collection = threading.Thread(target=gc.collect, daemon=True)
    collection.start()
    collection.join(PATIENCE)
    assert not collection.is_alive()
    assert not ended.alive
