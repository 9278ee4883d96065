"""Kernels of lesson scripts run where all kernels do (`device`); mutants are counted for the
score at the end.
"""

import pytest
from kernels.conftest import device

from lessons import harness

__all__ = ["device"]


@pytest.fixture(autouse=True)
def _note_mutants(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(harness, "noted", request.node.user_properties)
