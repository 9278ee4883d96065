"""Compile the loops that every request needs before the first one comes, on two cores at once.

    python -m minivllm.kernels.cpu.compile_ahead float32 float32 attention_loops replay_loops

numba compiles on one core: a lock lets no two threads compile at the same time. So where its cache
has nothing of these loops, a second process compiles half of them, and this one the others; then
this one reads what the second has left in the cache. Where nothing can be kept on disk, each process
compiles for itself. No torch: the second process would take seconds to import it.
"""

from __future__ import annotations

import functools
import subprocess
import sys
import time
from importlib import import_module
from typing import Any

import numpy as np

from minivllm.logger import init_logger

logger = init_logger(__name__)

# What of each module the type of numbers and that of the cache need.
LOOPS = {
    "elementwise_loops": lambda loops, number, cached: [
        form(number) for form in (loops.norms_of, loops.gates_of, loops.rotations_of)
    ],
    "panel_linear_loops": lambda loops, number, cached: loops.programs_for(number),
    "cache_loops": lambda loops, number, cached: loops.quantizer() if cached is np.int8 else loops.copies_of(number),
    "replay_loops": lambda loops, number, cached: loops.programs_for(),
    "attention_loops": lambda loops, number, cached: loops.programs_for(number, cached),
    "gumbel_loops": lambda loops, number, cached: loops.compiled_programs(),
}
BY_THE_SECOND = ("attention_loops", "replay_loops")  # about half of the work


@functools.cache
def compile_ahead(number: type, cached: type) -> None:
    """Compile the loops for models of `number`, np.float32 or np.uint16 (bfloat16), and caches of
    `cached`, one of these or np.int8; or read them from numba's cache.

    A process's later engines use what was compiled for its first.
    """
    start = time.monotonic()
    if import_module("minivllm.kernels.cpu.elementwise_loops").norms_of(number).was_cached is not False:
        compile_modules(LOOPS, number, cached)
        return
    logger.info("Compiling loops for this processor, which happens once and takes five to ten seconds")
    command = [sys.executable, "-P", "-m", __name__, number.__name__, cached.__name__, *BY_THE_SECOND]
    with subprocess.Popen(command, stdin=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as second:
        compile_modules([name for name in LOOPS if name not in BY_THE_SECOND], number, cached)
        second.wait()
    compile_modules(BY_THE_SECOND, number, cached)
    logger.info("Compiled loops in %.1f s", time.monotonic() - start)


def compile_modules(names: Any, number: type, cached: type) -> None:
    """Compile the loops of these modules, or read them from the cache."""
    for name in names:
        LOOPS[name](import_module(f"minivllm.kernels.cpu.{name}"), number, cached)


if __name__ == "__main__":
    compile_modules(sys.argv[3:], getattr(np, sys.argv[1]), getattr(np, sys.argv[2]))
