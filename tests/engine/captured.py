"""Graphs captured by a recorder that a test brings, such as one that records nothing."""

from minivllm.worker.cuda_graphs import Record
from minivllm.worker.model_runner import ModelRunner


def capture_with(runner: ModelRunner, record: Record) -> None:
    assert runner.attention is not None
    runner.cuda_graphs.capture(record, runner.model, runner.attention, runner.settings, runner.lora)
