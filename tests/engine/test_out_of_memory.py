"""A step that runs out of memory says what to lower; every other error is raised unchanged."""

import pytest
import torch

from minivllm.errors import MinivllmError
from minivllm.platforms.out_of_memory import explain_out_of_memory


def torchs_own() -> RuntimeError:
    with pytest.raises(RuntimeError) as refused:
        torch.empty(2**55)
    return refused.value


def test_errors_of_torch_a_gpu_and_python_are_explained_in_one_line_and_no_others():
    for error in (torchs_own(), torch.OutOfMemoryError("CUDA out of memory. Tried …\nmore"), MemoryError()):
        explained = explain_out_of_memory(error)
        assert isinstance(explained, MinivllmError)
        assert "lower max_num_batched_tokens" in str(explained)
        assert "\n" not in str(explained)
    for error in (RuntimeError("shapes differ"), ValueError("out of memory"), KeyboardInterrupt()):
        assert explain_out_of_memory(error) is None
