"""Compiled loops on the threads that PyTorch's own operators use.

A second pool of threads beside PyTorch's is slow: after every operator PyTorch's threads go on spinning for a while in
the hope of more work, on the very cores that the second pool needs. numba's layers are such pools, "omp" too (it brings
the system's OpenMP library, not the copy in PyTorch's wheel). So a loop asks PyTorch's library for a parallel region,
`GOMP_parallel`, as PyTorch's operators do, and its threads take the programs one by one from a shared counter.
"""

from __future__ import annotations

import ctypes
import functools
import sys
from array import array
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path

import torch

LIBRARY = {"linux": "libtorch_cpu.so", "darwin": "libtorch_cpu.dylib"}


@functools.cache
def has_numba() -> bool:
    """Whether there is something to run on the threads: loops that numba compiles."""
    return find_spec("numba") is not None


def run_programs(function: Callable[[int], object], numbers: Iterable[int], most_threads: int | None = None) -> None:
    """Run what `programs.compile_programs` made, on PyTorch's threads or on fewer.

    The block that it reads is a 0, from which the programs are counted, and `numbers`.
    """
    block = array("q", [0, *numbers])
    threads = torch.get_num_threads()
    run_on_threads(function, block.buffer_info()[0], threads if most_threads is None else min(threads, most_threads))


def run_on_threads(function: Callable[[int], object], address: int, threads: int) -> None:
    """Call the C function `function(address)` on `threads` threads at once, and wait for all.

    `function` is a `ctypes` function that may run on any thread, such as `numba.cfunc(...).ctypes`.
    """
    if threads <= 1:
        function(address)
        return
    region = parallel_region()
    if region is not None:
        region(function, address, threads, 0)
        return
    pool = _pool(threads - 1)
    others = [pool.submit(function, address) for _ in range(threads - 1)]
    function(address)
    for other in others:
        other.result()


@functools.cache
def parallel_region() -> Callable[..., None] | None:
    """`GOMP_parallel(function, address, threads, flags)` of the library that PyTorch is linked with; None without."""
    library = Path(torch.__file__).parent / "lib" / LIBRARY.get(sys.platform, "")
    try:
        region = ctypes.CDLL(str(library)).GOMP_parallel  # looked up in what the library is linked with
    except (OSError, AttributeError):
        return None
    region.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint)
    region.restype = None
    return region


@functools.cache
def _pool(threads: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(threads, thread_name_prefix="minivllm")
