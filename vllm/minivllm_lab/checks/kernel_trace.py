"""Count what a Triton kernel reads and writes, byte by byte in Triton's interpreter, in place of a
stopwatch.

    trace = trace_kernel(append_kernel, (requests,), keys, values, k, v, lengths, WIDTH=64)
    trace.bytes_read, trace.arguments["k"].bytes_read, trace.races, trace.out_of_bounds

Each argument is copied into memory of its own for the run, so that what runs off its end is not
taken for the beginning of the next; afterwards it holds what the kernel wrote. Accesses outside are
recorded but not made. The kernel must have been defined with TRITON_INTERPRET=1, which `make check`
sees to.
"""

from __future__ import annotations

import ctypes
import inspect
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import astuple, dataclass, field
from typing import Any, NamedTuple, cast

import numpy as np
import torch

from minivllm.errors import MinivllmError

GUARD = 1 << 24
"""Bytes on either side of an argument that belong to nothing; no page of them is ever touched."""
LOAD, STORE, ATOMIC = "load", "store", "atomic"

Program = tuple[int, ...]


class Access(NamedTuple):
    """A load, store or atomic of one program: which elements of which argument, by number in
    row-major order.
    """

    kind: str
    program: Program
    argument: str
    elements: np.ndarray
    nbytes: int


@dataclass
class Traffic:
    """Bytes moved between the programs and memory. An element counts once for each load or store
    that touches it.

    `bytes_read_once` and `bytes_written_once` count it once for the whole launch: the minimum that
    has to be moved.
    """

    bytes_read: int = 0
    bytes_read_once: int = 0
    bytes_written: int = 0
    bytes_written_once: int = 0


@dataclass
class KernelTrace(Traffic):
    """All accesses of one launch, and what is wrong with them.

    - `programs`: how many ran. `arguments`: traffic by argument. `accesses`: in the order in which
      they were made, one program after the other.
    - `races`: sentences on elements that two programs write, or that one reads and another writes;
      programs run in any order. `out_of_bounds`: sentences on accesses outside every argument.
    """

    programs: int = 0
    arguments: dict[str, Traffic] = field(default_factory=dict)
    accesses: list[Access] = field(default_factory=list)
    races: list[str] = field(default_factory=list)
    out_of_bounds: list[str] = field(default_factory=list)


def trace_kernel(
    kernel: Any, grid: int | Sequence[int], *args: Any, reached: Mapping[str, torch.Tensor] | None = None,
    **constants: Any,
) -> KernelTrace:  # fmt: skip
    """Run `kernel[grid](*args, **constants)` in the interpreter and return what it read and wrote.

    `reached` maps names in the trace to tensors that the kernel finds through a table of addresses.
    They are not copied, contiguous or not.

    Raises:
        MinivllmError: the kernel is compiled, or an argument is not on the CPU.
        Exception: whatever the kernel raised, unwrapped.
    """
    launch = (grid,) if isinstance(grid, int) else tuple(grid)
    names = _parameters(kernel)
    arguments = {**dict(zip(names, args, strict=False)), **constants}
    with _moved(arguments) as (moved, tensors):
        recorder = _Recorder(tensors + [_Tensor(name, tensor) for name, tensor in (reached or {}).items()], launch)
        with recorder.listening():
            _run(kernel, launch, [moved[name] for name in names[: len(args)]], {n: moved[n] for n in constants})
        return recorder.trace()


def _parameters(kernel: Any) -> list[str]:
    try:
        from triton.runtime.interpreter import InterpretedFunction
    except ImportError:
        raise MinivllmError("kernels cannot be traced here: Triton has no build for this platform") from None
    if not isinstance(kernel, InterpretedFunction):
        raise MinivllmError(
            f"{getattr(kernel, '__name__', kernel)!r} is not a kernel in Triton's interpreter: "
            "decorate it with @triton.jit, and set TRITON_INTERPRET=1 before Triton is imported"
        )
    return list(inspect.signature(kernel.fn).parameters)


def _run(kernel: Any, grid: Program, args: list[Any], constants: dict[str, Any]) -> None:
    from triton.runtime.errors import InterpreterError

    try:
        kernel[grid](*args, **constants)
    except InterpreterError as wrapper:
        error: BaseException = wrapper
        while isinstance(error, InterpreterError) and error.__cause__ is not None:
            error = error.__cause__
        raise error from None


# ---- arguments in memory of their own ------------------------------------------------------------


