"""Lesson 04. Continuous batching: decide anew, before every step, who gets how many tokens.

Builds static batching and the token-budget scheduler that replaced it, the kernel that makes one launch of requests of
any length, and a pipeline that schedules a step before the one before it is done. You learn to say in advance what
vLLM's scheduler will do, what share of its slots a static batch wastes, and why batching and paging need each other.

    uv run python vllm/04_continuous_batching.py                      # under a minute on a laptop, no GPU needed
    uv run python vllm/04_continuous_batching.py --slots 4 --requests 32
"""

import math
import random
import statistics
from argparse import Namespace
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

from minivllm.config import CacheConfig, ModelConfig, SchedulerConfig
from minivllm.lab.cli import run
from minivllm.lab.disturbance import Control
from minivllm.lab.lesson import begin, keep
from minivllm.lab.progress import track
from minivllm.lab.proof import furthest, prove, refusal, show_errors
from minivllm.lab.recording import bare_engine, foretell, record_run
from minivllm.lab.reports import continuous_batching as report
from minivllm.lab.tables import console, heading
from minivllm.memory import memory_ledger
from minivllm.platforms.triton_utils import tl, triton
from minivllm.simulate.cost_model import FittedCost, RooflineCost, model_error
from minivllm.simulate.hardware import get_hardware
from minivllm.simulate.known_models import known_model
from minivllm.simulate.slots import seat
from minivllm.simulate.workloads import WORKLOADS, Lengths

# %% 1. The pain: a batch that ends together waits for its longest request


# region: static
def static_utilization(lengths: Sequence[int], batch: int) -> float:
    """Share of slot-steps that make a token when `batch` requests start and end together: mean / E[longest of batch].

    `lengths` is a sample of output lengths. The longest of `batch` draws is the i-th smallest with probability
    (i/n)^batch - ((i-1)/n)^batch.
    """
    n, ordered = len(lengths), sorted(lengths)
    longest = sum(x * ((i / n) ** batch - ((i - 1) / n) ** batch) for i, x in enumerate(ordered, start=1))
    return statistics.mean(lengths) / longest


# endregion

# %% 2. The idea: no phases, one budget. In each step every request catches up with what it knows


# region: schedule
@dataclass
class Request:
    """`num_tokens` are known (the prompt, then what was sampled); `num_computed_tokens` are in the KV cache."""

    request_id: str
    num_tokens: int
    max_tokens: int
    num_computed_tokens: int = 0
    num_output_placeholders: int = 0  # sampled by steps under way, values not known yet: only section 7 needs it


def schedule(running: list[Request], waiting: deque[Request], token_budget: int, max_num_seqs: int) -> dict[str, int]:
    """Who gets how many tokens in this step. Moves whom it admits from `waiting` to the end of `running`.

    Counts the tokens as computed at once. Returns tokens by request id, in the order in which they were given.
    """
    scheduled: dict[str, int] = {}

    def give(request: Request, budget: int) -> int:
        known = request.num_tokens + request.num_output_placeholders
        num_new_tokens = min(known - request.num_computed_tokens, budget)
        if num_new_tokens > 0:
            scheduled[request.request_id] = num_new_tokens
            request.num_computed_tokens += num_new_tokens
        return budget - num_new_tokens

    # In the order of their admission. A decode wants 1 token, an unfinished prompt the rest of it.
    for request in running:
        token_budget = give(request, token_budget)
    while waiting and token_budget > 0 and len(running) < max_num_seqs:
        running.append(waiting.popleft())
        token_budget = give(running[-1], token_budget)
    return scheduled


# endregion


