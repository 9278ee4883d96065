"""Lesson 12's four ways to apply the adapters of a batch: proven against float64, counted, and timed."""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from minivllm.kernels.lora_linear import lora_linear
from minivllm.kernels.lora_metadata import LoRAKernelMeta
from minivllm.platforms.triton_utils import HAS_TRITON, INTERPRETED
from minivllm_lab.checks.kernel_trace import KernelTrace, trace_kernel
from minivllm_lab.progress import track
from minivllm_lab.proof import furthest, show_errors
from minivllm_lab.tables import record_table
from minivllm_lab.timing import in_turns

Way = Callable[..., None]
"""One of the lesson's four ways: it adds the adapters' output to `out`, with the arguments of `lora_case`."""

RANK = 16
"""The rank of the adapters in the measurements of one linear."""


def width(arguments: argparse.Namespace) -> int:
    """Return the input and output size of the linear that is measured."""
    return 512 if arguments.quick else 2048


AWKWARD: dict[str, tuple[list[int], int, int, int]] = {
    "a prompt, decodes, some without": ([2] * 19 + [0, -1, 2, 0, -1, 3], 8, 80, 72),
    "all of one adapter": ([1] * 17, 16, 64, 100),
    "each its own, rank 1": ([4, 3, 2, 1, 0], 1, 33, 48),
    "rank 20 in a slot of its own": ([0, -1, 0, 1], 20, 65, 130),
}
"""The slot of each token, the rank, and the sizes of input and output."""


def lora_case(token_slots: Sequence[int], rank: int, inputs: int, outputs: int, dtype: torch.dtype) -> dict:
    """Return a batch's tensors, keyed by the names of the lesson's arguments."""
    slots = max(token_slots) + 2
    return {
        "out": torch.randn(len(token_slots), outputs).to(dtype),
        "x": torch.randn(len(token_slots), inputs).to(dtype),
        "a": (torch.randn(slots, rank, inputs) / inputs**0.5).to(dtype),
        "b": (torch.randn(slots, outputs, rank) / rank**0.5).to(dtype),
        "token_slots": torch.tensor(token_slots, dtype=torch.int32),
    }


def exact(case: Mapping[str, Tensor]) -> Tensor:
    """Compute in float64, token by token, what `out` must be."""
    out, x, a, b, slots = (tensor.cpu().double() for tensor in case.values())
    for token, slot in enumerate(slots.int().tolist()):
        if slot >= 0:
            out[token] += b[slot] @ (a[slot] @ x[token])
    return out


def verify_kernels(ways: Mapping[str, Way], device: torch.device, quick: bool) -> dict[str, float]:
    """Compare all four methods with float64 on awkward batches; with `quick`, only on the first of
    them.

    Raises:
        AssertionError: a token is wrong.
    """
    errors: dict[str, float] = {}
    for name, case in track(list(AWKWARD.items())[: 1 if quick else None], "verifying the kernels"):
        tensors = lora_case(*case, torch.float16)
        expected = exact(tensors)
        for way in ways.values():
            fresh = {key: tensor.clone().to(device) for key, tensor in tensors.items()}
            way(**fresh)
            errors[name] = max(errors.get(name, 0.0), furthest(fresh["out"].double(), expected))
    return {"largest_error": show_errors("All four ways", errors, 2e-2)}


def traced(way: Way, case: Mapping[str, Tensor]) -> list[KernelTrace]:
    """Trace what each launch of a method reads and writes."""
    traces: list[KernelTrace] = []
    way(**case, launch=lambda *call, **sizes: traces.append(trace_kernel(*call, **sizes)))
    return traces


COUNTED = {"one adapter": [0] * 16, "four": [0, 1, 2, 3] * 4, "sixteen": list(range(16))}
"""The slots of 16 tokens."""


