"""Measure the engine's kernels against this device's limits.

    uv run python benchmarks/kernels.py                  # what there is: the GPU, else the CPU
    uv run python benchmarks/kernels.py --device cpu

On a CPU, the tables show attention over the paged cache against its own traffic floor (torch
summing up as many bytes as K and V have) and against gathering each sequence and calling torch's
attention; writes to the cache; and verifying drafts against summing up the logits. On a GPU, they
show decode and verifying drafts as shares of the bandwidth of a copy, prefill as a share of the
best of torch's own attentions, and the gain of splitting the keys of one long sequence. There, our
launches, one for each of several layers' caches, are replayed from a CUDA graph, as the engine's
decode steps are.

The figures are medians; on a CPU, everything that a row compares is measured in turn. The tables
are followed by one line of JSON, which also goes to benchmarks/results/kernels.<cpu or the GPU's
name>.json (not with --quick, unless --json names a file). The script needs torch, triton, numpy and
rich; on a CPU also numba.
"""

from __future__ import annotations

import argparse
import math
import random
import statistics
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F

from minivllm.kernels.attention_arguments import AttentionArguments
from minivllm.kernels.cpu.attention_gather import gather_attention
from minivllm.kernels.cpu.cache_calls import quantize
from minivllm.kernels.cpu.rejection_calls import torch_rejection
from minivllm.kernels.rejection_arguments import RejectionArguments
from minivllm.kernels.rejection_sample import launch, rejection_sample
from minivllm.kernels.reshape_and_cache import reshape_and_cache
from minivllm.kernels.unified_attention import unified_attention
from minivllm.platforms.allocator import keep_freed_memory
from minivllm.platforms.device import DEVICES, pick_device
from minivllm_lab.cli import Parser, run
from minivllm_lab.device_rates import copy_bandwidth
from minivllm_lab.progress import track
from minivllm_lab.results import ensure_writable, record, report
from minivllm_lab.tables import table
from minivllm_lab.timing import in_turns, median_seconds

RESULTS = Path(__file__).resolve().parent / "results"
BLOCK_SIZE = 16
SHORT = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.int8: "int8", torch.float8_e4m3fn: "fp8"}
LLAMA = {"heads": 32, "kv_heads": 8, "head_dim": 128}


