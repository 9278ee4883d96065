"""Lesson 12's measurements, its tables, its figure and its command line.

A function `measure_*`, `count_*` or `show_*` prints its table and returns its figures; what it takes as a callable is
code of the lesson.
"""

from __future__ import annotations

import argparse
import random
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from minivllm.config import EMBEDDED_MODEL, NO_PARTS, ModelConfig, Parts
from minivllm.core.block_hash import hash_block_tokens
from minivllm.core.policy import SchedulingPolicy
from minivllm.entrypoints.llm import LLM
from minivllm.kernels.lora_linear import lora_linear
from minivllm.kernels.lora_metadata import LoRAKernelMeta
from minivllm.lora.request import LoRARequest
from minivllm.memory import num_parameters
from minivllm.memory.adapters import linear_shapes
from minivllm.platforms.triton_utils import HAS_TRITON, INTERPRETED
from minivllm.sampling_params import SamplingParams
from minivllm_lab import palette
from minivllm_lab.cli import lesson_parser, whole_number
from minivllm_lab.figures import panels
from minivllm_lab.followed import without_info as quiet
from minivllm_lab.inside import runner_of
from minivllm_lab.kernel_trace import KernelTrace, trace_kernel
from minivllm_lab.multi_lora.adapters import write_random_adapters
from minivllm_lab.progress import track
from minivllm_lab.proof import furthest, show_errors
from minivllm_lab.tables import Timed, closing, console, table
from minivllm_lab.timing import in_turns
from minivllm_simulate.known_models import known_model

Way = Callable[..., None]
MB, GB = 1e6, 1e9


def check(arguments: argparse.Namespace, device: torch.device) -> None:
    """Reads the model's config now, so that one that is not there is told first; `arguments` gets the device's name.

    Raises:
        MinivllmError: there is no such model, or no adapters are counted for its structure.
    """
    linear_shapes(ModelConfig.from_pretrained(arguments.model))
    arguments.device = device.type


# ---- 1. what an adapter weighs ---------------------------------------------------------------------------------------

MODELS = ("Llama-3.1-8B", "Llama-3.1-70B", "the embedded model")
RANKS = (8, 16, 64)


def show_weights(adapter_numbers: Callable[[int, Iterable[tuple[int, int]]], int]) -> dict[str, Any]:
    """Bytes of an adapter by rank, beside the model's; and what a thousand of either take."""
    found, rows = {}, []
    for name in MODELS:
        model = ModelConfig.from_pretrained(EMBEDDED_MODEL) if name == MODELS[-1] else known_model(name)
        size = 2 * num_parameters(model)
        projections = list(linear_shapes(model).values())
        one: dict[str, float] = {"model_bytes": size}
        found[name] = one
        for rank in RANKS:
            one[str(rank)] = 2 * model.num_hidden_layers * adapter_numbers(rank, projections)
        share = one["16"] / size
        one["share"] = share
        rows.append((name, _bytes(size), *(_bytes(one[str(rank)]) for rank in RANKS), f"{share:.1%}",
                     _bytes(1000 * one["16"]), _bytes(1000 * size)))  # fmt: skip
    columns = ("2 bytes a number", "model", *(f"rank {rank}" for rank in RANKS), "16 / model", "1,000 of 16", "models")
    table("An adapter on all seven projections of each layer", columns, rows)
    return found


def _bytes(count: float) -> str:
    """Bytes as a table shows them."""
    for size, unit in ((1e12, "TB"), (GB, "GB"), (MB, "MB")):
        if count >= size:
            return f"{count / size:,.1f} {unit}" if count < 100 * size else f"{count / size:,.0f} {unit}"
    return f"{count / 1e3:,.1f} kB"


# ---- 2. merged or applied --------------------------------------------------------------------------------------------

RANK = 16
"""The rank of the adapters in the measurements of one linear."""


def width(arguments: argparse.Namespace) -> int:
    """Of that linear, in and out."""
    return 512 if arguments.quick else 2048