# region: scheduler
class Scheduler:
    """The loop around `schedule`: requests wait, get tokens, sample when they have caught up, and leave."""

    def __init__(self, requests: Sequence[Request], token_budget: int, max_num_seqs: int, static: bool = False) -> None:
        self.token_budget, self.max_num_seqs, self.static = token_budget, max_num_seqs, static
        self.running: list[Request] = []
        self.waiting = deque(requests)

    def schedule(self) -> dict[str, int]:
        """The next step. A static batch lets nobody in before everybody is out."""
        doors_shut = self.static and self.running
        return schedule(self.running, deque() if doors_shut else self.waiting, self.token_budget, self.max_num_seqs)

    def update(self, scheduled: dict[str, int]) -> None:
        """After the forward pass: who has caught up has sampled one more token; who has all it wants leaves."""
        for request in self.running:
            if request.request_id in scheduled and request.num_computed_tokens == request.num_tokens:
                request.num_tokens, request.max_tokens = request.num_tokens + 1, request.max_tokens - 1
        self.running = [request for request in self.running if request.max_tokens > 0]

    def steps(self) -> Iterator[dict[str, int]]:
        """Step after step until all are served."""
        while self.running or self.waiting:
            scheduled = self.schedule()
            yield scheduled
            self.update(scheduled)


# endregion


def named(lengths: Sequence[tuple[int, int]]) -> list[Request]:
    """Requests A, B, C … with these (prompt, output) lengths."""
    return [Request(chr(65 + index), prompt, output) for index, (prompt, output) in enumerate(lengths)]


PUZZLE = [(10, 3), (4, 2), (12, 4), (3, 2)]


def first_steps(count: int = 4) -> list[dict[str, int]]:
    """The exercise: what A, B, C and D of the puzzle get in the first steps, with 12 tokens a step and 3 places."""
    steps = Scheduler(named(PUZZLE), token_budget=12, max_num_seqs=3).steps()
    return [scheduled for _, scheduled in zip(range(count), steps, strict=False)]


def show_timelines(outputs: Sequence[int], slots: int) -> dict:
    """The same requests in the same slots under both policies, drawn; steps and slots in use counted."""
    found = {}
    for name in ("static", "continuous"):
        rows = seat(Scheduler(named([(1, n) for n in outputs]), slots, slots, name == "static").steps(), slots)
        found[name] = {"steps": len(rows[0]), "used": sum(outputs) / (slots * len(rows[0])), "slots": rows}
        report.show_timeline(name, found[name])
    return found


def measure_slots(requests: int, slots: int, seed: int) -> dict:
    """Slots in use while requests wait, by kind of request: the formula, then both policies counted."""
    samples = {one.title: [r.output_tokens for r in one.sample(4096, seed)] for one in WORKLOADS.values()}
    samples["uniform 1–512"], found = [1 + i * 37 % 512 for i in range(4096)], {}
    for title, lengths in track(samples.items(), "counting slots"):
        theory = {str(batch): static_utilization(lengths, batch) for batch in (1, 2, 4, 8, 16, 32, 64)}
        found[title] = {"formula": static_utilization(lengths[:requests], slots), "theory": theory}
        for policy in ("static", "continuous"):
            scheduler = Scheduler(named([(1, n) for n in lengths[:requests]]), slots, slots, policy == "static")
            full = [len(step) for step in scheduler.steps() if scheduler.waiting]
            found[title][policy] = sum(full) / (slots * len(full))
    report.show_slots(found, slots)
    return found


# %% 3. Selective batching: everything but attention takes tokens one by one, so lay all requests end to end


# region: ragged
def ragged_attention(q: Tensor, keys: Tensor, values: Tensor, query_start: Tensor, key_start: Tensor) -> Tensor:
    """Each request's new tokens see its own keys, up to themselves. A loop: one attention a request.

    q [tokens, heads, d]; keys, values [all keys, kv_heads, d]; request i owns the rows from start[i] to start[i + 1]
    of each, and its queries are the last of its keys -> like q.
    """
    out = torch.empty_like(q)
    for (a, b), (c, d) in zip(pairwise(query_start.tolist()), pairwise(key_start.tolist()), strict=True):
        late = torch.ones(b - a, d - c, dtype=torch.bool, device=q.device).tril(d - c - (b - a))
        rows = (x.transpose(0, 1)[None] for x in (q[a:b], keys[c:d], values[c:d]))
        out[a:b] = F.scaled_dot_product_attention(*rows, attn_mask=late, enable_gqa=True)[0].transpose(0, 1)
    return out