@dataclass(frozen=True)
class Case:
    """One step: queries and keys of each sequence, and the model's heads."""

    name: str
    queries: tuple[int, ...]
    lengths: tuple[int, ...]
    heads: int = 8
    kv_heads: int = 2
    head_dim: int = 32

    def kv_bytes(self, kv: torch.dtype) -> int:
        """Count the bytes of K and V that the step must read once, int8's scales included."""
        head = self.head_dim * kv.itemsize + (4 if kv == torch.int8 else 0)
        return 2 * sum(self.lengths) * self.kv_heads * head

    @property
    def flops(self) -> int:
        """4 × head_dim × heads for each pair of a query and a key that it sees."""
        pairs = sum(q * length - q * (q - 1) // 2 for q, length in zip(self.queries, self.lengths, strict=True))
        return 4 * self.head_dim * self.heads * pairs


def decodes(name: str, lengths: Sequence[int], **shape: int) -> Case:
    """Return a step in which every sequence decodes one token."""
    return Case(name, (1,) * len(lengths), tuple(lengths), **shape)


def prefill(name: str, length: int, **shape: int) -> Case:
    """Return a step that is one whole prompt."""
    return Case(name, (length,), (length,), **shape)


@dataclass(frozen=True)
class Verification:
    """A step that verifies `drafts` drafts of each of `requests` requests; `drawn` drafts come from
    logits, which are read too.
    """

    requests: int
    drafts: int
    vocab: int
    drawn: bool

    @property
    def name(self) -> str:
        """The step in words."""
        what = "drawn drafts" if self.drawn else "drafts"
        return f"{self.requests} × {self.drafts} {what}, vocabulary {self.vocab:,}"

    @property
    def logit_bytes(self) -> int:
        """Bytes of all logits."""
        rows = self.requests * (self.drafts + 1 + self.drafts * self.drawn)
        return 4 * self.vocab * rows

    def step(self, device: torch.device) -> RejectionArguments:
        """Return random arguments for a verification that accepts more than half of the drafts."""
        torch.manual_seed(0)
        target = 2 * torch.randn(self.requests, self.drafts + 1, self.vocab, device=device)
        theirs = (target[:, :-1] + torch.randn_like(target[:, :-1])).flatten(0, 1)
        drafts = (theirs - torch.empty_like(theirs).exponential_().log_()).argmax(-1)
        if not self.drawn:
            likely = target[:, :-1].logsumexp(-1, keepdim=True) + 0.7
            target[:, :-1].scatter_(-1, drafts.view(self.requests, self.drafts, 1), likely)
        counts = torch.full((self.requests,), self.drafts, dtype=torch.int32)
        greedy = torch.zeros(self.requests, dtype=torch.bool, device=device)
        keys = torch.randint(2**31, (self.requests * (self.drafts + 1), 2), dtype=torch.int32, device=device)
        q = theirs if self.drawn else None
        return RejectionArguments(target.flatten(0, 1), drafts.int(), counts, q, greedy, keys)


def step_tensors(case: Case, device: torch.device, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    """Return random arguments for `unified_attention`, with every sequence's blocks scattered over
    the pool.
    """
    torch.manual_seed(0)
    needed = [-(-length // BLOCK_SIZE) for length in case.lengths]
    shape = (1 + sum(needed), BLOCK_SIZE, case.kv_heads, case.head_dim)
    k_cache, v_cache = (torch.randn(shape, device=device, dtype=dtype) for _ in range(2))
    q = torch.randn(sum(case.queries), case.heads, case.head_dim, device=device, dtype=dtype)
    table = torch.zeros(len(needed), max(needed), dtype=torch.int32)
    blocks = iter((torch.randperm(sum(needed)) + 1).tolist())
    for row, count in enumerate(needed):
        table[row, :count] = torch.tensor([next(blocks) for _ in range(count)], dtype=torch.int32)
    starts = torch.tensor([0, *case.queries]).cumsum(0).to(torch.int32)
    lengths = torch.tensor(case.lengths, dtype=torch.int32)
    return q, k_cache, v_cache, starts.to(device), lengths.to(device), table.to(device)


def stored_as(kv: torch.dtype, tensors: tuple[torch.Tensor, ...]) -> tuple[tuple[torch.Tensor, ...], dict]:
    """Return the step with its caches in another dtype, and the scales that `unified_attention`
    needs for int8.
    """
    q, *caches, starts, lengths, blocks = tensors
    if kv == torch.int8:
        (keys, k_scales), (values, v_scales) = (quantize(cache) for cache in caches)
        scales = [one.transpose(1, 2).contiguous() for one in (k_scales, v_scales)]
        return (q, keys, values, starts, lengths, blocks), {"k_scales": scales[0], "v_scales": scales[1]}
    return (q, *(cache.to(kv) for cache in caches), starts, lengths, blocks), {}


def medians_in_turn(functions: dict[str, Callable[[], object]], repeats: int) -> dict[str, float]:
    """Return the median seconds of each function, called in turns."""
    return {name: statistics.median(seconds) for name, seconds in in_turns(functions, repeats).items()}


# ---- on a CPU ------------------------------------------------------------------------------------


def cpu_cases(quick: bool) -> list[Case]:
    """List the steps of the first table."""
    draw = random.Random(0)
    chat = decodes("128 decodes of 32–500", [draw.randint(32, 500) for _ in range(128)])
    if quick:
        return [chat]
    return [
        chat,
        decodes("16 decodes of 512, 32 heads, d = 128", [512] * 16, **LLAMA),
        decodes("one decode of 4,096", [4096]),
        prefill("prefill of 512", 512),
        prefill("prefill of 2,048", 2048),
    ]  # fmt: skip


def cpu_attention(case: Case, kv: torch.dtype, repeats: int) -> dict:
    """Measure one row: milliseconds of the floor, of the CPU backend and of gather + torch's
    attention, and their ratios.
    """
    asked_in = torch.bfloat16 if kv == torch.bfloat16 else torch.float32
    tensors, scales = stored_as(kv, step_tensors(case, torch.device("cpu"), asked_in))
    scale, kv_bytes = case.head_dim**-0.5, case.kv_bytes(kv)
    arguments = AttentionArguments(*tensors, scale, **scales)
    as_many_bytes, out = torch.ones(kv_bytes // 4), torch.empty_like(tensors[0])
    seconds = medians_in_turn(
        {
            "floor": as_many_bytes.sum,
            "engine": lambda: unified_attention(*tensors, scale, out=out, backend="cpu", **scales),
            "gather": lambda: gather_attention(out, arguments),
        },
        repeats,
    )
    return {
        "case": case.name,
        "kv": SHORT[kv],
        "kv_bytes": kv_bytes,
        **{f"{name}_ms": round(took * 1e3, 4) for name, took in seconds.items()},
        "over_floor": round(seconds["engine"] / seconds["floor"], 2),
        "gather_over_engine": round(seconds["gather"] / seconds["engine"], 2),
        "gflops": round(case.flops / seconds["engine"] / 1e9, 1),
    }


def cpu_writes(tokens: int, repeats: int) -> dict:
    """Measure one row: microseconds to write K and V of `tokens` tokens, fp32, 2 KV heads, d = 32."""
    torch.manual_seed(0)
    key, value = torch.randn(2, tokens, 2, 32)
    key_cache, value_cache = torch.zeros(2, 256, BLOCK_SIZE, 2, 32)
    slots = torch.randperm(256 * BLOCK_SIZE)[:tokens]
    copies = torch.empty_like(key), torch.empty_like(value)
    flat = key_cache.view(-1, 2, 32), value_cache.view(-1, 2, 32)
    sources = (flat[0], key), (flat[1], value)
    seconds = medians_in_turn(
        {
            "copy": lambda: (copies[0].copy_(key), copies[1].copy_(value)),
            "engine": lambda: reshape_and_cache(key, value, key_cache, value_cache, slots),
            "index_copy": lambda: [cache.index_copy_(0, slots, new) for cache, new in sources],
            "index_put": lambda: [cache.index_put_((slots,), new) for cache, new in sources],
        },
        repeats,
    )
    return {"tokens": tokens, **{f"{name}_us": round(took * 1e6, 1) for name, took in seconds.items()}}


def cpu_verification(case: Verification, repeats: int) -> dict:
    """Measure one row: microseconds to sum up all logits, and to verify with the compiled loops and
    with torch.
    """
    step, as_many_bytes = case.step(torch.device("cpu")), torch.ones(case.logit_bytes // 4)
    seconds = medians_in_turn(
        {
            "floor": as_many_bytes.sum,
            "engine": lambda: rejection_sample(step),
            "torch": lambda: torch_rejection(step),
        },
        repeats,
    )
    micros = {f"{name}_us": round(took * 1e6, 1) for name, took in seconds.items()}
    over = {"over_floor": round(seconds["engine"] / seconds["floor"], 2)}
    return {"case": case.name, "bytes": case.logit_bytes, **micros, **over}


def measure_cpu(quick: bool) -> dict:
    """Measure all tables of a machine without a GPU."""
    keep_freed_memory()
    repeats = 7 if quick else 31
    cases = [(case, kv) for case in cpu_cases(quick) for kv in (torch.float32, torch.bfloat16, torch.int8)]
    attention = [cpu_attention(case, kv, repeats) for case, kv in track(cases, "attention")]
    writes = [cpu_writes(tokens, 10 * repeats) for tokens in ((128,) if quick else (1, 128, 2048))]
    steps = [Verification(16, 3, 4096, drawn) for drawn in (False, True)]
    verified = [cpu_verification(case, repeats) for case in steps]
    columns = {
        "case": "one step", "kv": "K and V", "floor_ms": "floor", "engine_ms": "engine", "gather_ms": "gather",
        "over_floor": "engine ÷ floor", "gather_over_engine": "gather ÷ engine",
    }  # fmt: skip
    _print(f"Attention on the CPU, {torch.get_num_threads()} threads, milliseconds", columns, attention)
    columns = {"tokens": "tokens"} | {f"{name}_us": name for name in ("copy", "engine", "index_copy", "index_put")}
    _print("Writing K and V, 2 heads, d = 32, microseconds", columns, writes)
    columns = {"case": "one step", "floor_us": "floor", "engine_us": "engine", "torch_us": "torch"}
    columns |= {"over_floor": "engine ÷ floor"}
    _print("Verifying drafts, microseconds", columns, verified)
    tables = {"attention": attention, "writes": writes, "verification": verified}
    return {"threads": torch.get_num_threads(), **tables}


def _print(title: str, columns: dict[str, str], rows: list[dict]) -> None:
    if rows:
        table(title, tuple(columns.values()), [[_short(row[name]) for name in columns] for row in rows])


def _short(value: object) -> object:
    """Round a measurement to three digits."""
    return f"{value:.3g}" if isinstance(value, float) and abs(value) < 1000 else value


# ---- on a GPU ------------------------------------------------------------------------------------

REPEATS = 30


def replayed(functions: Sequence[Callable[[], object]]) -> Callable[[], None]:
    """Return a function that replays these launches from one CUDA graph, without the host's launch
    time.
    """
    for function in functions:
        function()  # compiles, and measures which configuration is fastest
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for function in functions:
            function()
    return graph.replay


def layers_of(tensors: tuple[torch.Tensor, ...], device: torch.device) -> list[tuple[torch.Tensor, ...]]:
    """Copy a step's caches, as for several layers, often enough that none is still in the L2 cache
    when its turn comes.

    With a single launch, a graph's time would also include all of the graph's start, 5 µs or more,
    which 32 layers share.
    """
    if device.type != "cuda":
        return [tensors]
    q, keys, values, *tables = tensors
    in_cache = torch.cuda.get_device_properties(device).L2_cache_size / (keys.nbytes + values.nbytes)
    count = max(4, math.ceil(4 * in_cache))
    return [tensors, *((q, keys.clone(), values.clone(), *tables) for _ in range(count - 1))]


def attention_seconds(
    layers: Sequence[tuple[torch.Tensor, ...]], scales: dict, case: Case, splits: int | None, device: torch.device
) -> float:
    """Return the median seconds of one layer's launch; on a GPU, all layers' launches are replayed
    in turn.
    """
    options = {"num_kv_splits": splits, "max_seq_len": max(case.lengths), "max_query_len": max(case.queries), **scales}
    launches = [partial(unified_attention, *layer, case.head_dim**-0.5, **options) for layer in layers]
    launch = replayed(launches) if device.type == "cuda" else launches[0]
    return median_seconds(launch, repeats=REPEATS, device=device) / (len(launches) if device.type == "cuda" else 1)


def gpu_decode(case: Case, kv: torch.dtype, bandwidth: float, device: torch.device) -> dict:
    """Measure one row: a decode's time with its keys split and unsplit, and the bytes it must move
    per second as a share of `bandwidth`.
    """
    tensors, scales = stored_as(kv, step_tensors(case, device, torch.bfloat16))
    moved = case.kv_bytes(kv) + 2 * tensors[0].nbytes
    layers = layers_of(tensors, device)
    whole, chosen = (attention_seconds(layers, scales, case, splits, device) for splits in (1, None))
    return {
        "case": case.name,
        "kv": SHORT[kv],
        "bytes": moved,
        "unsplit_us": round(whole * 1e6, 1),
        "engine_us": round(chosen * 1e6, 1),
        "split_gain": round(whole / chosen, 2),
        "gb_per_s": round(moved / chosen / 1e9, 1),
        "share_of_copy": round(moved / chosen / bandwidth, 3),
    }


def gpu_prefill(case: Case, device: torch.device) -> dict:
    """Compare one prompt's time with each of torch's attentions, which get contiguous K and V,
    repeated for all heads.
    """
    tensors = step_tensors(case, device, torch.bfloat16)
    q, k_cache, v_cache, _, _, block_table = tensors
    ours = attention_seconds([tensors], {}, case, None, device)
    attended = unified_attention(*tensors, case.head_dim**-0.5)
    length, group = case.lengths[0], case.heads // case.kv_heads
    blocks = block_table[0].long()
    keys, values = (cache[blocks].flatten(0, 1)[:length].transpose(0, 1) for cache in (k_cache, v_cache))
    keys, values = (one.repeat_interleave(group, 0).contiguous()[None] for one in (keys, values))
    queries = q.transpose(0, 1).contiguous()[None]
    theirs, difference = {}, 0.0
    for name, attend in torch_attentions(queries, keys, values).items():
        theirs[name] = round(median_seconds(attend, repeats=REPEATS, device=device) * 1e3, 4)
        difference = max(difference, (attend()[0].transpose(0, 1).float() - attended.float()).abs().max().item())
    best = min(theirs, key=lambda name: theirs[name])
    return {
        "case": case.name,
        "engine_ms": round(ours * 1e3, 4),
        "torch_ms": theirs,
        "best": best,
        "share_of_best": round(theirs[best] / 1e3 / ours, 3),
        "tflops": round(case.flops / ours / 1e12, 1),
        "largest_difference": difference,
    }


def gpu_verification(case: Verification, bandwidth: float, device: torch.device) -> dict:
    """Measure one row: a verification's time, and the logits' bytes per second as a share of
    `bandwidth`.
    """
    step = case.step(device)
    starts = (case.drafts + 1) * torch.arange(case.requests + 1, dtype=torch.int32, device=device)
    out = torch.empty(case.requests, case.drafts + 1, dtype=torch.int64, device=device)

    def verify() -> None:
        if device.type == "cuda":
            launch(out, step, starts)
        else:
            rejection_sample(step)

    function = replayed([verify]) if device.type == "cuda" else verify
    seconds = median_seconds(function, repeats=REPEATS, device=device)
    return {
        "case": case.name,
        "bytes": case.logit_bytes,
        "engine_us": round(seconds * 1e6, 1),
        "gb_per_s": round(case.logit_bytes / seconds / 1e9, 1),
        "share_of_copy": round(case.logit_bytes / seconds / bandwidth, 3),
    }


def torch_attentions(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> dict[str, Callable[[], torch.Tensor]]:
    """Return torch's causal attentions that run here, by name; q, k and v are `[1, heads, tokens,
    head_dim]`.
    """
    from torch.nn.attention import SDPBackend, sdpa_kernel

    def with_backend(backend: SDPBackend) -> Callable[[], torch.Tensor]:
        def attend() -> torch.Tensor:
            with sdpa_kernel(backend):
                return F.scaled_dot_product_attention(q, k, v, is_causal=True)

        return attend

    found = {}
    for name in ("FLASH_ATTENTION", "CUDNN_ATTENTION", "EFFICIENT_ATTENTION", "MATH"):
        if name == "MATH" and found:
            continue  # stores the scores: used only if there is nothing else
        attend = with_backend(getattr(SDPBackend, name))
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                attend()
        except RuntimeError:  # not built in, or not for this GPU
            continue
        found[name.lower().removesuffix("_attention")] = attend
    return found


def measure_gpu(quick: bool, device: torch.device) -> dict:
    """Measure all tables of a GPU."""
    bandwidth = copy_bandwidth(device)
    tokens = 1024 if quick else 4096
    cases = [
        decodes(f"64 decodes of {tokens:,}", [tokens] * 64, **LLAMA),
        decodes(f"256 decodes of {tokens // 14}", [tokens // 14] * 256, **LLAMA),
        decodes(f"one decode of {8 * tokens:,}", [8 * tokens], **LLAMA),
    ]
    has_fp8 = not torch.version.hip and torch.cuda.get_device_capability(device) >= (8, 9)
    kinds = (torch.bfloat16, torch.int8, *((torch.float8_e4m3fn,) if has_fp8 else ()))
    steps = [(case, kv) for case in cases for kv in kinds]
    decode = [gpu_decode(case, kv, bandwidth, device) for case, kv in track(steps, "decode")]
    requests = (1, 8) if quick else (1, 64)
    drafted = [Verification(count, 5, 128256, drawn) for count in requests for drawn in (False, True)]
    verified = [gpu_verification(case, bandwidth, device) for case in drafted]
    whole = gpu_prefill(prefill(f"prefill of {2 * tokens:,}", 2 * tokens, **LLAMA), device)
    columns = {
        "case": "one step", "kv": "K and V", "unsplit_us": "unsplit µs", "engine_us": "engine µs",
        "split_gain": "gain from splits", "gb_per_s": "GB/s", "share_of_copy": "share of a copy",
    }  # fmt: skip
    _print(f"Decode, q in bf16, heads {LLAMA}; a copy runs at {bandwidth / 1e9:,.0f} GB/s", columns, decode)
    columns = {"case": "one step", "engine_us": "engine µs", "gb_per_s": "GB/s", "share_of_copy": "share of a copy"}
    _print("Verifying drafts", columns, verified)
    others = {f"torch {name} ms": took for name, took in whole["torch_ms"].items()}
    row = {"one step": whole["case"], "engine ms": whole["engine_ms"], **others}
    row |= {"share of the best": whole["share_of_best"], "TFLOP/s": whole["tflops"]}
    table("Prefill, the same heads", tuple(row), [tuple(row.values())])
    tables = {"decode": decode, "verification": verified, "prefill": whole}
    return {"copy_gb_per_s": round(bandwidth / 1e9, 1), **tables}


def main(arguments: argparse.Namespace) -> None:
    """Measure what this device can run, print it, and save it."""
    device = pick_device(arguments.device)
    on_gpu = device.type == "cuda"
    name = "-".join(torch.cuda.get_device_name(device).lower().split()) if on_gpu else "cpu"
    path = arguments.json or (None if arguments.quick else RESULTS / f"kernels.{name}.json")
    if path:
        ensure_writable(path)
    figures = measure_gpu(arguments.quick, device) if on_gpu else measure_cpu(arguments.quick)
    report(record("kernels", figures), path)


def parser() -> argparse.ArgumentParser:
    flags = Parser(description=__doc__)
    flags.add_argument("--device", choices=DEVICES, default="auto", help="device to measure (default: the GPU, if any)")
    flags.add_argument("--quick", action="store_true", help="fewer and smaller cases; writes no file")
    flags.add_argument("--json", metavar="FILE", help="write the figures to FILE instead")
    return flags


if __name__ == "__main__":
    run(main, parser())
