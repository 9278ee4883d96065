"""The four proofs of a kernel, each in a few lines of a test.

(a) numerics: take the `device` fixture (conftest.py), run the kernel on that device,
    `assert_close(actual, reference)` against a float64 reference on `awkward_lengths(block)`,
    `HEAD_DIMS`, `GROUPS`;
(b) ahead-of-time compilation on four targets: `assert_compiles(kernel, arguments, options)`;
(c) the same numerics compiled on a GPU: the `device` fixture's "cuda" variant, with the mark `gpu`;
(d) the CPU twin: `assert_twin(kernel_result, twin_result)`.

Kernels of lesson scripts are loaded with `script("01_kv_cache").some_kernel`. The harness needs
only torch, triton and pytest, so that it runs on a common CUDA image.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch

from minivllm.kernels import attention_launch
from minivllm_lab.aot import SHARED_MEMORY, TARGETS, Compiled, compile_for
from minivllm_lab.checks.kernel_trace import KernelTrace, trace_kernel
from minivllm_lab.exercise import load

HEAD_DIMS = (64, 80, 128)
GROUPS = (1, 2, 3, 5, 7, 8)
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
SCRIPTS = Path(__file__).resolve().parents[2] / "vllm"
UNTOUCHED = -7.0
"""The value that fills an output before a kernel writes to it, in the tests of attention."""

_TOLERANCE = {torch.float64: 1e-9, torch.float32: 2e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}


@functools.cache
def script(name: str) -> Any:
    """Load the lesson script of this name, once."""
    return load(SCRIPTS / f"{name}.py")


def awkward_lengths(block: int) -> list[int]:
    """Return lengths at which kernels go wrong: zero, one, around one block, and ragged over
    several.
    """
    return sorted({0, 1, block - 1, block, block + 1, 2 * block + 3, 5 * block - 2} - {-1})


def assert_close(
    actual: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype | None = None, scale: float = 1.0
) -> None:
    """Expect `actual` to equal the reference within what `dtype` (default: `actual`'s) can resolve.

    The bound is `scale` × a few roundings of the largest magnitude in `expected` (at least 1).
    """
    assert actual.shape == expected.shape, f"shape {tuple(actual.shape)}, expected {tuple(expected.shape)}"
    if expected.numel() == 0:
        return
    result, wanted = actual.detach().cpu().double(), expected.detach().cpu().double()
    assert torch.isfinite(result).all(), f"not finite at {(~torch.isfinite(result)).nonzero()[0].tolist()}"
    bound = scale * _TOLERANCE[dtype or actual.dtype] * max(1.0, wanted.abs().max().item())
    error = (result - wanted).abs()
    worst = error.argmax().item()
    where = [int(index) for index in torch.unravel_index(torch.tensor(worst), error.shape)]
    assert error.max() <= bound, (
        f"off by {error.max():.3g} (allowed {bound:.3g}) at {where}: "
        f"{result.flatten()[worst]:.6g}, expected {wanted.flatten()[worst]:.6g}; "
        f"{(error > bound).sum()} of {error.numel()} wrong"
    )


def assert_twin(kernel: torch.Tensor, twin: torch.Tensor, scale: float = 1.0) -> None:
    """Expect kernel and CPU twin to agree: bit for bit where nothing is rounded (integers, or
    `scale` 0), else closely.
    """
    assert kernel.dtype == twin.dtype, f"kernel gives {kernel.dtype}, twin {twin.dtype}"
    if scale == 0 or not kernel.dtype.is_floating_point:
        assert torch.equal(kernel.cpu(), twin.cpu()), "kernel and twin differ"
    else:
        assert_close(kernel, twin, scale=scale)


def assert_compiles(
    kernel: Any,
    arguments: Mapping[str, Any],
    options: Mapping[str, Any] | None = None,
    *,
    targets: Sequence[str] = TARGETS,
    tensor_core: bool = False,
    load_bytes: int | None = None,
) -> dict[str, Compiled]:
    """Compile for each target; shared memory must fit and nothing may spill.

    `arguments`: an example for every parameter by name (tensor, "*bf16", number, None, constexpr
    value); `options`: num_warps, num_stages. With `tensor_core` the code must contain matrix
    instructions (`Compiled.tensor_core` says which); with `load_bytes` the widest load from device
    memory must be at least that wide.
    """
    built = {target: compile_for(target, kernel, arguments, options) for target in targets}
    for target, code in built.items():
        said = f"{code.kernel} on {target} with {dict(options or {})}"
        assert code.fits, f"{said}: {code.shared} bytes of shared memory, {SHARED_MEMORY[target]} there"
        assert code.spilled == 0, f"{said}: {code.spilled} bytes spilled ({code.registers} registers)"
        assert not tensor_core or code.tensor_core, f"{said}: no matrix instruction"
        widest = max(code.loads, default=0)
        assert load_bytes is None or widest >= load_bytes, f"{said}: loads are {dict(code.loads)}"
    return built


@contextmanager
def on_threads(count: int) -> Iterator[None]:
    """Let torch and the compiled loops use `count` threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def each_twin(module: Any, *others: str) -> Any:
    """Make a fixture that runs `module` in each of its CPU forms, numba's and torch's, and returns
    the form's name.
    """

    @pytest.fixture(params=["numba", "torch", *others])
    def twin(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
        if request.param == "numba":
            pytest.importorskip("numba")
        monkeypatch.setattr(module, "has_numba", lambda: request.param == "numba")
        return request.param

    return twin


def intercept_launches(monkeypatch: pytest.MonkeyPatch, module: Any, names: Sequence[str], launch: Callable) -> None:
    """Call `launch(kernel, grid, arguments, constants, options)` where these kernels of `module` are
    launched.
    """

    class Intercepted:
        def __init__(self, kernel: Any) -> None:
            self.kernel = kernel

        def __getitem__(self, grid: tuple[int, ...]) -> Callable:
            def launched(*arguments: Any, **constants: Any) -> None:
                options = {name: constants.pop(name) for name in ("num_warps", "num_stages") if name in constants}
                launch(self.kernel, grid, arguments, constants, options)

            return launched

    for name in names:
        monkeypatch.setattr(module, name, Intercepted(getattr(module, name)))


def trace_launches(monkeypatch: pytest.MonkeyPatch, module: Any, *names: str) -> dict[str, KernelTrace]:
    """Trace each launch of these kernels of `module`; no launch may race or access memory outside
    its arguments.

    Returns the traces by kernel, which are complete after the launches.
    """
    traces = {}

    def trace(kernel: Any, grid: tuple[int, ...], arguments: Any, constants: Any, _options: Any) -> None:
        name = kernel.fn.__name__
        traces[name] = trace_kernel(kernel, grid, *arguments, **constants)
        assert not traces[name].races, f"{name}: {traces[name].races}"
        assert not traces[name].out_of_bounds, f"{name}: {traces[name].out_of_bounds}"

    intercept_launches(monkeypatch, module, names, trace)
    return traces


def compile_launches(monkeypatch: pytest.MonkeyPatch, module: Any, *names: str, **proof: Any) -> dict[str, Any]:
    """Compile each launch of these kernels of `module` instead of running it, with `assert_compiles`
    and its keywords `proof`.

    Returns what it returns by kernel, which is complete after the launches. Tensors may be on the
    device "meta".
    """
    built = {}

    def compiled(kernel: Any, _grid: Any, arguments: Any, constants: Any, options: Any) -> None:
        examples = dict(zip(kernel.arg_names, arguments, strict=False)) | constants
        built[kernel.fn.__name__] = assert_compiles(kernel, examples, options, **proof)

    monkeypatch.setattr(attention_launch, "INTERPRETED", False)  # the interpreter multiplies in fp32 only
    intercept_launches(monkeypatch, module, names, compiled)
    return built


# ---- attention over paged caches: data and reference ---------------------------------------------


def start_locations(query_lengths: Sequence[int], device: torch.device | str = "cpu") -> torch.Tensor:
    """Return `query_start_loc`: prefix sums of the query lengths, int32 `[sequences + 1]`."""
    sums = torch.tensor([0, *query_lengths], dtype=torch.int64).cumsum(0)
    return sums.to(torch.int32).to(device)


def random_block_table(
    lengths: Sequence[int], block_size: int, spare_blocks: int = 3, seed: int = 0
) -> tuple[torch.Tensor, int]:
    """Return a block table, int32 `[sequences, max blocks]`, that scatters the sequences over the
    pool, and the pool's size in blocks.

    Block 0, the null block, belongs to no sequence; unused entries are 0.
    """
    needed = [math.ceil(length / block_size) for length in lengths]
    num_blocks = 1 + sum(needed) + spare_blocks
    free = (torch.randperm(num_blocks - 1, generator=torch.Generator().manual_seed(seed)) + 1).tolist()
    table = torch.zeros(len(lengths), max([1, *needed]), dtype=torch.int32)
    for row, count in enumerate(needed):
        table[row, :count] = torch.tensor([free.pop() for _ in range(count)], dtype=torch.int32)
    return table, num_blocks


def poisoned_caches(
    lengths: Sequence[int], block_size: int, *shapes: tuple[int, ...], dtype: torch.dtype = torch.float32, seed: int = 0
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Return a block table and random caches `[blocks, block_size, *shape]`, one for each shape.

    Slots that hold no sequence's token are NaN, which must never be read.
    """
    table, blocks = random_block_table(lengths, block_size, seed=seed)
    caches = [torch.full((blocks, block_size, *shape), torch.nan, dtype=dtype) for shape in shapes]
    for row, length in enumerate(lengths):
        at = torch.arange(length)
        for cache in caches:
            cache[table[row][at // block_size].long(), at % block_size] = torch.randn(length, *cache.shape[2:]).to(
                dtype
            )
    return table, caches


def gather_paged(cache: torch.Tensor, block_table: torch.Tensor, sequence: int, length: int) -> torch.Tensor:
    """Gather a sequence's `[length, kv_heads, head_dim]` from a paged cache `[blocks, block_size,
    kv_heads, head_dim]`.
    """
    positions = torch.arange(length, device=cache.device)
    blocks = block_table[sequence].to(cache.device).long()[positions // cache.shape[1]]
    return cache[blocks, positions % cache.shape[1]]


def reference_attention(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    scale: float,
    sliding_window: int | None = None,
) -> torch.Tensor:
    """Compute causal attention of one sequence in float64: the queries are the last `len(q)` of its
    `len(keys)` positions.

    q `[queries, heads, d]`, keys and values `[length, kv_heads, d]` -> `[queries, heads, d]`.
    """
    q, keys, values = (tensor.detach().cpu().double() for tensor in (q, keys, values))
    group = q.shape[1] // keys.shape[1]
    keys, values = keys.repeat_interleave(group, 1), values.repeat_interleave(group, 1)
    scores = torch.einsum("qhd,khd->hqk", q, keys) * scale
    asking = torch.arange(len(q))[:, None] + len(keys) - len(q)
    asked = torch.arange(len(keys))[None, :]
    seen = asked <= asking
    if sliding_window is not None:
        seen &= asked > asking - sliding_window
    weights = torch.softmax(scores.masked_fill(~seen, -math.inf), dim=-1)
    return torch.einsum("hqk,khd->qhd", weights, values)


def random_lengths(draw: Random, sequences: int, queries: int, past: int) -> list[tuple[int, int]]:
    """Draw the `(queries, keys)` of up to `sequences` sequences: decodes, chunks, and some without a
    query.
    """
    new = [draw.choice([0, 1, 1, draw.randint(2, queries)]) for _ in range(draw.randint(1, sequences))]
    return [(count, count + draw.choice([0, draw.randint(0, past)])) for count in new]


@dataclass
class PagedStep:
    """A kernel's arguments (q, caches, query_start_loc, seq_lens, block_table), the tensor it should
    write to, and the `(queries, keys)` of each sequence.
    """

    arguments: tuple[torch.Tensor, ...]
    scale: float
    out: torch.Tensor
    lengths: Sequence[tuple[int, int]]

    def on(self, device: torch.device | str) -> Any:
        tensors = tuple(tensor.to(device) for tensor in self.arguments)
        return replace(self, arguments=tensors, out=self.out.to(device).clone())

    def attend(self, backend: str, **options: Any) -> torch.Tensor:
        raise NotImplementedError

    def expected(self, max_query_len: int | None = None, **options: Any) -> torch.Tensor:
        """Compute the output in float64. A single cache has the keys, and the values are their
        beginning.
        """
        q, *caches, starts, _, table = self.arguments
        result = self.out.double().fill_(UNTOUCHED)
        for row, (queries, keys) in enumerate(self.lengths):
            if queries:
                own = slice(int(starts[row]), int(starts[row]) + queries)
                rows = [gather_paged(cache, table, row, keys).view(keys, -1, q.shape[-1]) for cache in caches]
                attended = reference_attention(q[own], rows[0], rows[-1], self.scale, **options)
                result[own] = attended[..., : result.shape[-1]]
        return result

    def check_kernel(self, device: torch.device, dtype: torch.dtype | None = None, splits: int = 1, **options: Any):
        """Expect the kernel on a device to give what float64 gives, and to leave padding unchanged."""
        result = self.on(device).attend("triton", num_kv_splits=splits, **options)
        assert_close(result, self.expected(**options), dtype)


def make_step(
    kind: type[PagedStep],
    lengths: Sequence[tuple[int, int]],
    q_shape: tuple[int, int],
    *cache_shapes: tuple[int, ...],
    out_dim: int | None = None,
    block_size: int = 16,
    dtype: torch.dtype = torch.float32,
    padding: int = 3,
    seed: int = 0,
) -> Any:
    """Return a step with `padding` tokens of no sequence. Slots that hold no key of any sequence
    are NaN.
    """
    torch.manual_seed(seed)
    queries, keys = [length for length, _ in lengths], [length for _, length in lengths]
    table, caches = poisoned_caches(keys, block_size, *cache_shapes, dtype=dtype, seed=seed)
    q = torch.randn(sum(queries) + padding, *q_shape).to(dtype)
    out = torch.full((*q.shape[:-1], out_dim or q_shape[-1]), UNTOUCHED, dtype=dtype)
    tensors = (q, *caches, start_locations(queries), torch.tensor(keys, dtype=torch.int32), table)
    return kind(tensors, q_shape[-1] ** -0.5, out, lengths)