# endregion


@triton.jit
def ragged_kernel(
    out, q, keys, values, query_start, key_start, scale,
    GROUP: tl.constexpr, KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_Q: tl.constexpr, BLOCK_T: tl.constexpr,
):  # fmt: skip
    """`ragged_attention` in one launch. Grid: (requests, heads, tiles of BLOCK_Q queries in the longest request).

    Layouts as there; starts int32 [requests + 1]. float32 inside. Reads a request's keys and values once for each head
    and tile of its queries; 4 * HEAD_DIM FLOPs for each (query, key) pair and head. A decode is a tile with one real
    row, and tiles beyond a request's queries end at once: the engine's kernel finds its request by bisection instead.
    """
    request, head, tile = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    first_query, first_key = tl.load(query_start + request), tl.load(key_start + request)
    queries, length = tl.load(query_start + request + 1) - first_query, tl.load(key_start + request + 1) - first_key
    row, column = tile * BLOCK_Q + tl.arange(0, BLOCK_Q), tl.arange(0, BLOCK_D)
    position = length - queries + row  # of each query in its text: all that causality needs to know
    at = ((first_query + row).to(tl.int64) * GROUP * KV_HEADS + head)[:, None] * HEAD_DIM + column[None, :]
    real = (row < queries)[:, None] & (column < HEAD_DIM)[None, :]
    if tile * BLOCK_Q < queries:
        query = tl.load(q + at, mask=real, other=0.0)
        peak, total = tl.full([BLOCK_Q], -1e30, tl.float32), tl.zeros([BLOCK_Q], tl.float32)
        result = tl.zeros([BLOCK_Q, BLOCK_D], tl.float32)
        for start in range(0, tl.minimum(length, length - queries + (tile + 1) * BLOCK_Q), BLOCK_T):
            token = start + tl.arange(0, BLOCK_T)
            key = ((first_key + token).to(tl.int64) * KV_HEADS + head // GROUP)[:, None] * HEAD_DIM + column[None, :]
            there = (token < length)[:, None] & (column < HEAD_DIM)[None, :]
            k, v = tl.load(keys + key, mask=there, other=0.0), tl.load(values + key, mask=there, other=0.0)
            scores = tl.dot(query, tl.trans(k), input_precision="ieee") * scale
            scores = tl.where(token[None, :] <= position[:, None], scores, -float("inf"))
            new_peak = tl.maximum(peak, tl.max(scores, axis=1))
            weights, keep = tl.exp(scores - new_peak[:, None]), tl.exp(peak - new_peak)
            total = total * keep + tl.sum(weights, axis=1)
            result = result * keep[:, None] + tl.dot(weights.to(v.dtype), v, input_precision="ieee")
            peak = new_peak
        tl.store(out + at, (result / tl.maximum(total, 1e-30)[:, None]).to(out.dtype.element_ty), mask=real)


def ragged_launch(q: Tensor, keys: Tensor, values: Tensor, query_start: Tensor, key_start: Tensor) -> Tensor:
    """`ragged_attention`, by the kernel."""
    (_, heads, head_dim), kv_heads, out = q.shape, keys.shape[1], torch.empty_like(q)
    tiles = triton.cdiv(int(query_start.diff().max()), 16)
    ragged_kernel[(len(query_start) - 1, heads, max(tiles, 1))](
        out, q, keys, values, query_start, key_start, 1 / math.sqrt(head_dim), GROUP=heads // kv_heads,
        KV_HEADS=kv_heads, HEAD_DIM=head_dim, BLOCK_D=max(16, triton.next_power_of_2(head_dim)), BLOCK_Q=16, BLOCK_T=32,
    )  # fmt: skip
    return out


def starts(lengths: Sequence[int]) -> Tensor:
    """Where each request begins, and where the last one ends: int32 [requests + 1]."""
    return torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)


