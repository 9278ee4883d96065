"""Pause Python's garbage collector while many long-lived objects are allocated."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def while_loading() -> Iterator[None]:
    """Pause the collector in a `with` block that loads objects for the lifetime of the process, and
    exempt them from later scans.

    Scanning torch again and again takes a sixth of its import time. A process that does this must
    end with `os._exit`: an ordinary exit would not free what was loaded, and Triton's bindings
    complain about that.

    In vLLM v0.33.0: `vllm/utils/gc_utils.py` (`freeze_gc_heap`).
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if was_enabled:
            gc.enable()
