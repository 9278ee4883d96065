"""Lesson 12's measurements, tables, figure and command line.

Each `measure_*`, `count_*` or `show_*` function prints its table and returns its figures; the
callables that it takes are the lesson's own code.
"""

from __future__ import annotations

import argparse
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
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
from minivllm.memory.adapters import linear_shapes
from minivllm.outputs import RequestOutput
from minivllm.platforms.triton_utils import HAS_TRITON, INTERPRETED
from minivllm.sampling_params import SamplingParams
from minivllm_lab import palette
from minivllm_lab.cli import lesson_parser, whole_number
from minivllm_lab.figures import SMALL_TEXT, panels
from minivllm_lab.followed import without_info as quiet
from minivllm_lab.inside import runner_of
from minivllm_lab.kernel_trace import KernelTrace, trace_kernel
from minivllm_lab.multi_lora.adapters import write_random_adapters
from minivllm_lab.progress import track
from minivllm_lab.proof import furthest, show_errors
from minivllm_lab.tables import Timed, closing, console, record_table, table
from minivllm_lab.timing import in_turns, wall_seconds
from minivllm_simulate.known_models import known_model
from minivllm_simulate.memory import num_parameters

Way = Callable[..., None]
LessonCode = Callable[..., Any]
"""A function or class of the lesson's script."""
MB, GB = 1e6, 1e9


def check(arguments: argparse.Namespace, device: torch.device) -> None:
    """Check the model's config before anything is measured, and put the device's name into
    `arguments`.

    Raises:
        MinivllmError: there is no such model, or adapters for its linears are not supported.
    """
    linear_shapes(ModelConfig.from_pretrained(arguments.model))
    arguments.device = device.type


# ---- 1. what an adapter weighs -------------------------------------------------------------------

MODELS = ("Llama-3.1-8B", "Llama-3.1-70B", "the embedded model")
RANKS = (8, 16, 64)


def show_weights(adapter_numbers: LessonCode) -> dict[str, Any]:
    """Show an adapter's bytes by rank beside the model's, and the bytes of a thousand of each."""
    records: dict[str, dict[str, float]] = {}
    for name in MODELS:
        model = ModelConfig.from_pretrained(EMBEDDED_MODEL) if name == MODELS[-1] else known_model(name)
        projections = list(linear_shapes(model).values())
        sizes = {str(rank): 2 * model.num_hidden_layers * adapter_numbers(rank, projections) for rank in RANKS}
        size = 2 * num_parameters(model)
        records[name] = {"model_bytes": size, **sizes, "share": sizes["16"] / size}
    rows = [
        (name, _bytes(record["model_bytes"]), *(_bytes(record[str(rank)]) for rank in RANKS), f"{record['share']:.1%}",
         _bytes(1000 * record["16"]), _bytes(1000 * record["model_bytes"]))
        for name, record in records.items()
    ]  # fmt: skip
    columns = ("2 bytes a number", "model", *(f"rank {rank}" for rank in RANKS), "16 / model", "1,000 of 16", "models")
    table("An adapter on all seven projections of each layer", columns, rows)
    return records


def _bytes(count: float) -> str:
    for size, unit in ((1e12, "TB"), (GB, "GB"), (MB, "MB")):
        if count >= size:
            return f"{count / size:,.1f} {unit}" if count < 100 * size else f"{count / size:,.0f} {unit}"
    return f"{count / 1e3:,.1f} kB"


# ---- 2. merged or applied ------------------------------------------------------------------------

RANK = 16
"""The rank of the adapters in the measurements of one linear."""


def width(arguments: argparse.Namespace) -> int:
    """Return the input and output size of the linear that is measured."""
    return 512 if arguments.quick else 2048