class _Tensor:
    """An argument of the kernel, and the addresses of its elements."""

    def __init__(self, name: str, tensor: torch.Tensor) -> None:
        self.name, self.shape, self.itemsize = name, tuple(tensor.shape), tensor.element_size()
        self.count, self.contiguous = tensor.numel(), tensor.is_contiguous()
        self.begin = tensor.data_ptr()
        if not self.contiguous:  # what lies between its elements is not its own
            offsets = np.zeros(1, np.int64)
            for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
                offsets = (offsets[:, None] + np.arange(size) * stride).reshape(-1)
            self._numbers = np.argsort(offsets, kind="stable")
            self._addresses = self.begin + offsets[self._numbers] * self.itemsize

    def elements(self, addresses: np.ndarray) -> np.ndarray:
        """Map addresses [n] to element numbers in row-major order, -1 for those outside."""
        if self.contiguous:
            numbers, rest = np.divmod(addresses - self.begin, self.itemsize)
            return np.where((numbers >= 0) & (numbers < self.count) & (rest == 0), numbers, -1)
        places = np.searchsorted(self._addresses, addresses).clip(max=self.count - 1)
        return np.where(self._addresses[places] == addresses, self._numbers[places], -1)

    def distance(self, address: int) -> int:
        """Return how many bytes an address lies before or after the tensor."""
        end = self.begin + self.count * self.itemsize
        return max(self.begin - address, address - end, 0)

    def outside(self, address: int) -> str:
        """Describe an address near the tensor in words."""
        if not self.contiguous:
            return f"memory beside the elements of {self.name}, a view of shape {list(self.shape)}"
        number = (address - self.begin) // self.itemsize
        return f"element {number:,} of {self.name}, which has {self.count:,} in shape {list(self.shape)}"

    def element(self, number: int) -> str:
        """Return an element in Python notation: keys[3, 0]."""
        return f"{self.name}[{', '.join(map(str, np.unravel_index(number, self.shape)))}]" if self.shape else self.name


@contextmanager
def _moved(arguments: Mapping[str, Any]) -> Iterator[tuple[dict[str, Any], list[_Tensor]]]:
    """Yield the arguments with each tensor in memory of its own; afterwards copy back what was
    written.

    Tensors whose memory overlaps are moved together and keep their relative positions.
    """
    tensors = {name: value for name, value in arguments.items() if isinstance(value, torch.Tensor)}
    for name, tensor in tensors.items():
        if tensor.device.type != "cpu":
            raise MinivllmError(f"{name} is on {tensor.device}; the interpreter traces tensors on the CPU")
    moved, copies = dict(arguments), []
    for first, last, members in _overlapping(tensors):
        storage = torch.empty(2 * GUARD + 64 + last - first, dtype=torch.uint8)
        place = storage.data_ptr() + GUARD
        place += (first - place) % 64  # as aligned as it was
        ctypes.memmove(place, first, last - first)
        copies.append((first, place, last - first, storage))
        for name in members:
            tensor = tensors[name]
            offset = place - storage.data_ptr() + tensor.data_ptr() - first
            moved[name] = torch.empty(0, dtype=tensor.dtype).set_(
                storage.untyped_storage(), offset // tensor.element_size(), tensor.size(), tensor.stride()
            )
    yield moved, [_Tensor(name, moved[name]) for name in tensors]
    for first, place, size, _ in copies:
        ctypes.memmove(first, place, size)


def _overlapping(tensors: Mapping[str, torch.Tensor]) -> list[tuple[int, int, list[str]]]:
    """Return (first byte, one past the last, names) of each group of tensors that share memory."""
    groups: list[tuple[int, int, list[str]]] = []
    for begin, end, name in sorted((x.data_ptr(), _end(x), name) for name, x in tensors.items() if x.numel()):
        if groups and begin < groups[-1][1]:
            first, last, names = groups.pop()
            groups.append((first, max(last, end), [*names, name]))
        else:
            groups.append((begin, end, [name]))
    return groups


def _end(tensor: torch.Tensor) -> int:
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr() + (last + 1) * tensor.element_size()


# ---- listening to the interpreter ----------------------------------------------------------------


