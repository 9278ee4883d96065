"""Pause Python's garbage collector while many long-lived objects are allocated."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def at_rest() -> Iterator[None]:
    """Pause the collector in a `with` block that makes many objects to keep, which it would scan
    again and again.
    """
    was_enabled = gc.isenabled()
    try:
        gc.disable()
        yield
    finally:
        if was_enabled:
            gc.enable()


@contextmanager
def while_loading() -> Iterator[None]:
    """Pause the collector in a `with` block that loads what a process keeps for good, and exempt
    that from later scans.

    Scanning torch again and again takes a sixth of its import. A process that does this must end
    with `os._exit`: an ordinary exit would not free what was loaded, and Triton's bindings complain
    of that.

    In vLLM v0.33.0: `vllm/utils/gc_utils.py` (`freeze_gc_heap`).
    """
    with at_rest():
        try:
            yield
        finally:
            gc.freeze()
