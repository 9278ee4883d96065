"""Load the scripts that train the embedded models as modules."""

import importlib
from collections.abc import Callable, Iterator
from types import ModuleType

import pytest

from minivllm.config import EMBEDDED_MODEL


@pytest.fixture(scope="module")
def load_script() -> Iterator[Callable[[str], ModuleType]]:
    """Load a training script by name; it can import its neighbours, as a script can."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(EMBEDDED_MODEL.parent)
        yield importlib.import_module