def measure_applied(
    merged: Callable[[Tensor, Tensor, Tensor], Tensor],
    applied: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor],
    arguments: argparse.Namespace,
    device: torch.device,
) -> dict[str, Any]:
    """One linear, merged and applied, by tokens; and what making the merged weight takes."""
    wide = width(arguments)
    weight = torch.randn(wide, wide, device=device) / wide**0.5
    a, b = torch.randn(RANK, wide, device=device) / wide**0.5, torch.randn(wide, RANK, device=device) / RANK
    own = merged(weight, a, b)
    x = torch.randn(8, wide, dtype=torch.float64, device=device)
    doubles = [one.double() for one in (weight, a, b)]
    off = furthest(applied(x, *doubles), x @ merged(*doubles).T)
    assert off < 1e-9, f"applied and merged differ by {off}"
    found: dict[str, Any] = {"off": off, "tokens": {}}
    rows = []
    for tokens in (1, 16, 128):
        x = torch.randn(tokens, wide, device=device)
        calls = {"merged": lambda x=x: x @ own.T, "applied": lambda x=x: applied(x, weight, a, b)}
        turns = in_turns(calls, 3 if arguments.quick else 15, device)
        seconds = {name: statistics.median(times) for name, times in turns.items()}
        ratio = statistics.median(late / early for early, late in zip(*turns.values(), strict=True))
        found["tokens"][str(tokens)] = {**seconds, "ratio": ratio}
        rows.append((tokens, *(f"{1e3 * one:.2f}" for one in seconds.values()), f"{ratio:.2f} ×"))
    making = statistics.median(in_turns({"merge": lambda: merged(weight, a, b)}, 5, device)["merge"])
    found |= {"merging": making, "operations": RANK * 2 * wide / wide**2}
    title = f"One linear of {wide:,} × {wide:,}, rank {RANK}; ms"
    caption = (
        f"Operations on top: {found['operations']:.1%}. Both agree to {off:.0e} in float64. To make the merged weight "
        f"takes {1e3 * making:.0f} ms."
    )
    table(title, ("tokens", "merged", "applied", ""), rows, caption)
    return found


# ---- 3. the same batch, four ways ------------------------------------------------------------------------------------

AWKWARD: dict[str, tuple[list[int], int, int, int]] = {
    "a prompt, decodes, some without": ([2] * 19 + [0, -1, 2, 0, -1, 3], 8, 80, 72),
    "all of one adapter": ([1] * 17, 16, 64, 100),
    "each its own, rank 1": ([4, 3, 2, 1, 0], 1, 33, 48),
    "rank 20 in a slot of its own": ([0, -1, 0, 1], 20, 65, 130),
}
"""Slot of each token, rank, in and out."""


def lora_case(token_slots: Sequence[int], rank: int, inputs: int, outputs: int, dtype: torch.dtype) -> dict:
    """A batch's tensors, by the names of the lesson's arguments."""
    slots = max(token_slots) + 2
    return {
        "out": torch.randn(len(token_slots), outputs).to(dtype),
        "x": torch.randn(len(token_slots), inputs).to(dtype),
        "a": (torch.randn(slots, rank, inputs) / inputs**0.5).to(dtype),
        "b": (torch.randn(slots, outputs, rank) / rank**0.5).to(dtype),
        "token_slots": torch.tensor(token_slots, dtype=torch.int32),
    }


def exact(case: Mapping[str, Tensor]) -> Tensor:
    """What `out` must be: float64, token by token."""
    out, x, a, b, slots = (one.cpu().double() for one in case.values())
    for token, slot in enumerate(slots.int().tolist()):
        if slot >= 0:
            out[token] += b[slot] @ (a[slot] @ x[token])
    return out


def verify_kernels(ways: Mapping[str, Way], device: torch.device, quick: bool) -> dict[str, float]:
    """All four ways against float64 on awkward batches; `quick`: on the first of them.

    Raises:
        AssertionError: a token is wrong.
    """
    errors: dict[str, float] = {}
    for name, case in track(list(AWKWARD.items())[: 1 if quick else None], "verifying the kernels"):
        tensors = lora_case(*case, torch.float16)
        expected = exact(tensors)
        for way in ways.values():
            fresh = {key: one.clone().to(device) for key, one in tensors.items()}
            way(**fresh)
            errors[name] = max(errors.get(name, 0.0), furthest(fresh["out"].double(), expected))
    return {"largest_error": show_errors("All four ways", errors, 2e-2)}