def count_ways(ways: Mapping[str, Way], quick: bool) -> dict[str, Any] | None:
    """Count, for 16 tokens in Triton's interpreter, the launches and how often each adapter is
    read.

    Raises:
        AssertionError: sorting reads an adapter more than once, or launches more than two
            kernels.
    """
    if not (HAS_TRITON and INTERPRETED):
        return None
    batches = ("one adapter", "four") if quick else tuple(COUNTED)
    records: dict[str, Any] = {}
    for name, way in track(ways.items(), "counting"):
        records[name] = {"rows_copied": 0}
        for batch in batches:
            case = lora_case(COUNTED[batch], 8, 64, 64, torch.float32)
            traces = traced(way, case)
            assert not any(trace.races + trace.out_of_bounds for trace in traces), f"{name}: {batch}"
            read = (trace.arguments[key].bytes_read for trace in traces for key in "ab" if key in trace.arguments)
            adapters_read = sum(read) / (4 * 8 * 2 * 64)  # bytes of A and B
            records[name][batch] = {"launches": len(traces), "adapters_read": adapters_read}
            if name == "sgmv":  # moves x there, out there and back; each is read and written
                records[name]["rows_copied"] = 2 * (case["x"].nbytes + 2 * case["out"].nbytes)
    for batch in batches:
        right = {"launches": 2, "adapters_read": len(set(COUNTED[batch]))}
        assert records["sorted"][batch] == right, batch
    columns = " | ".join(f"of {batch} {{{batch}[launches]}} / {{{batch}[adapters_read]:.0f}}" for batch in batches)
    shown = {name: {**record, "copies": "yes" if record["rows_copied"] else ""} for name, record in records.items()}
    record_table("\n16 tokens: launches / adapters read", shown, f"{{name}} | {columns} | copies rows {{copies}}")
    return records


DISTINCT = (1, 2, 4, 8, 16, 32, 64)


def looped(out: Tensor, x: Tensor, a: Tensor, b: Tensor, members: Sequence[tuple[int, Tensor]]) -> Tensor:
    """Apply one adapter after another with torch; `members` are (slot, tokens) pairs."""
    for slot, tokens in members:
        out[tokens] += (x[tokens] @ a[slot].T) @ b[slot].T
    return out


def gathered(out: Tensor, x: Tensor, a: Tensor, b: Tensor, slots: Tensor) -> Tensor:
    """Apply to each token a copy of its adapter, with torch's batched matmul; this reads as much as
    bgmv.
    """
    return out + torch.bmm(b[slots], torch.bmm(a[slots], x[:, :, None]))[:, :, 0]


def measure_distinct(arguments: argparse.Namespace, device: torch.device) -> dict[str, Any]:
    """Time one linear over 64 tokens, by the number of different adapters that they use."""
    wide = width(arguments)
    case = lora_case(list(range(64)), RANK, wide, wide, torch.float32)
    out, x, a, b = (case[name].to(device) for name in ("out", "x", "a", "b"))
    weight = torch.randn(wide, wide, device=device) / wide**0.5
    records = {}
    for distinct in (1, 64) if arguments.quick else DISTINCT:
        slots = torch.arange(64, device=device) % distinct
        members = [(slot, (slots == slot).nonzero().flatten()) for slot in range(distinct)]
        calls: dict[str, Callable[[], object]] = {
            "base": lambda: x @ weight.T,
            "loop": partial(looped, out, x, a, b, members),
            "gathered": partial(gathered, out, x, a, b, slots),
            "engine": engine_call(out, x, a, b, slots.int()),
        }
        turns = in_turns(calls, 2 if arguments.quick else 15, device)
        ms = {name: 1e3 * statistics.median(times) for name, times in turns.items()}
        records[str(distinct)] = {**ms, "read_mb": distinct * 4 * RANK * 2 * wide / 1e6}
    record_table(
        f"\n64 tokens through one linear of {wide:,} × {wide:,}, rank {RANK}; ms on top of the base matmul",
        records,
        "adapters {name} | MB of them {read_mb:.1f} | base alone {base:.2f} | loop {loop:.2f} | "
        "gathered {gathered:.2f} | the engine's {engine:.2f}",
    )
    return records


def engine_call(
    out: Tensor, x: Tensor, a: Tensor, b: Tensor, slots: Tensor, rank: int | None = None, backend: str | None = None
) -> Callable[[], None]:
    """Return a call of the engine's kernels on these tensors; it transposes B and gives each slot a
    rank.
    """
    meta = LoRAKernelMeta(len(x), len(a), x.device)
    meta.prepare(slots.cpu().numpy())
    engine_a, engine_b = a[None].contiguous(), b.transpose(1, 2).contiguous()
    ranks = torch.full((1, len(a)), rank or a.shape[1], dtype=torch.int32, device=x.device)
    bounds = torch.tensor([0, out.shape[1]], dtype=torch.int32, device=x.device)
    return lambda: lora_linear(out, x, engine_a, engine_b, ranks, bounds, meta, backend=backend)
