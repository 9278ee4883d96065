"""Load the scripts that train the embedded models as modules."""

import importlib.util
import sys
from collections.abc import Callable, Iterator
from types import ModuleType

import pytest

from minivllm.config import EMBEDDED_MODEL


@pytest.fixture(scope="module")
def load_script() -> Iterator[Callable[[str], ModuleType]]:
    """Load a training script by name; it can import its neighbours, as a script can."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(EMBEDDED_MODEL.parent)

        def load(name: str) -> ModuleType:
            spec = importlib.util.spec_from_file_location(name, EMBEDDED_MODEL.parent / f"{name}.py")
            assert spec is not None
            assert spec.loader is not None
            module = importlib.util.module_from_spec(spec)
            patch.setitem(sys.modules, name, module)
            spec.loader.exec_module(module)
            return module

        yield load
