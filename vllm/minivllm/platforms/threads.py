"""Run compiled loops on the threads that PyTorch's own operators use.

A second thread pool beside PyTorch's is slow: after every operator, PyTorch's threads keep spinning
for a while in the hope of more work, on the very cores that the second pool needs. numba's
threading layers are such pools, even "omp" (it loads the system's OpenMP library, not the copy in
PyTorch's wheel). So a loop asks PyTorch's library for a parallel region, `GOMP_parallel`, just as
PyTorch's operators do, and its threads take one program at a time from a shared counter.
"""

from __future__ import annotations

import ctypes
import functools
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

import torch

LIBRARY = {"linux": "libtorch_cpu.so", "darwin": "libtorch_cpu.dylib"}

Function = Callable[[int], object]
Cells = ctypes.Structure | ctypes.Array

_this_thread = threading.local()


@functools.cache
def has_numba() -> bool:
    """Return whether numba, which compiles the loops, is installed."""
    return find_spec("numba") is not None


def run_programs(function: Function, cells: Cells, most_threads: int | None = None) -> None:
    """Run a function made by `programs.compile_programs` on up to `most_threads` of PyTorch's
    threads.

    It is called with the address of `cells`, the first of which is the shared program counter,
    initially 0.
    """
    observe = getattr(_this_thread, "observe", None)
    if observe is not None:
        observe(function, cells)
    threads = torch.get_num_threads()
    run_on_threads(function, ctypes.addressof(cells), threads if most_threads is None else min(threads, most_threads))


@contextmanager
def observed_programs(observe: Callable[[Function, Cells], None]) -> Iterator[None]:
    """Call `observe` with the function and its cells before each `run_programs` of this thread."""
    _this_thread.observe = observe
    try:
        yield
    finally:
        _this_thread.observe = None


def run_on_threads(function: Function, address: int, threads: int) -> None:
    """Call the C function `function(address)` on `threads` threads at once, and wait for all of
    them.

    `function` is a `ctypes` function that may run on any thread, such as `numba.cfunc(...).ctypes`.
    """
    if threads <= 1:  # waking a thread costs more than a small step
        function(address)
        return
    region = parallel_region()
    if region is not None:
        region(function, address, threads, 0)
        return
    # Without GNU's OpenMP, as on macOS: a pool, on which the calling thread works, too.
    pool = _pool(threads - 1)
    others = [pool.submit(function, address) for _ in range(threads - 1)]
    function(address)
    for other in others:
        other.result()


@functools.cache
def parallel_region() -> Callable[..., None] | None:
    """Return `GOMP_parallel(function, address, threads, flags)` of PyTorch's OpenMP library, or
    None if it has none.
    """
    library = Path(torch.__file__).parent / "lib" / LIBRARY.get(sys.platform, "")
    try:
        # dlsym also searches the libraries that this one links to.
        region = ctypes.CDLL(str(library)).GOMP_parallel
    except (OSError, AttributeError):
        return None
    region.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint)
    region.restype = None
    return region


@functools.cache
def _pool(threads: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(threads, thread_name_prefix="minivllm")