def traced(way: Way, case: Mapping[str, Tensor]) -> list[KernelTrace]:
    """What each launch of one of the ways reads and writes."""
    traces: list[KernelTrace] = []
    way(**case, launch=lambda *call, **sizes: traces.append(trace_kernel(*call, **sizes)))
    return traces


COUNTED = {"one adapter": [0] * 16, "four": [0, 1, 2, 3] * 4, "sixteen": list(range(16))}
"""Slots of 16 tokens."""


def count_ways(ways: Mapping[str, Way]) -> dict[str, Any] | None:
    """Launches, and how often an adapter is read, of 16 tokens; counted in Triton's interpreter.

    Raises:
        AssertionError: the sorted way reads an adapter more than once, or launches more than two kernels.
    """
    if not (HAS_TRITON and INTERPRETED):
        return None
    found, rows = {}, []
    for name, way in track(ways.items(), "counting"):
        one = found[name] = {}
        for batch, slots in COUNTED.items():
            case = lora_case(slots, 8, 64, 64, torch.float32)
            traces, adapter = traced(way, case), 4 * 8 * 2 * 64
            assert not any(trace.races + trace.out_of_bounds for trace in traces), f"{name}: {batch}"
            read = sum(trace.arguments[key].bytes_read for trace in traces for key in "ab" if key in trace.arguments)
            one[batch] = {"launches": len(traces), "adapters_read": read / adapter}
        copied = bytes_of_copies(lora_case(COUNTED["four"], 8, 64, 64, torch.float32))
        one["rows_copied"] = copied if name == "sgmv" else 0
        cells = (f"{of['launches']} / {of['adapters_read']:.0f}" for of in (one[batch] for batch in COUNTED))
        rows.append((name, *cells, "yes" if one["rows_copied"] else ""))
    for batch, slots in COUNTED.items():
        assert found["sorted"][batch] == {"launches": 2, "adapters_read": len(set(slots))}, batch
    console.print()
    title = "16 tokens: launches / adapters read"
    table(title, ("", *(f"of {name}" for name in COUNTED), "copies rows"), rows)
    return found


def bytes_of_copies(case: Mapping[str, Tensor]) -> int:
    """Bytes that putting rows side by side moves: x there, out there and back, each read and written."""
    return 2 * (case["x"].nbytes + 2 * case["out"].nbytes)


DISTINCT = (1, 2, 4, 8, 16, 32, 64)


def looped(out: Tensor, x: Tensor, a: Tensor, b: Tensor, members: Sequence[tuple[int, Tensor]]) -> Tensor:
    """Adapter after adapter, with torch's products; members: (slot, its tokens)."""
    for slot, tokens in members:
        out[tokens] += (x[tokens] @ a[slot].T) @ b[slot].T
    return out


def gathered(out: Tensor, x: Tensor, a: Tensor, b: Tensor, slots: Tensor) -> Tensor:
    """Each token with a copy of its adapter, as bgmv reads them, with torch's batched products."""
    return out + torch.bmm(b[slots], torch.bmm(a[slots], x[:, :, None]))[:, :, 0]


def measure_distinct(arguments: argparse.Namespace, device: torch.device) -> dict[str, Any]:
    """One linear and 64 tokens, by how many different adapters they have."""
    tokens, wide, found, rows = 64, width(arguments), {}, []
    case = lora_case(list(range(tokens)), RANK, wide, wide, torch.float32)
    out, x, a, b = (case[name].to(device) for name in ("out", "x", "a", "b"))
    weight = torch.randn(wide, wide, device=device) / wide**0.5
    for distinct in DISTINCT:
        slots = torch.arange(tokens, device=device) % distinct
        members = [(slot, (slots == slot).nonzero().flatten()) for slot in range(distinct)]
        engine = engine_call(out, x, a, b, slots.int())
        calls = {
            "base": lambda: x @ weight.T,
            "loop": lambda members=members: looped(out, x, a, b, members),
            "gathered": lambda slots=slots: gathered(out, x, a, b, slots),
            "engine": engine,
        }
        turns = in_turns(calls, 3 if arguments.quick else 15, device)
        one = found[str(distinct)] = {name: 1e3 * statistics.median(times) for name, times in turns.items()}
        one["read_mb"] = distinct * 4 * RANK * 2 * wide / MB
        rows.append((distinct, f"{one['read_mb']:.1f}", *(f"{one[name]:.2f}" for name in calls)))
    console.print()
    title = f"64 tokens through one linear of {wide:,} × {wide:,}, rank {RANK}; ms on top of the base product"
    columns = ("adapters", "MB of them", "base alone", "loop", "gathered (bgmv)", "the engine's")
    table(title, columns, rows)
    return found