def verify_kernel(device: torch.device) -> dict:
    """One launch over a prefill, decodes, a chunk and an empty request, against the loop in float64."""
    queries, lengths, errors = [17, 1, 16, 0, 1, 5], [17, 1, 40, 3, 65, 33], {}
    layout = starts(queries), starts(lengths)
    for heads, kv_heads, head_dim in track([(4, 4, 64), (6, 2, 80)], "verifying the kernel"):
        q, k, v = (torch.randn(n, h, head_dim).half() for n, h in ((40, heads), (159, kv_heads), (159, kv_heads)))
        expected = ragged_attention(q.double(), k.double(), v.double(), *layout)
        found = ragged_launch(*(x.to(device) for x in (q, k, v, *layout)))
        errors[f"{heads} heads on {kv_heads}, of {head_dim}"] = furthest(found, expected)
    padded = max(queries) * len(queries)
    caption = f"new tokens of six requests: {queries}. End to end {sum(queries)} rows, padded {padded}"
    largest = show_errors("The ragged kernel", errors, 4e-3, caption=caption)
    return {"largest_error": largest, "rows": sum(queries), "padded": padded}


# %% 4 and 5. On the engine: batching, then paging, on the same memory; and how well a simulator foretells it

MAX_LEN, RESERVED = 512, 8  # the memory: so many requests if each reserves the greatest length
WAYS = {  # a reserved region is a block as long as the greatest length
    "one at a time": (MAX_LEN, {"max_num_seqs": 1}),
    "static, reserved": (MAX_LEN, {"max_num_seqs": RESERVED, "static_batching": True}),
    "continuous, reserved": (MAX_LEN, {"max_num_seqs": RESERVED}),
    "continuous, paged": (16, {"max_num_seqs": 64}),
}


def pool(block_size: int) -> CacheConfig:
    """That memory in blocks of this size, and the null block."""
    count = 1 + RESERVED * MAX_LEN // block_size
    return CacheConfig(num_gpu_blocks=count, block_size=block_size, enable_prefix_caching=False)


