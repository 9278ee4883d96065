"""Python's garbage collector, which looks for garbage also where many objects are made of which none is."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def at_rest() -> Iterator[None]:
    """A `with` block that makes many objects to keep: the collector does not look through them again and again."""
    was_enabled = gc.isenabled()
    try:
        gc.disable()
        yield
    finally:
        if was_enabled:
            gc.enable()


@contextmanager
def while_loading() -> Iterator[None]:
    """A `with` block that loads what a process needs for good: the collector rests, and never looks at it afterwards.

    Looking through torch again and again is a sixth of what its import takes. A process that does this ends with
    `os._exit`: taken apart as usual, it would leave what it has loaded behind, and Triton's bindings complain of that.

    In vLLM v0.33.0: `vllm/utils/gc_utils.py` (`freeze_gc_heap`).
    """
    with at_rest():
        try:
            yield
        finally:
            gc.freeze()
