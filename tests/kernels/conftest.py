"""Fixtures of the kernel tests: `device` gives every numerics test an interpreted and a compiled
variant.
"""

import pytest
import torch


@pytest.fixture(
    params=[
        pytest.param("cpu", marks=pytest.mark.interpreted, id="interpreted"),
        pytest.param("cuda", marks=pytest.mark.gpu),
    ]
)
def device(request: pytest.FixtureRequest) -> torch.device:
    """Return where the kernel under test runs: in Triton's interpreter on the CPU, or compiled on a
    GPU.
    """
    return torch.device(request.param)
