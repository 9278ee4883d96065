"""Record what a function runs on a CPU, and run it again without Python: the CPU's CUDA graph.

A step of one request runs some nine programs a layer. Each is fast, and each has a caller in
Python, checks, an allocation, and threads to wake, which together take as long as the work. A
recording is made once, while the function runs: compiled programs are kept by their function and
cells, which name the addresses they read and write, and torch's operators as calls to repeat.
Programs that follow each other run as one list (`replay_loops.py`).

As with CUDA graphs, the function must do the same at every replay: the same addresses, shapes and
grids. It may not look at a tensor's numbers, for whatever it decides would be decided for good.
Memory that it allocates belongs to the recording. Recordings of one `CpuRecorder` share it, since
only one runs at a time.

In vLLM v0.33.0: nothing like it; steps on a CPU are compiled by `torch.compile`.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from minivllm.errors import MinivllmError
from minivllm.kernels.cpu.cells import ReplayCells
from minivllm.kernels.cpu.loops import loops
from minivllm.platforms.threads import Cells, Function, observed_programs, run_on_threads

MOST_CELLS = 32  # of a call
ALLOCATIONS = {"empty", "empty_like", "new_empty"}
# Functions that return a tensor's numbers to Python.
READERS = {
    "item", "tolist", "numpy", "equal", "allclose", "nonzero", "unique", "masked_select",
    "__bool__", "__int__", "__float__", "__index__", "__array__", "__contains__",
}  # fmt: skip


class CannotRecord(MinivllmError):
    """The function looks at numbers that a later run may change."""


class CpuRecorder:
    """Records functions whose memory is shared: while one is replayed, results of another are lost."""

    def __init__(self) -> None:
        self._memory: list[Tensor] = []

    def __call__(self, function: Callable[[], None]) -> Callable[[], None]:
        """Run the function once, and return its replay.

        Raises:
            CannotRecord: it depends on numbers in a tensor.
        """
        recording = _Recording(self._memory)
        with recording, observed_programs(recording.add_program):
            function()
        return recording.finish()


class _Recording(TorchFunctionMode):
    """The calls that a function has made so far. torch calls `__torch_function__` for each of its
    functions and each method of a tensor.

    A `TorchDispatchMode` would see every operator below them too, but its first use imports some
    nine hundred modules, which takes three seconds.
    """

    def __init__(self, memory: list[Tensor]) -> None:
        super().__init__()
        self._memory = memory
        self._allocated = 0
        self._runs: list[Callable[[], object]] = []
        self._programs: list[tuple[Function, bytes]] = []
        self._kept: list[Tensor] = []  # their memory must not be used for anything else

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.__name__ in READERS:
            raise CannotRecord(f"{func.__name__} looks at a tensor's numbers, which a recording would keep for good")
        result = func(*args, **kwargs)
        if func.__name__ in ALLOCATIONS:
            result = self._allocate(result)
            self._kept.append(result)
            return result
        outputs = _tensors_in(result)
        self._kept.extend(outputs)
        again = partial(func, *args, **kwargs)
        if _changes_its_argument(func.__name__) or "out" in kwargs:
            self._add(again)
        elif outputs and not _memory_of(outputs) <= _memory_of(_tensors_in((args, kwargs))):
            self._add(partial(_overwrite, result, again))
        return result  # else a view or a property: nothing to repeat

    def _allocate(self, like: Tensor) -> Tensor:
        """Return memory for a new tensor: that of the n-th one of other recordings, if it is large
        enough.
        """
        index = self._allocated
        self._allocated += 1
        if index == len(self._memory):
            self._memory.append(torch.empty(0, dtype=torch.uint8))
        if self._memory[index].nbytes < like.nbytes or not like.is_contiguous():
            self._memory[index] = torch.empty(like.nbytes, dtype=torch.uint8)
        return self._memory[index][: like.nbytes].view(like.dtype).view(like.shape)

    def add_program(self, function: Function, cells: Cells) -> None:
        """Add a call of a compiled program."""
        self._programs.append((function, bytes(cells)))

    def _add(self, run: Callable[[], object]) -> None:
        self._end_list()
        self._runs.append(run)

    def _end_list(self) -> None:
        if self._programs:
            self._runs.append(ProgramList(self._programs))
            self._programs = []

    def finish(self) -> Callable[[], None]:
        """Return the replay, to be run in inference mode if the function was."""
        self._end_list()
        runs, kept = self._runs, self._kept

        def replay() -> None:
            _ = kept
            for run in runs:
                run()

        return replay


def _changes_its_argument(name: str) -> bool:
    """Return whether a function of this name works in place: `add_`, `__setitem__`, `__iadd__`."""
    if name.startswith("__"):
        return name == "__setitem__" or (name.startswith("__i") and name != "__invert__")
    return name.endswith("_")


def _tensors_in(value: Any) -> list[Tensor]:
    """Return the tensors in a value, also those in tuples, lists and dicts.

    Recording a step takes thousands of calls, each of which torch's `tree_leaves` makes slower.
    """
    if isinstance(value, Tensor):
        return [value]
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, tuple | list) else ()
    return [tensor for part in parts for tensor in _tensors_in(part)]


def _memory_of(tensors: list[Tensor]) -> set[int]:
    """Return the addresses of the memory that the tensors are views of."""
    return {tensor.untyped_storage().data_ptr() for tensor in tensors}


def _overwrite(result: Any, again: Callable[[], Any]) -> None:
    """Compute an operator's result again, at the address of its first result."""
    if isinstance(result, Tensor):
        result.copy_(again())
        return
    for target, source in zip(result, again(), strict=True):
        target.copy_(source)


class ProgramList:
    """Compiled programs that run one after another, each on all threads."""

    def __init__(self, calls: list[tuple[Function, bytes]]) -> None:
        self._functions = [function for function, _ in calls]  # keep them loaded
        self._cells = np.zeros((len(calls), MOST_CELLS), np.int64)
        for row, (_, cells) in zip(self._cells, calls, strict=True):
            row[: len(cells) // 8] = np.frombuffer(cells, np.int64)
        self._counters = self._cells[:, 0]
        loops_of_replay = loops("replay_loops")
        self._table = np.zeros((len(calls), loops_of_replay.ROW), np.int64)
        self._table[:, 0] = [_address_of(function) for function in self._functions]
        self._table[:, 1] = self._cells.ctypes.data + np.arange(len(calls)) * self._cells.strides[0]
        self._replay = loops_of_replay.programs_for()
        give_way = _address_of(ctypes.CDLL(None).sched_yield)  # offers the core to other threads
        self._arguments = ReplayCells(calls=len(calls), table=self._table.ctypes.data, give_way=give_way)

    def __call__(self) -> None:
        """Run them all."""
        self._counters[:] = 0
        run_on_threads(self._replay, ctypes.addressof(self._arguments), torch.get_num_threads())


def _address_of(function: Any) -> int:
    """Return the address of a C function."""
    return ctypes.cast(function, ctypes.c_void_p).value or 0