def measure_applied(
    merged: LessonCode, applied: LessonCode, arguments: argparse.Namespace, device: torch.device
) -> dict[str, Any]:
    """Time one linear with the adapter merged and with it applied, and time the merging itself."""
    wide = width(arguments)
    weight = torch.randn(wide, wide, device=device) / wide**0.5
    a, b = torch.randn(RANK, wide, device=device) / wide**0.5, torch.randn(wide, RANK, device=device) / RANK
    own = merged(weight, a, b)
    x = torch.randn(8, wide, dtype=torch.float64, device=device)
    doubles = [tensor.double() for tensor in (weight, a, b)]
    off = furthest(applied(x, *doubles), x @ merged(*doubles).T)
    assert off < 1e-9, f"applied and merged differ by {off}"
    records = {}
    for tokens in (1, 16, 128):
        x = torch.randn(tokens, wide, device=device)
        calls = {"merged": lambda x=x: x @ own.T, "applied": lambda x=x: applied(x, weight, a, b)}
        turns = in_turns(calls, 3 if arguments.quick else 15, device)
        ratio = statistics.median(late / early for early, late in zip(*turns.values(), strict=True))
        records[str(tokens)] = {**{name: statistics.median(times) for name, times in turns.items()}, "ratio": ratio}
    merging = statistics.median(in_turns({"merge": lambda: merged(weight, a, b)}, 5, device)["merge"])
    operations = RANK * 2 * wide / wide**2
    record_table(
        f"One linear of {wide:,} × {wide:,}, rank {RANK}; ms",
        {name: {**record, "ms": {way: 1e3 * record[way] for way in calls}} for name, record in records.items()},
        "tokens {name} | merged {ms[merged]:.2f} | applied {ms[applied]:.2f} | ratio {ratio:.2f} ×",
        f"Additional operations: {operations:.1%}. Both agree to {off:.0e} in float64. Making the merged weight takes "
        f"{1e3 * merging:.0f} ms.",
    )
    return {"off": off, "tokens": records, "merging": merging, "operations": operations}


# ---- 3. the same batch, four ways ----------------------------------------------------------------

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
            adapters_read = bytes_of_adapters(traces) / (4 * 8 * 2 * 64)
            records[name][batch] = {"launches": len(traces), "adapters_read": adapters_read}
            if name == "sgmv":  # moves x there, out there and back; each is read and written
                records[name]["rows_copied"] = 2 * (case["x"].nbytes + 2 * case["out"].nbytes)
    for batch in batches:
        right = {"launches": 2, "adapters_read": len(set(COUNTED[batch]))}
        assert records["sorted"][batch] == right, batch
    columns = " | ".join(f"of {batch} {{{batch}[launches]}} / {{{batch}[adapters_read]:.0f}}" for batch in batches)
    shown = {name: {**record, "copies": "yes" if record["rows_copied"] else ""} for name, record in records.items()}
    console.print()
    record_table("16 tokens: launches / adapters read", shown, f"{{name}} | {columns} | copies rows {{copies}}")
    return records