class _Recorder:
    """A layer between the interpreter and memory that records every access and lets only those
    inside an argument through.
    """

    def __init__(self, tensors: list[_Tensor], grid: Program) -> None:
        self.tensors, self.grid = tensors, grid
        self.accesses: list[Access] = []
        self.outside: dict[tuple[str, str], list[str]] = defaultdict(list)
        self.torn: dict[str, str] = {}

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Replace the four operations of the interpreter that touch memory; all others are built on
        these.
        """
        from triton.runtime.interpreter import interpreter_builder

        self.builder = builder = cast(Any, interpreter_builder)
        load, store = builder.create_masked_load, builder.create_masked_store
        rmw, cas = builder.create_atomic_rmw, builder.create_atomic_cas

        def masked_load(ptrs: Any, mask: Any, other: Any, *rest: Any, **more: Any) -> Any:
            other = _undefined(ptrs) if other is None else other  # a handle of zeros is false, too
            return load(ptrs, self._noted(LOAD, ptrs, mask), other, *rest, **more)

        def masked_store(ptrs: Any, value: Any, mask: Any, *rest: Any, **more: Any) -> Any:
            inside = self._noted(STORE, ptrs, mask)
            self._note_torn(ptrs, value, inside)
            return store(ptrs, value, inside, *rest, **more)

        def atomic_rmw(operation: Any, ptr: Any, value: Any, mask: Any, *rest: Any, **more: Any) -> Any:
            return rmw(operation, ptr, value, self._noted(ATOMIC, ptr, mask), *rest, **more)

        def atomic_cas(ptr: Any, compare: Any, value: Any, *rest: Any, **more: Any) -> Any:
            inside = self._noted(ATOMIC, ptr, None)
            if not inside.data.all():
                raise IndexError(f"a compare-and-swap outside every argument: {self._sentences()[-1]}")
            return cas(ptr, compare, value, *rest, **more)

        builder.create_masked_load, builder.create_masked_store = masked_load, masked_store
        builder.create_atomic_rmw, builder.create_atomic_cas = atomic_rmw, atomic_cas
        try:
            yield
        finally:
            for name in ("create_masked_load", "create_masked_store", "create_atomic_rmw", "create_atomic_cas"):
                delattr(builder, name)  # the method of the class again

    @property
    def _program(self) -> Program:
        return tuple(self.builder.grid_idx[: len(self.grid)])

    def _noted(self, kind: str, ptrs: Any, mask: Any) -> Any:
        """Record an access; return its mask without what lies outside."""
        import triton.language as tl
        from triton.runtime.interpreter import TensorHandle

        pointers = np.asarray(ptrs.data)
        wanted = np.ones(pointers.shape, bool)
        if mask is not None:  # the interpreter makes integers of a vector & a scalar, where a GPU has bits
            wanted &= mask.data.astype(bool)
        inside = wanted.copy()
        nbytes = max(ptrs.get_element_ty().primitive_bitwidth // 8, 1)
        left = np.unique(pointers[wanted].astype(np.int64))  # one transaction, however many lanes ask for an element
        for tensor in self.tensors:
            numbers = tensor.elements(left)
            if (numbers >= 0).any():
                self.accesses.append(Access(kind, self._program, tensor.name, numbers[numbers >= 0], nbytes))
                left = left[numbers < 0]
        if len(left):
            inside &= ~np.isin(pointers.astype(np.int64), left)
            self._note_outside(kind, left)
        return TensorHandle(inside, tl.int1)

    def _note_outside(self, kind: str, addresses: np.ndarray) -> None:
        nearest = min(self.tensors, key=lambda tensor: tensor.distance(int(addresses[0])))
        verb = {LOAD: "loads", STORE: "stores to", ATOMIC: "updates"}[kind]
        more = f" (and {len(addresses) - 1:,} more)" if len(addresses) > 1 else ""
        words = f"program {_name(self._program)} {verb} {nearest.outside(int(addresses[0]))}{more}"
        self.outside[kind, nearest.name].append(words)

    def _note_torn(self, ptrs: Any, value: Any, mask: Any) -> None:
        """Record a store that writes different values into one element, since it is undefined which
        of them stays.
        """
        pointers = np.asarray(ptrs.data)[mask.data].astype(np.int64)
        if len(np.unique(pointers)) == len(pointers):
            return
        values = np.broadcast_to(value.data, mask.data.shape)[mask.data]
        order = np.argsort(pointers, kind="stable")
        pointers, bits = pointers[order], values[order].view(np.uint8).reshape(len(order), -1)
        twice = (pointers[1:] == pointers[:-1]) & (bits[1:] != bits[:-1]).any(axis=1)
        for address in pointers[1:][twice][:1]:
            tensor, number = next(
                (tensor, int(index))
                for tensor in self.tensors
                if (index := tensor.elements(np.array([address]))[0]) >= 0
            )
            words = f"one store of program {_name(self._program)} writes several values to {tensor.element(number)}"
            self.torn.setdefault(tensor.name, words)

    def trace(self) -> KernelTrace:
        """Return everything that was recorded as a trace."""
        arguments = {tensor.name: self._traffic(tensor) for tensor in self.tensors}
        return KernelTrace(
            *(sum(counts) for counts in zip(*map(astuple, arguments.values()), strict=True)),
            programs=int(np.prod(self.grid)),
            arguments=arguments,
            accesses=self.accesses,
            races=[race for tensor in self.tensors for race in self._races(tensor)] + list(self.torn.values()),
            out_of_bounds=self._sentences(),
        )

    def _of(self, tensor: _Tensor, *kinds: str) -> list[Access]:
        return [access for access in self.accesses if access.argument == tensor.name and access.kind in kinds]

    def _traffic(self, tensor: _Tensor) -> Traffic:
        counts = []
        for accesses in (self._of(tensor, LOAD, ATOMIC), self._of(tensor, STORE, ATOMIC)):
            elements = [access.elements for access in accesses]
            counts.append(sum(len(access.elements) * access.nbytes for access in accesses))
            counts.append(len(np.unique(np.concatenate(elements))) * accesses[0].nbytes if accesses else 0)
        return Traffic(*counts)

    def _races(self, tensor: _Tensor) -> Iterator[str]:
        """Yield a sentence for each kind of race on an argument: two programs touch an element and
        at least one writes it; two atomics are no race.
        """
        plain, atomic, read = (self._touched(tensor, kind) for kind in (STORE, ATOMIC, LOAD))
        written = np.concatenate([plain, atomic], axis=1)
        yield from self._clashes(tensor, plain, plain, "programs {} and {} both write {}")
        yield from self._clashes(tensor, atomic, plain, "program {} updates and program {} plainly writes {}")
        yield from self._clashes(tensor, read, written, "program {} reads what program {} writes: {}")

    def _touched(self, tensor: _Tensor, kind: str) -> np.ndarray:
        """Return elements and programs, [2, n], each pair once and in order."""
        pairs = [np.zeros((2, 0), np.int64)]
        for access in self._of(tensor, kind):
            program = np.ravel_multi_index(access.program, self.grid)
            pairs.append(np.stack([access.elements, np.full_like(access.elements, program)]))
        return np.unique(np.concatenate(pairs, axis=1), axis=1)

    def _clashes(self, tensor: _Tensor, some: np.ndarray, others: np.ndarray, verb: str) -> Iterator[str]:
        """Yield one sentence if another program in `others` touches an element in `some`."""
        elements, programs = some
        lowest, highest = np.full(tensor.count, np.iinfo(np.int64).max), np.full(tensor.count, -1)
        np.minimum.at(lowest, others[0], others[1])
        np.maximum.at(highest, others[0], others[1])
        other = np.where(lowest[elements] != programs, lowest[elements], highest[elements])
        clash = (highest[elements] >= 0) & (other != programs)
        if not clash.any():
            return
        row = int(np.argmax(clash))
        more = len(np.unique(elements[clash])) - 1
        also = f" (and {more:,} more element{'s' * (more > 1)})" if more else ""
        pair = [_name(self._place(int(number))) for number in (programs[row], other[row])]
        yield verb.format(*pair, tensor.element(int(elements[row]))) + also

    def _place(self, number: int) -> Program:
        return tuple(int(index) for index in np.unravel_index(number, self.grid))

    def _sentences(self) -> list[str]:
        """Return one sentence for each argument and kind of out-of-bounds access: the first one,
        and how many followed.
        """
        return [
            words[0] + (f"; {len(words) - 1:,} such accesses follow" if len(words) > 1 else "")
            for words in self.outside.values()
        ]


def _undefined(ptrs: Any) -> Any:
    """Return NaN for what a load masks without giving `other`, since a GPU may put anything there;
    None, and so 0, for integers.
    """
    from triton.runtime.interpreter import TensorHandle

    element = ptrs.get_element_ty()
    types = {"fp16": np.float16, "fp32": np.float32, "fp64": np.float64}
    if element.name not in types:
        return None
    return TensorHandle(np.full(ptrs.data.shape, np.nan, types[element.name]), element)


def _name(program: Program) -> str:
    """Return a program as text: 3, or (3, 0) on a two-dimensional grid."""
    return str(program[0]) if len(program) == 1 else str(program)
