"""`data_parallel_backend="ray"`: what is refused, in one line each. `tests/cluster` runs it on two
hosts.
"""

from types import SimpleNamespace

import pytest

from minivllm import LLM
from minivllm.config import EMBEDDED_MODEL
from minivllm.engine.core_process_manager import died
from minivllm.errors import MinivllmError
from minivllm.executor import ray_actors


def test_without_ray_it_is_one_line(monkeypatch):
    """Ray places even a single core, because the GPU may be on another machine."""
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(MinivllmError, match=r"^ray is not installed: run `uv sync --group dist`"):
        LLM(EMBEDDED_MODEL, data_parallel_backend="ray")


def test_a_lost_core_is_named():
    lost = died(1, ["a Ray actor", "a Ray actor"], "has ended, or its machine cannot be reached")
    assert lost.startswith("the engine's core 1 of 2 (a Ray actor) has ended, or its machine cannot be reached")


def test_a_cluster_that_does_not_answer_is_one_line(monkeypatch):
    def init(**_):
        raise ConnectionError("nobody at 10.78.0.1:6390")

    ray = SimpleNamespace(is_initialized=lambda: False, init=init)
    monkeypatch.setattr(ray_actors, "import_ray", lambda: ray)
    with pytest.raises(MinivllmError, match=r"^cannot join the Ray cluster: nobody at 10.78.0.1:6390; is RAY_ADDRESS"):
        LLM(EMBEDDED_MODEL, data_parallel_backend="ray")