def measure_engine(model: str, requests: int, device: torch.device, seed: int) -> dict:
    """Throughput of each way, and how far a simulation is off that knows half of the steps."""
    draw, outputs, runs, found = random.Random(seed), Lengths(48.0), {}, {}
    lengths = [(draw.randint(8, 64), min(outputs.quantile(draw.random()), MAX_LEN - 64)) for _ in range(requests)]
    for name, (size, settings) in track(WAYS.items(), "running the engine"):
        work = lengths[: requests // 6] if settings["max_num_seqs"] == 1 else lengths
        core = bare_engine(model, device, pool(size), max_model_len=MAX_LEN, **settings)
        runs[name] = work, record_run(core, work)
    steps = [step for _, recording in runs.values() for step in recording.steps]
    cost, base = FittedCost.fit(steps[::2]), runs["static, reserved"][1].throughput
    for name, (work, got) in runs.items():
        config = SchedulerConfig(max_model_len=MAX_LEN, **WAYS[name][1])
        off = foretell(work, got, config, pool(WAYS[name][0]), cost)
        figures = {"most": got.most_running, "steps": len(got.steps), "rate": got.throughput}
        found[name] = figures | {"gain": got.throughput / base, "off": off}
    error = model_error(cost, steps[1::2])
    report.show_ways(found, requests, RESERVED * MAX_LEN, error)
    alone, _, batched, paged = (one["gain"] for one in found.values())
    ratios = {"batching": batched, "paging": paged / batched, "both": paged, "over_one": paged / alone}
    return {**ratios, "most": found["continuous, paged"]["most"], "ways": found, "model_error": str(error)}


# %% 6. Break it


def starved(token_budget: int = 5, steps: int = 20) -> dict[str, int]:
    """Eight requests decode under a budget of five tokens: what each of them has got after some steps."""
    scheduler = Scheduler(named([(1, 100)] * 8), 8, 8)
    scheduler.update(scheduler.schedule())
    scheduler.token_budget, got = token_budget, dict.fromkeys("ABCDEFGH", 0)
    for _, scheduled in zip(range(steps), scheduler.steps(), strict=False):
        got = {name: count + scheduled.get(name, 0) for name, count in got.items()}
    report.show_starved(got, token_budget, steps)
    return got


# %% 7. Asynchronous scheduling: decide on the next step while this one is computed


# region: pipeline
def pipeline(depth: int, placeholders: bool, tokens: int, schedule_ms: float, forward_ms: float) -> dict:
    """One request generates `tokens`, with up to `depth` steps under way. CPU and GPU each do one thing at a time."""
    request, cpu, gpu, under_way, steps, empty = Request("A", 1, tokens), 0.0, 0.0, deque(), 0, 0
    while request.max_tokens > 0:
        cpu += schedule_ms
        enough = request.num_output_placeholders >= request.max_tokens  # the rest is being sampled already
        scheduled = {} if enough else schedule([request], deque(), 1, 1)
        if scheduled:
            gpu, steps = max(cpu, gpu) + forward_ms, steps + 1
            request.num_output_placeholders += placeholders
            under_way.append(gpu)
        elif not enough:
            empty += 1  # it waits for a token whose value the scheduler does not need
        if len(under_way) == depth or not scheduled:
            cpu = max(cpu, under_way.popleft())  # wait for the oldest step, and take its token in
            request.num_output_placeholders -= placeholders
            request.num_tokens, request.max_tokens = request.num_tokens + 1, request.max_tokens - 1
    return {"ms_per_token": cpu / tokens, "steps": steps, "empty": empty}


# endregion


def show_pipelines(schedule_ms: float = 2.0, forward_ms: float = 5.0, tokens: int = 100) -> dict:
    """One step after the other; two deep without placeholders; two deep with them."""
    kinds = {"one after the other": (1, False), "two deep, no placeholders": (2, False), "two deep": (2, True)}
    found = {name: pipeline(*kind, tokens, schedule_ms, forward_ms) for name, kind in kinds.items()}
    report.show_pipelines(found, schedule_ms, forward_ms)
    return found


# %% The talk, in order


def main(arguments: Namespace) -> None:
    """Run the lesson from top to bottom."""
    device, quick, seed = begin("Lesson 04. Continuous batching", arguments), arguments.quick, arguments.seed
    ModelConfig.from_pretrained(arguments.model)  # says at once that there is none
    control = Control()
    requests = arguments.requests or (16 if quick else 256 if arguments.full else 72)
    heading("1 and 2. The slots of a batch")
    found: dict = {"timelines": show_timelines((3, 14, 5, 8, 12, 4, 6, 2, 9, 5), 4)}
    found["slots"] = measure_slots(128 if quick else 512, arguments.slots, seed)
    heading("3. One forward pass for requests of any length")
    found["kernel"] = prove(verify_kernel, device)
    heading("4 and 5. Batching, then paging, on the engine")
    with control.watch():
        found["engine"] = measure_engine(arguments.model, requests, device, seed)
    heading("6. Break it (Llama-3.1-8B on an H100, modelled)")
    llama, card = known_model("Llama-3.1-8B"), get_hardware("H100")
    blocks = memory_ledger(llama, card, max_model_len=8192).num_blocks
    cost, cache = RooflineCost.of(llama, card), CacheConfig(num_gpu_blocks=blocks, enable_prefix_caching=False)
    found["overload"] = report.measure_overload(cost, cache, 60 if quick else 200, seed)
    found["long_prompt"] = report.measure_long_prompt(cost, cache)
    small = CacheConfig(num_gpu_blocks=20)  # not one request of the greatest length fits: it could never finish
    refused = refusal(lambda: bare_engine(arguments.model, device, small, max_model_len=MAX_LEN))
    found |= {"starved": starved(), "refused": refused}
    console.print(f"larger than the pool: {refused}")
    heading("7. Asynchronous scheduling")
    found["pipeline"] = show_pipelines()
    report.close(found, arguments.slots, control.disturbance())
    keep(__file__, found, arguments, report.draw, disturbance=control.record())


parser = partial(report.parser, __doc__)

if __name__ == "__main__":
    run(main, parser())