def engine_call(
    out: Tensor, x: Tensor, a: Tensor, b: Tensor, slots: Tensor, rank: int | None = None, backend: str | None = None
) -> Callable[[], None]:
    """The engine's call for these tensors: its B is transposed, and it keeps a rank for each slot (None: the whole)."""
    meta = LoRAKernelMeta(len(x), len(a), x.device)
    meta.prepare(slots.cpu().numpy())
    its_a, its_b = a[None].contiguous(), b.transpose(1, 2).contiguous()
    ranks = torch.full((1, len(a)), rank or a.shape[1], dtype=torch.int32, device=x.device)
    bounds = torch.tensor([0, out.shape[1]], dtype=torch.int32, device=x.device)
    return lambda: lora_linear(out, x, its_a, its_b, ranks, bounds, meta, backend=backend)


# ---- 4. slots, and a tier below --------------------------------------------------------------------------------------

PLACES, SERVED_STEPS = 32, 12
"""`max_num_seqs` of the traffic, and the mean number of steps of a request."""


def traffic(adapters: int, skew: float, requests: int, a_step: float, seed: int) -> list[tuple[str, int, int, int]]:
    """(name, adapter, steps, arrives): the k-th most wanted adapter has a share in proportion to k^-skew (Zipf)."""
    draw = random.Random(seed)
    chosen = draw.choices(range(1, adapters + 1), [k**-skew for k in range(1, adapters + 1)], k=requests)
    steps = [1 + min(4 * SERVED_STEPS, int(draw.expovariate(1 / (SERVED_STEPS - 1)))) for _ in chosen]
    return [(str(i), one, steps[i], int(i / a_step)) for i, one in enumerate(chosen)]


def show_tiers(
    serve: Callable[..., Iterator],
    tiers: Callable[..., Counter],
    request: Callable[..., Any],
    arguments: argparse.Namespace,
) -> dict[str, Any]:
    """The same traffic by slots: how many run, how many different adapters a step has, what is copied and read."""
    work = traffic(arguments.adapters, arguments.skew, 150 if arguments.quick else 800, 2.0, arguments.seed)
    wanted, found, rows = len({one[1] for one in work}), {}, []
    for slots, host in ((1, 64), (4, 64), (8, 64), (16, 64), (32, 64), (32, 1000)):
        steps = list(serve([request(*one) for one in work], slots, PLACES))
        batches = [[one.adapter for one in running] for running, _ in steps]
        counts = tiers(batches, slots, host)
        one = found[f"{slots}, {host}"] = {
            "steps": len(steps),
            "running": statistics.mean(len(running) for running, _ in steps),
            "distinct": statistics.mean(len(set(batch)) for batch in batches),
            "waiting": max(waiting for _, waiting in steps),
            "copied": counts["copied"],
            "disk": counts["from disk"],
            "hits": 1 - counts["copied"] / counts["used"],
        }
        rows.append((f"{slots} / {host:,}", f"{one['steps']:,}", f"{one['running']:.1f}", one["waiting"],
                     f"{one['distinct']:.1f}", f"{one['copied']:,}", f"{one['disk']:,}"))  # fmt: skip
    title = (
        f"{len(work):,} requests for {wanted:,} of {arguments.adapters:,} adapters, skew {arguments.skew:g}; {PLACES} "
        "places"
    )
    columns = ("slots / in host memory", "steps", "running", "most waiting", "adapters a step", "copied", "from disk")
    table(title, columns, rows, "Running, adapters: means over the steps. Copied: into a slot.")
    return {"requests": len(work), "wanted": wanted, "tiers": found}


