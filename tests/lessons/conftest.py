"""Run the kernels of lesson scripts where all kernels run (`device`), and count mutants for the
score at the end.
"""

import pytest
from kernels.conftest import device

from lessons import harness

__all__ = ["device"]


@pytest.fixture(autouse=True)
def _note_mutants(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(harness, "noted", request.node.user_properties)
