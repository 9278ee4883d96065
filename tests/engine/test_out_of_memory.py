"""A step that runs out of memory says what to lower; every other error is raised unchanged."""

import pytest
import torch

from minivllm.errors import MinivllmError
from minivllm.platforms.out_of_memory import explain_out_of_memory


def test_torchs_own_error_is_explained_in_one_line():
    with pytest.raises(RuntimeError) as refused:
        torch.empty(2**55)
    explained = explain_out_of_memory(refused.value)
    assert isinstance(explained, MinivllmError)
    assert "lower max_num_batched_tokens" in str(explained)
    assert "\n" not in str(explained)


@pytest.mark.parametrize(
    "error", [torch.OutOfMemoryError("CUDA out of memory. Tried …\nmore"), MemoryError()], ids=repr
)
def test_a_gpus_and_pythons_too(error):
    explained = explain_out_of_memory(error)
    assert explained is not None
    assert "\n" not in str(explained)


@pytest.mark.parametrize(
    "error", [RuntimeError("shapes differ"), ValueError("out of memory"), KeyboardInterrupt()], ids=repr
)
def test_another_error_is_not(error):
    assert explain_out_of_memory(error) is None