# ---- 5. in the engine ------------------------------------------------------------------------------------------------

AT_ONCE = 16
"""Requests of a step; as many slots, so that nobody waits for one."""
QV = ("q_proj", "v_proj")


def engine_with(arguments: argparse.Namespace, **settings: Any) -> LLM:
    """An engine in this process."""
    sizes = {"max_model_len": 256, "max_num_seqs": AT_ONCE, "dtype": "float32", "device": arguments.device, **settings}
    with quiet():
        return LLM(arguments.model, **sizes)


def with_adapters(arguments: argparse.Namespace, adapters: int, **settings: Any) -> LLM:
    """The same with a slot of rank 8 for each request, and host memory for so many adapters."""
    lora = {"enable_lora": True, "max_loras": AT_ONCE, "max_lora_rank": 8, "max_cpu_loras": max(AT_ONCE, adapters)}
    return engine_with(arguments, **{**lora, **settings})


def named(folders: Sequence[Path]) -> list[LoRARequest]:
    """An adapter for each folder, numbered from 1."""
    return [LoRARequest(folder.name, number, str(folder)) for number, folder in enumerate(folders, start=1)]


def measure_thousand(arguments: argparse.Namespace) -> dict[str, Any]:
    """Zipf traffic over more and more adapters, in one engine: what is loaded, and requests a second."""
    most = min(arguments.adapters, 64) if arguments.quick else arguments.adapters
    counts = sorted({count for count in (8, 64, most) if count <= most})
    requests, found, rows = 32 if arguments.quick else 128, {}, []
    with tempfile.TemporaryDirectory() as folder:
        adapters = named(write_random_adapters(folder, most, targets=QV, model=arguments.model))
        for count in track(counts, "serving"):
            llm = with_adapters(arguments, count, enable_prefix_caching=False)
            _generate(llm, [None] * AT_ONCE)
            drawn = traffic(count, arguments.skew, requests, 1.0, arguments.seed)
            lora: Any = runner_of(llm).lora
            distinct: list[int] = []
            with counting(lora, distinct):
                first, second = (_generate(llm, [adapters[one[1] - 1] for one in drawn]) for _ in range(2))
            counted = {"read": lora.num_loads, "copied": lora.manager.num_activations}
            eight = [adapters[number] for number in eight_a_step(count, requests)]
            _, fixed = (_generate(llm, eight) for _ in range(2))
            found[str(count)] = {
                "wanted": len({one[1] for one in drawn}),
                "distinct": statistics.mean(distinct),
                **counted,
                "first_per_second": requests / first,
                "per_second": requests / second,
                "fixed_per_second": requests / fixed,
            }
        base = requests / _generate(llm, [None] * requests)
    for count, one in found.items():
        rows.append((f"{int(count):,}", one["wanted"], f"{one['distinct']:.1f}", one["read"], one["copied"],
                     f"{one['first_per_second']:,.0f}", f"{one['per_second']:,.0f}",
                     f"{one['fixed_per_second']:,.0f}"))  # fmt: skip
    title = f"{most:,} adapters in one process; {requests} requests of 8 tokens, {AT_ONCE} at once"
    columns = (
        "registered", "wanted", "a step", "read", "copied", "requests/s, first", "again", "eight a step"
    )  # fmt: skip
    caption = (
        f"Zipf with skew {arguments.skew:g}. Wanted, a step: different ones. Read: from disk; copied: into a slot. "
        f"Eight a step: other traffic, with just so many, again. Nobody has one: {base:,.0f}."
    )
    table(title, columns, rows, caption)
    return {"adapters": found, "requests": requests, "base_per_second": base}