def bytes_of_adapters(traces: Sequence[KernelTrace]) -> int:
    """Sum the bytes of A and B that these launches read."""
    return sum(trace.arguments[key].bytes_read for trace in traces for key in "ab" if key in trace.arguments)


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
        records[str(distinct)] = {**ms, "read_mb": distinct * 4 * RANK * 2 * wide / MB}
    console.print()
    record_table(
        f"64 tokens through one linear of {wide:,} × {wide:,}, rank {RANK}; ms on top of the base matmul",
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


# ---- 4. in the engine ----------------------------------------------------------------------------

AT_ONCE = 16
"""Requests of a step, and slots, so that no request waits for a slot."""
QV = ("q_proj", "v_proj")


def engine_with(arguments: argparse.Namespace, **settings: Any) -> LLM:
    """Start an engine in this process."""
    sizes = {"max_model_len": 256, "max_num_seqs": AT_ONCE, "dtype": "float32", "device": arguments.device, **settings}
    with quiet():
        return LLM(arguments.model, **sizes)


def with_adapters(arguments: argparse.Namespace, adapters: int, **settings: Any) -> LLM:
    """Start an engine with a slot of rank 8 for each request, and host memory for `adapters`."""
    lora = {"enable_lora": True, "max_loras": AT_ONCE, "max_lora_rank": 8, "max_cpu_loras": max(AT_ONCE, adapters)}
    return engine_with(arguments, **{**lora, **settings})


def named(folders: Sequence[Path]) -> list[LoRARequest]:
    """Return an adapter for each folder, numbered from 1."""
    return [LoRARequest(folder.name, number, str(folder)) for number, folder in enumerate(folders, start=1)]


def measure_thousand(arguments: argparse.Namespace) -> dict[str, Any]:
    """Serve Zipf traffic over more and more adapters, each set in one engine; measure loads and
    requests per second.
    """
    most = min(arguments.adapters, 64) if arguments.quick else arguments.adapters
    requests, records = 32 if arguments.quick else 128, {}
    with tempfile.TemporaryDirectory() as folder:
        adapters = named(write_random_adapters(folder, most, targets=QV, model=arguments.model))
        for count in track(sorted({8, min(64, most), most}), "serving"):
            llm = with_adapters(arguments, count, enable_prefix_caching=False)
            _generate(llm, [None] * AT_ONCE)
            shares = [k**-arguments.skew for k in range(1, count + 1)]
            drawn = random.Random(arguments.seed).choices(adapters[:count], shares, k=requests)
            lora: Any = runner_of(llm).lora
            distinct: list[int] = []
            with counting(lora, distinct):
                first, second = (_generate(llm, drawn) for _ in range(2))
            counted = {"read": lora.num_loads, "copied": lora.manager.num_activations}
            eight = [adapters[number] for number in eight_a_step(count, requests)]
            _generate(llm, eight)
            records[str(count)] = {
                "wanted": len({adapter.lora_int_id for adapter in drawn}),
                "distinct": statistics.mean(distinct),
                **counted,
                "first_per_second": requests / first,
                "per_second": requests / second,
                "fixed_per_second": requests / _generate(llm, eight),
            }
        base = requests / _generate(llm, [None] * requests)
    record_table(
        f"{most:,} adapters in one process; {requests} requests of 8 tokens, {AT_ONCE} at once",
        {f"{int(count):,}": record for count, record in records.items()},
        "registered {name} | wanted {wanted} | a step {distinct:.1f} | read {read} | copied {copied} | "
        "requests/s, first {first_per_second:,.0f} | again {per_second:,.0f} | eight a step {fixed_per_second:,.0f}",
        f"Zipf with skew {arguments.skew:g}. Wanted, a step: different adapters. Read: from disk; copied: into a slot. "
        f"Eight a step: other traffic with eight different adapters a step, again. Without adapters: {base:,.0f}.",
    )
    return {"adapters": records, "requests": requests, "base_per_second": base}


def eight_a_step(adapters: int, requests: int) -> list[int]:
    """Return an adapter for each request, such that the requests that run together cycle through
    eight different ones.
    """
    return [(number // AT_ONCE * 8 + number % 8) % adapters for number in range(requests)]


@contextmanager
def counting(lora: Any, into: list[int]) -> Iterator[None]:
    """Append to `into` the number of different adapters in each step that uses any."""
    set_active = lora.set_active_adapters

    def set_active_adapters(requests: Any) -> dict[int, int]:
        into.append(len(requests))
        return set_active(requests)

    lora.set_active_adapters = set_active_adapters
    try:
        yield
    finally:
        del lora.set_active_adapters


def _generate(llm: LLM, adapters: Sequence[LoRARequest | None], max_tokens: int = 8) -> float:
    """Return the seconds that requests with these adapters take."""
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
    prompts: list[Any] = [{"prompt_token_ids": [1 + number % 50] * 8} for number in range(len(adapters))]
    start = time.perf_counter()
    llm.generate(prompts, params, use_tqdm=False, lora_request=list(adapters))
    return time.perf_counter() - start


def measure_cost(arguments: argparse.Namespace) -> dict[str, Any]:
    """Time a decode step of 16 requests: with `enable_lora` off, and with it on for no adapter, one
    and sixteen.
    """
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
        turns, tokens = (2, 8) if arguments.quick else (8, 24)
        for turn in range(turns):
            for name, (llm, wanted) in ways.items():
                seconds = _decode_seconds(llm, wanted, tokens)
                steps[name] += [seconds] if turn else []
    base, records = steps["enable_lora off"], {}
    for name, times in steps.items():
        ratio = statistics.median(seconds / other for seconds, other in zip(times, base, strict=True))
        records[name] = {"ms": 1e3 * statistics.median(times), "ratio": ratio}
    console.print()
    title = f"A decode step of {AT_ONCE} requests, adapters of rank 8 on all seven projections"
    record_table(title, records, "{name} | ms {ms:.2f} | of one without {ratio:.2f} ×", "Medians of alternating runs.")
    return records


def _decode_seconds(llm: LLM, adapters: Sequence[LoRARequest | None], tokens: int) -> float:
    """Return the median time of the steps in which all of these requests decode."""
    engine, params = llm.llm_engine, SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
    for number, adapter in enumerate(adapters):
        engine.add_request(str(number), {"prompt_token_ids": [7 + number] * 8}, params, lora_request=adapter)
    engine.step()
    times = []
    while engine.has_unfinished_requests():
        times.append(wall_seconds(engine.step))
    return statistics.median(times)


# ---- 5. break it ---------------------------------------------------------------------------------


def show_gate(serve: LessonCode, tiers: LessonCode, request: LessonCode) -> dict[str, Any]:
    """Serve sixteen equally popular adapters with more and more slots, then a request whose adapter
    has to wait for two popular ones.
    """
    work = [request(str(i), 1 + i % 16, 8, i // 2) for i in range(160)]
    records: dict[str, Any] = {}
    for slots in (1, 2, 4, 8, 16):
        steps = list(serve(work, slots, 16))
        batches = [[each.adapter for each in running] for running, _ in steps]
        records[str(slots)] = {
            "steps": len(steps),
            "running": statistics.mean(map(len, batches)),
            "waiting": max(waiting for _, waiting in steps),
            "copied": tiers(batches, slots, 16)["copied"],
        }
    record_table(
        "160 requests of 8 steps, 2 before each step, 16 adapters in turn",
        records,
        "slots {name} | steps {steps} | seats in use {running:.1f} of 16 | most waiting {waiting} | "
        "copied into slots {copied}",
    )
    hot = [request(f"hot {i}", 1 + i % 2, 8, i) for i in range(100)]
    work = [*hot[:4], request("cold", 3, 8, 4), *hot[4:]]
    starts, with_a_third = (
        next(at for at, (running, _) in enumerate(serve(work, slots, 16)) if "cold" in {each.name for each in running})
        for slots in (2, 3)
    )
    console.print(
        "Two slots, and two adapters that are always in use: a request for a third arrives before step 5 and starts in "
        f"step {starts + 1}. With three slots, in step {with_a_third + 1}."
    )
    return {**records, "cold": {"arrives": 4, "starts": starts, "with_a_third_slot": with_a_third}}


def show_ranks(by_sorting: Way, adapter_numbers: LessonCode, quick: bool) -> dict[str, Any] | None:
    """Count the bytes of a slot for ranks up to 256, and the bytes that 16 tokens of four rank-8
    adapters read from it.
    """
    if not (HAS_TRITON and INTERPRETED):
        return None
    model = known_model("Llama-3.1-8B")
    projections, records = list(linear_shapes(model).values()), {}
    for max_rank in (8, 256) if quick else (8, 16, 64, 256):
        read = bytes_of_adapters(traced(by_sorting, lora_case(COUNTED["four"], max_rank, 64, 64, torch.float32)))
        slot = 2 * model.num_hidden_layers * adapter_numbers(max_rank, projections)
        records[str(max_rank)] = {"slot_bytes": slot, "read": read, "real": 4 * 4 * 8 * 128 / read}
    console.print()
    record_table(
        "Adapters of rank 8 in slots for more: Llama-3.1-8B's slot; what four adapters of a small linear read",
        {
            name: {**record, "slot": _bytes(record["slot_bytes"]), "kb": record["read"] / 1e3}
            for name, record in records.items()
        },
        "max_lora_rank {name} | a slot {slot} | read {kb:.0f} kB | of it adapters {real:.0%}",
    )
    return records


PROMPT = "def add(a, b):\n    return a + b\n\n\ndef total(items):"
TRAINED = Path(EMBEDDED_MODEL).parent / "adapters"


def embedded_with_adapters(arguments: argparse.Namespace, **settings: Any) -> tuple[LLM, list[LoRARequest]]:
    """Start the embedded model with the adapters that were trained for it."""
    own = argparse.Namespace(**{**vars(arguments), "model": EMBEDDED_MODEL})
    folders = sorted(path.parent for path in TRAINED.glob("*/adapter_config.json"))
    return with_adapters(own, AT_ONCE, max_lora_rank=RANK, **settings), named(folders)


def show_answers(arguments: argparse.Namespace) -> dict[str, str]:
    """Show how the model continues one prompt, alone and with each of the trained adapters, in
    one batch.
    """
    llm, adapters = embedded_with_adapters(arguments)
    texts = [output.outputs[0].text for output in _continue(llm, [None, *adapters])]
    names = ["no adapter", *(adapter.lora_name for adapter in adapters)]
    answers = dict(zip(names, texts, strict=True))
    console.print()
    rows = [(name, repr(text)) for name, text in answers.items()]
    table("One prompt, and who answers", ("adapter", "text"), rows, words=True)
    return answers


def share_hashes(arguments: argparse.Namespace) -> dict[str, Any]:
    """Run one prompt under two adapters in turn, then again with block hashes that leave the
    adapter out.

    Raises:
        AssertionError: the sound engine hits another adapter's blocks, or the unsound one does not.
    """

    def by_tokens(parent: bytes, token_ids: Sequence[int], _extra_keys: bytes) -> bytes:
        return hash_block_tokens(parent, token_ids)

    own = Parts(policy=SchedulingPolicy(hash_block_tokens=by_tokens))
    records: dict[str, Any] = {}
    for name, parts in (("unchanged", NO_PARTS), ("hashes ignore the adapter", own)):
        llm, (first, second, *_) = embedded_with_adapters(arguments, block_size=4, parts=parts)
        _continue(llm, [first])
        (output,) = _continue(llm, [second])
        records[name] = {"text": output.outputs[0].text, "cached": output.num_cached_tokens}
    sound, shared = records.values()
    assert sound["cached"] == 0 < shared["cached"], f"cached: {sound['cached']}, {shared['cached']}"
    assert sound["text"] != shared["text"], "both engines generate the same text: use another prompt"
    console.print()
    title = f"The second request begins like the first, with {second.lora_name} in place of {first.lora_name}"
    rows = [(name, record["cached"], repr(record["text"])) for name, record in records.items()]
    table(title, ("prefix cache", "tokens found", "text"), rows, words=True)
    return records


GREEDY = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)


def _continue(llm: LLM, adapters: Sequence[LoRARequest | None]) -> list[RequestOutput]:
    """Continue the prompt once with each of these adapters."""
    return llm.generate([PROMPT] * len(adapters), GREEDY, use_tqdm=False, lora_request=list(adapters))


# ---- the whole lesson ----------------------------------------------------------------------------


def close(figures: dict, disturbance: str) -> None:
    """Print the conclusions; `disturbance` says what else kept the machine busy, if anything."""
    weighs = figures["weighs"][MODELS[0]]
    thousand, cold = figures["thousand"]["adapters"], figures["slots"]["cold"]
    many, few = thousand[max(thousand, key=int)], thousand["8"]
    closing(
        f"An adapter of rank 16 is {weighs['share']:.1%} of {MODELS[0]}: a thousand of them take "
        f"{_bytes(1000 * weighs['16'])}, a thousand models {_bytes(1000 * weighs['model_bytes'])}.",
        Timed(
            f"With {int(max(thousand, key=int)):,} adapters one process served "
            f"{many['fixed_per_second'] / few['fixed_per_second']:.0%} of the requests a second that it served with 8, "
            "at eight different ones a step."
        ),
        f"With two slots, the request for a third adapter waited {cold['starts'] - cold['arrives']} steps for one, "
        "although batch and memory had room.",
        disturbance=disturbance,
    )


def draw(figures: dict, path: str) -> None:
    """Plot what adapters add to one linear by how many there are, and the seats in use by slots."""
    names = {
        "loop": ("a loop", palette.ORANGE, (1, 6)),
        "gathered": ("a copy for each token", palette.PURPLE, (1, -14)),
        "engine": ("sorted, the engine's", palette.BLUE, (1, -15)),
    }
    with panels(path, 2) as (left, right):
        distinct = figures["distinct"]
        for name, (words, colour, where) in names.items():
            times = {int(size): record[name] for size, record in distinct.items()}
            left.plot(list(times), list(times.values()), "o-", color=colour)
            at = next(iter(times.items()))
            left.annotate(words, at, where, textcoords="offset points", fontsize=SMALL_TEXT)
        base = statistics.median(record["base"] for record in distinct.values())
        left.axhline(base, color=palette.GREY, linestyle="--")
        left.annotate("to compare: W x itself", (1, base), (1, 5), textcoords="offset points", fontsize=SMALL_TEXT)
        left.axvspan(1, 16, color=palette.GREY, alpha=0.12, linewidth=0)
        left.annotate("nearly flat", (16, 0.1), (-3, 4), textcoords="offset points", fontsize=SMALL_TEXT, ha="right")
        left.set(title="What adapters add to W x, on a CPU", xlabel="different adapters among 64 tokens", ylabel="ms")
        left.annotate("W: 2,048 × 2,048, float32", (1, 10), (1, -11), textcoords="offset points", fontsize=SMALL_TEXT)
        left.set(xscale="log", yscale="log", ylim=(0.1, 10))
        left.set_xticks([int(size) for size in distinct], list(distinct))
        left.set_yticks((0.1, 0.3, 1, 3, 10), ("0.1", "0.3", "1", "3", "10"))
        left.minorticks_off()
        slots = {int(name): record["running"] for name, record in figures["slots"].items() if name != "cold"}
        right.plot(list(slots), list(slots.values()), "o-", color=palette.BLUE)
        right.axhline(16, color=palette.GREY, linestyle="--")
        right.annotate("all 16 seats", (1, 16), (0, -12), textcoords="offset points", fontsize=SMALL_TEXT)
        right.set(
            title="The bet: 16 adapters in turn", xlabel="LoRA slots", ylabel="seats in use, on average", ylim=(0, 17)
        )
        right.set_xscale("log", base=2)
        right.set_yticks(range(0, 17, 4))
        right.set_xticks(list(slots), [str(count) for count in slots])


def parser(doc: str | None) -> argparse.ArgumentParser:
    """Add the lesson's own flags to the common ones; `--help` shows `doc`."""
    flags = lesson_parser(doc or "", EMBEDDED_MODEL)
    flags.add_argument(
        "--adapters", type=whole_number(8, 5000), default=1000, help="number of registered adapters (8 to 5000)"
    )
    flags.add_argument("--skew", type=_skew, default=1.0, help="Zipf exponent of the traffic over adapters (0 to 3)")
    return flags


def _skew(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value <= 3:
        raise argparse.ArgumentTypeError(f"must be a number from 0 to 3, not {text!r}")
    return value