def eight_a_step(adapters: int, requests: int) -> list[int]:
    """An adapter for each request: of those that run together, eight different ones; in turn, all that there are."""
    return [(number // AT_ONCE * 8 + number % 8) % adapters for number in range(requests)]


@contextmanager
def counting(lora: Any, into: list[int]) -> Iterator[None]:
    """Notes how many different adapters each step has that has any."""
    given = lora.set_active_adapters

    def set_active_adapters(requests: Any) -> dict[int, int]:
        into.append(len(requests))
        return given(requests)

    lora.set_active_adapters = set_active_adapters
    try:
        yield
    finally:
        del lora.set_active_adapters


def _generate(llm: LLM, adapters: Sequence[LoRARequest | None], max_tokens: int = 8) -> float:
    """Seconds that requests with these adapters take."""
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
    prompts: list[Any] = [{"prompt_token_ids": [1 + number % 50] * 8} for number in range(len(adapters))]
    start = time.perf_counter()
    llm.generate(prompts, params, use_tqdm=False, lora_request=list(adapters))
    return time.perf_counter() - start


def measure_cost(arguments: argparse.Namespace) -> dict[str, Any]:
    """A decode step of 16 requests: without adapters at all, with none used, with one, with sixteen."""
    with tempfile.TemporaryDirectory() as folder:
        adapters = named(write_random_adapters(folder, AT_ONCE, model=arguments.model))
        off = engine_with(arguments, enable_prefix_caching=False)
        on = with_adapters(arguments, AT_ONCE, enable_prefix_caching=False)
        ways: dict[str, tuple[LLM, list[LoRARequest | None]]] = {
            "enable_lora off": (off, [None] * AT_ONCE),
            "on, nobody has one": (on, [None] * AT_ONCE),
            "on, all have the same": (on, [adapters[0]] * AT_ONCE),
            "on, each its own": (on, list(adapters)),
        }
        steps: dict[str, list[float]] = {name: [] for name in ways}
        for turn in range(2 if arguments.quick else 8):
            for name, (llm, wanted) in ways.items():
                seconds = _decode_seconds(llm, wanted)
                steps[name] += [seconds] if turn else []
    base, found, rows = steps["enable_lora off"], {}, []
    for name, times in steps.items():
        ratio = statistics.median(one / other for one, other in zip(times, base, strict=True))
        found[name] = {"ms": 1e3 * statistics.median(times), "ratio": ratio}
        rows.append((name, f"{found[name]['ms']:.2f}", f"{ratio:.2f} ×"))
    console.print()
    title = f"A decode step of {AT_ONCE} requests, adapters of rank 8 on all seven projections"
    table(title, ("", "ms", "of one without"), rows, "Medians of turns.")
    return found


def _decode_seconds(llm: LLM, adapters: Sequence[LoRARequest | None]) -> float:
    """Median seconds of the steps in which all of these requests decode."""
    engine, params = llm.llm_engine, SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
    for number, adapter in enumerate(adapters):
        engine.add_request(str(number), {"prompt_token_ids": [7 + number] * 8}, params, lora_request=adapter)
    engine.step()
    times = []
    while engine.has_unfinished_requests():
        start = time.perf_counter()
        engine.step()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


# ---- 6. break it -----------------------------------------------------------------------------------------------------


def show_gate(
    serve: Callable[..., Iterator], tiers: Callable[..., Counter], request: Callable[..., Any]
) -> dict[str, Any]:
    """Sixteen adapters, wanted alike, by slots; then one that waits behind two that are always wanted."""
    found, rows = {}, []
    for slots in (1, 2, 4, 8, 16):
        work = [request(str(i), 1 + i % 16, 8, i // 2) for i in range(160)]
        steps = list(serve(work, slots, 16))
        counts = tiers([[one.adapter for one in running] for running, _ in steps], slots, 16)
        one = found[str(slots)] = {
            "steps": len(steps),
            "running": statistics.mean(len(running) for running, _ in steps),
            "waiting": max(waiting for _, waiting in steps),
            "copied": counts["copied"],
        }
        rows.append((slots, one["steps"], f"{one['running']:.1f} of 16", one["waiting"], one["copied"]))
    title = "160 requests of 8 steps, 2 before each step, 16 adapters in turn"
    table(title, ("slots", "steps", "places in use", "most waiting", "copied into slots"), rows)
    hot = [request(f"hot {i}", 1 + i % 2, 8, i) for i in range(100)]
    steps = list(serve([*hot[:4], request("cold", 3, 8, 4), *hot[4:]], 2, 16))
    started = next(number for number, (running, _) in enumerate(steps) if "cold" in [one.name for one in running])
    alone = list(serve([request("cold", 3, 8, 4), *hot], 3, 16))
    alone_started = next(number for number, (running, _) in enumerate(alone) if "cold" in [one.name for one in running])
    found["cold"] = {"arrives": 4, "starts": started, "with_a_third_slot": alone_started}
    console.print(
        "Two slots, two adapters that are wanted all the time: a request for a third comes before step 5 and starts "
        f"in step {started + 1}. With three slots, in step {alone_started + 1}."
    )
    return found


def show_ranks(by_sorting: Way, adapter_numbers: Callable[..., int]) -> dict[str, Any] | None:
    """Rank 8 in slots for 256: what a slot takes, and what 16 tokens of four adapters read; counted."""
    if not (HAS_TRITON and INTERPRETED):
        return None
    model = known_model("Llama-3.1-8B")
    projections, found, rows = list(linear_shapes(model).values()), {}, []
    for max_rank in (8, 16, 64, 256):
        case = lora_case(COUNTED["four"], max_rank, 64, 64, torch.float32)
        traces = traced(by_sorting, case)
        read = sum(trace.arguments[key].bytes_read for trace in traces for key in "ab" if key in trace.arguments)
        slot = 2 * model.num_hidden_layers * adapter_numbers(max_rank, projections)
        one = found[str(max_rank)] = {"slot_bytes": slot, "read": read, "real": 4 * 4 * 8 * 128 / read}
        rows.append((max_rank, _bytes(slot), f"{read / 1e3:.0f} kB", f"{one['real']:.0%}"))
    console.print()
    title = "Adapters of rank 8 in slots for more: Llama-3.1-8B's slot; what four adapters of a small linear read"
    table(title, ("max_lora_rank", "a slot", "read", "of it adapters"), rows)
    return found


PROMPT = "def add(a, b):\n    return a + b\n\n\ndef total(items):"
TRAINED = Path(EMBEDDED_MODEL).parent / "adapters"


def embedded(arguments: argparse.Namespace) -> argparse.Namespace:
    """The arguments with the embedded model, which the trained adapters belong to."""
    return argparse.Namespace(**{**vars(arguments), "model": EMBEDDED_MODEL})


def trained() -> list[LoRARequest]:
    """The adapters that lie beside the embedded model."""
    return named(sorted(path.parent for path in TRAINED.glob("*/adapter_config.json")))


def show_answers(arguments: argparse.Namespace) -> dict[str, str]:
    """What the model says to one prompt, alone and with each of the trained adapters, in one batch."""
    llm = with_adapters(embedded(arguments), AT_ONCE, max_lora_rank=RANK)
    wanted = [None, *trained()]
    texts = _texts(llm, wanted)
    found = {one.lora_name if one else "no adapter": text for one, text in zip(wanted, texts, strict=True)}
    console.print()
    rows = [(name, repr(text)) for name, text in found.items()]
    table("One prompt, and who answers", ("adapter", "text"), rows, words=True)
    return found


def share_hashes(arguments: argparse.Namespace) -> dict[str, Any]:
    """One prompt under two adapters, one after the other; then with blocks named by their tokens alone.

    Raises:
        AssertionError: the sound engine finds another adapter's blocks, or the other one does not.
    """

    def by_tokens(parent: bytes, token_ids: Sequence[int], _extra_keys: bytes) -> bytes:
        return hash_block_tokens(parent, token_ids)

    first, second, *_ = trained()
    found: dict[str, Any] = {}
    rows = []
    own = Parts(policy=SchedulingPolicy(hash_block_tokens=by_tokens))
    for name, parts in (("as it is", NO_PARTS), ("names without the adapter", own)):
        llm = with_adapters(embedded(arguments), AT_ONCE, max_lora_rank=RANK, block_size=4, parts=parts)
        _texts(llm, [first])
        (output,) = llm.generate([PROMPT], GREEDY, use_tqdm=False, lora_request=second)
        found[name] = {"text": output.outputs[0].text, "cached": output.num_cached_tokens}
        rows.append((name, output.num_cached_tokens, repr(output.outputs[0].text)))
    (sound, shared) = found.values()
    assert sound["cached"] == 0 < shared["cached"], f"cached: {sound['cached']}, {shared['cached']}"
    assert sound["text"] != shared["text"], "the mutant says the same: take another prompt"
    console.print()
    title = f"The second request begins as the first one did, with {second.lora_name} in place of {first.lora_name}"
    table(title, ("prefix cache", "tokens found", "text"), rows, words=True)
    return found


GREEDY = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)


def _texts(llm: LLM, adapters: Sequence[LoRARequest | None]) -> list[str]:
    """What each of these says to the prompt."""
    outputs = llm.generate([PROMPT] * len(adapters), GREEDY, use_tqdm=False, lora_request=list(adapters))
    return [output.outputs[0].text for output in outputs]


# ---- the whole lesson ------------------------------------------------------------------------------------------------


def close(found: dict, disturbance: str) -> None:
    """Print the conclusions; `disturbance` says what else kept the machine busy, if anything."""
    weighs = found["weighs"][MODELS[0]]
    thousand, cold = found["thousand"]["adapters"], found["slots"]["cold"]
    many, few = thousand[max(thousand, key=int)], thousand["8"]
    closing(
        f"An adapter of rank 16 is {weighs['share']:.1%} of {MODELS[0]}: a thousand of them take "
        f"{_bytes(1000 * weighs['16'])}, a thousand models {_bytes(1000 * weighs['model_bytes'])}.",
        Timed(
            f"With {int(max(thousand, key=int)):,} adapters one process served "
            f"{many['fixed_per_second'] / few['fixed_per_second']:.0%} of the requests a second that it served with 8, "
            "at eight different ones a step."
        ),
        f"With two slots a third adapter's request waited {cold['starts'] - cold['arrives']} steps for one, beside "
        "free places and free memory.",
        disturbance=disturbance,
    )


def draw(found: dict, path: str) -> None:
    """What a thousand weigh; one linear by the adapters of a batch; places in use by slots."""
    with panels(path, 3) as (left, middle, right):
        for place, one in enumerate(found["weighs"].values()):
            for offset, key, colour in ((0.0, "model_bytes", palette.ORANGE), (0.4, "16", palette.BLUE)):
                left.barh(place + offset, 1000 * one[key] / GB, 0.36, color=colour)
        left.set_yticks([0.2, 1.2, 2.2], list(found["weighs"]))
        left.set(title="A thousand of them", xlabel="GB (orange: models, blue: adapters)", xscale="log")
        left.invert_yaxis()
        sizes = [int(size) for size in found["distinct"]]
        for name, colour in (("loop", palette.ORANGE), ("gathered", palette.GREEN), ("engine", palette.BLUE)):
            middle.plot(sizes, [one[name] for one in found["distinct"].values()], "o-", color=colour, label=name)
        base = statistics.median(one["base"] for one in found["distinct"].values())
        middle.axhline(base, color=palette.GREY, linestyle="--")
        middle.text(1, base, "the base product", va="bottom", fontsize=9)
        middle.set(title="64 tokens, one linear", xlabel="different adapters", ylabel="ms on top", xscale="log")
        middle.set_yscale("log")
        middle.set_xticks(sizes, [str(size) for size in sizes])
        parts = (0.25, 0.5, 1, 2, 4)
        middle.set_yticks(parts, [f"{part:g}" for part in parts])
        middle.minorticks_off()
        middle.legend(fontsize=8)
        slots = {name: one for name, one in found["slots"].items() if name != "cold"}
        right.bar(list(slots), [one["running"] for one in slots.values()], color=palette.BLUE)
        right.axhline(16, color=palette.GREY, linestyle="--")
        right.set(title="16 adapters in turn", xlabel="slots", ylabel="places in use of 16")


def parser(doc: str | None) -> argparse.ArgumentParser:
    """The lesson's own flags, besides the common ones; `doc` is shown by --help."""
    flags = lesson_parser(doc or "", EMBEDDED_MODEL)
    flags.add_argument(
        "--adapters", type=whole_number(8, 5000), default=1000, help="adapters that are registered (8 to 5000)"
    )
    flags.add_argument("--skew", type=_skew, default=1.0, help="of the traffic over them, Zipf's exponent (0 to 3)")
    return flags


def _skew(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value <= 3:
        raise argparse.ArgumentTypeError(f"must be a number from 0 to 3, not {text!r}")
    return value
