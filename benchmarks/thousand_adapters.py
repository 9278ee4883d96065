"""Measure requests per second with a thousand adapters in one engine, beside those with 5, 50 and
200.

    uv run python benchmarks/thousand_adapters.py --json benchmarks/results/thousand_adapters.cpu.json   # 3 minutes
    uv run python benchmarks/thousand_adapters.py --peer --json ...                                      # and vLLM
    uv run python benchmarks/thousand_adapters.py --quick

The embedded model runs in fp32, greedily, with 20 requests at once and 16 slots. Random adapters of
rank 8 on all seven linears are all in host memory before the clock starts. Each number of adapters
gets the same 4,000 requests of 16 tokens in and 8 out:

- "five in a batch": four requests in a row use the same adapter, so a batch of 20 has five,
  however many there are. With 1,000 adapters each group of four has to copy its adapter into a slot
  first.
- "Zipf": requests choose by Zipf's law (exponent 1), so a batch has more adapters the more there
  are.
- "none": no request names an adapter, in the same engine.

The kinds of run take turns, in a different order each round; the median of the rounds counts.
Adapters per batch are counted in the scheduler, copies into slots in the slot table.

With `--peer`, the same requests also go through vLLM's CPU build in its own environment (`make
peers`): both engines run in processes of their own, in turns, with no adapter, 5 and 1,000. Its
figures are added to those in the file.

The table is followed by one line of JSON.
"""

import argparse
import random
import statistics
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from peer_process import SETTLED_SECONDS, VLLM_PYTHON, Peer, Running

from minivllm import LLM, LoRARequest, SamplingParams
from minivllm.config import EMBEDDED_MODEL, ModelConfig, Parts
from minivllm.core.adapter_slots import AdapterSlots
from minivllm.core.policy import SchedulingPolicy
from minivllm.errors import MinivllmError
from minivllm_lab.cli import benchmark_parser, positive_int, run
from minivllm_lab.disturbance import Control
from minivllm_lab.multi_lora.adapters import write_random_adapters
from minivllm_lab.multi_lora.costs import zipf_adapters
from minivllm_lab.multi_lora.in_engine import StepCounts
from minivllm_lab.progress import track, working
from minivllm_lab.results import read_record, record, report
from minivllm_lab.tables import console, table
from minivllm_simulate.memory.adapters import adapter_bytes

ADAPTERS, QUICK_ADAPTERS = (5, 50, 200, 1000), (5, 50)
RANK, SLOTS, PLACES, GROUP = 8, 16, 20, 4
"""GROUP requests in a row ask for the same adapter: PLACES / GROUP adapters in a batch."""
PROMPT, ANSWER = 16, 8
REQUESTS, QUICK_REQUESTS = 4000, 200
PEER_REQUESTS, PEER_ADAPTERS = 1000, (5, 1000)
NONE = "none"
FLAT = 0.15
"""By how much requests a second may differ between few adapters and many."""


class Counting(AdapterSlots):
    """Adapter slots that count the copies into them."""

    copies = 0

    def activate(self, adapter_id: int) -> int:
        """Count the copy, then activate the adapter."""
        Counting.copies += adapter_id not in self
        return super().activate(adapter_id)


def in_groups(adapters: int, requests: int) -> list[int]:
    """Return the adapter of each request, counted from 1: four requests in a row use the same one,
    the next four the next.
    """
    return [index // GROUP % adapters + 1 for index in range(requests)]


def wishes_of(counts: Sequence[int], requests: int, seed: int) -> dict[str, list[int]]:
    """Return the adapter of each request, 0 for none, by the kind of run."""
    found = {NONE: [0] * requests}
    for count in counts:
        found[f"five in a batch, {count}"] = in_groups(count, requests)
    for count in counts:
        found[f"Zipf, {count}"] = zipf_adapters(count, 1.0, requests, seed)
    return found


def prompts_of(requests: int, seed: int) -> list[list[int]]:
    """Return random prompts of PROMPT tokens."""
    draw, vocab_size = random.Random(seed), ModelConfig.from_pretrained(EMBEDDED_MODEL).vocab_size
    return [[draw.randrange(1, vocab_size) for _ in range(PROMPT)] for _ in range(requests)]


class Engine:
    """Our engine with all adapters in host memory."""

    def __init__(self, folders: Sequence[Path]) -> None:
        self.counts = StepCounts()
        self.llm = LLM(
            EMBEDDED_MODEL,
            dtype="float32",
            device="cpu",
            max_model_len=64,
            max_num_seqs=PLACES,
            enable_prefix_caching=False,
            skip_tokenizer_init=True,
            enable_lora=True,
            max_loras=SLOTS,
            max_lora_rank=RANK,
            max_cpu_loras=max(len(folders), SLOTS),
            parts=Parts(policy=SchedulingPolicy(schedule=self.counts.schedule), lora_slots=Counting),
        )
        self.requests = [LoRARequest(path.name, index, str(path)) for index, path in enumerate(folders, start=1)]
        start = time.perf_counter()
        for request in track(self.requests, "reading adapters into host memory"):
            self.llm.llm_engine.add_lora(request)
        self.seconds_to_read = time.perf_counter() - start

    def serve(self, prompts: Sequence[list[int]], wishes: Sequence[int]) -> dict[str, float]:
        """Serve the prompts; return the seconds, the mean number of adapters in a step, and the
        copies into slots.
        """
        self.counts.reset()
        Counting.copies = 0
        named = [self.requests[wish - 1] if wish else None for wish in wishes]
        params = SamplingParams(temperature=0.0, max_tokens=ANSWER, ignore_eos=True)
        inputs = [{"prompt_token_ids": prompt} for prompt in prompts]
        start = time.perf_counter()
        self.llm.generate(inputs, params, lora_request=named, use_tqdm=False)
        seconds = time.perf_counter() - start
        return {"seconds": seconds, "adapters_in_a_step": self.counts.mean, "copies": Counting.copies}


def measure(counts: Sequence[int], requests: int, rounds: int, seed: int) -> dict[str, Any]:
    """Measure every kind of run, all in one engine."""
    wishes, prompts = wishes_of(counts, requests, seed), prompts_of(requests, seed)
    turns: dict[str, list[dict[str, float]]] = {kind: [] for kind in wishes}
    with tempfile.TemporaryDirectory() as name:
        with working("writing random adapters"):
            folders = write_random_adapters(name, max(counts), RANK)
        engine = Engine(folders)
        for kind in wishes:
            engine.serve(prompts[: 2 * PLACES], wishes[kind][: 2 * PLACES])  # to warm up
        order = [kind for turn in range(rounds) for kind in (list(wishes) if turn % 2 == 0 else reversed(list(wishes)))]
        for kind in track(order, "serving"):
            turns[kind].append(engine.serve(prompts, wishes[kind]))
    found = {kind: figures_of(some, requests) for kind, some in turns.items()}
    one = adapter_bytes(ModelConfig.from_pretrained(EMBEDDED_MODEL), RANK, dtype="float32")
    return {
        "kinds": found,
        "flat": flatness(found, counts),
        "seconds_to_read": engine.seconds_to_read,
        "host_bytes": one * max(counts),
        "slot_bytes": one * SLOTS,
    }


def figures_of(turns: Sequence[dict[str, float]], requests: int) -> dict[str, Any]:
    """Return the median rate of one kind of run, its spread, and the counts of its last turn."""
    rates = sorted(requests / turn["seconds"] for turn in turns)
    return {
        "requests_per_second": statistics.median(rates),
        "spread": [rates[0], rates[-1]],
        "adapters_in_a_step": turns[-1]["adapters_in_a_step"],
        "copies": turns[-1]["copies"],
    }


def flatness(found: dict[str, Any], counts: Sequence[int]) -> float:
    """Return the rate with the most adapters divided by that with the fewest, with five adapters in
    a batch.
    """
    most, least = (found[f"five in a batch, {count}"]["requests_per_second"] for count in (counts[-1], counts[0]))
    return most / least


# ---- vLLM beside it


def measure_peers(counts: Sequence[int], requests: int, rounds: int, seed: int) -> dict[str, Any]:
    """Measure requests per second of both engines, in turns, on the same requests."""
    wishes, prompts = wishes_of(counts, requests, seed), prompts_of(requests, seed)
    wishes = {kind: some for kind, some in wishes.items() if not kind.startswith("Zipf")}
    turns: dict[str, dict[str, list[float]]] = {}
    outputs: dict[str, dict[str, list[list[int]]]] = {}
    with tempfile.TemporaryDirectory() as name, ExitStack() as processes:
        folder = Path(name)
        folders = write_random_adapters(folder / "adapters", max(counts), RANK)
        work = {
            "model": str(EMBEDDED_MODEL), "load_format": "auto", "device": "cpu", "max_model_len": 64,
            "max_num_batched_tokens": 2048, "max_num_seqs": PLACES,
            "lora": {"max_loras": SLOTS, "max_lora_rank": RANK, "max_cpu_loras": len(folders)},
            "requests": [{"prompt": prompt, "output": ANSWER} for prompt in prompts],
            "adapters": {
                kind: [str(folders[one - 1]) if one else None for one in some] for kind, some in wishes.items()
            },
        }  # fmt: skip
        peers = [
            Peer("minivllm", "run_minivllm.py", "float32"),
            Peer("vLLM", "run_vllm.py", "float32", python=VLLM_PYTHON),
        ]
        running = [
            processes.enter_context(Running(peer, work, folder)) for peer in track(peers, "starting and warming up")
        ]
        for one in running:  # each reads all adapters into host memory, untimed
            for kind in wishes:
                one.ask(kind)
        order = [(one, kind) for _ in range(rounds) for kind in wishes for one in running]
        for one, kind in track(order, "turns"):
            time.sleep(SETTLED_SECONDS)
            answer = one.ask(kind)
            turns.setdefault(one.peer.title, {}).setdefault(kind, []).append(answer["seconds"])
            outputs.setdefault(one.peer.title, {})[kind] = answer["outputs"]
        version = running[1].facts["version"]
    rates = {
        title: {kind: requests / statistics.median(some) for kind, some in by_kind.items()}
        for title, by_kind in turns.items()
    }
    same = {kind: sum(map(list.__eq__, outputs["minivllm"][kind], outputs["vLLM"][kind])) / requests for kind in wishes}
    return {"requests": requests, "requests_per_second": rates, "same_tokens": same, "version": version}


# ---- the command


def show(figures: dict[str, Any]) -> None:
    """Print the tables."""
    columns = ("requests", "adapters", "adapters in a step", "copies into slots", "requests/s", "÷ the fewest")
    rows = []
    first: dict[str, float] = {}
    for kind, one in figures.get("kinds", {}).items():
        traffic, _, count = kind.partition(", ")
        rate = one["requests_per_second"]
        share = f"{rate / first.setdefault(traffic, rate):.2f}" if count else ""
        rows.append((
            traffic, count, f"{one['adapters_in_a_step']:.1f}", f"{one['copies']:,.0f}", f"{rate:,.0f}", share
        ))  # fmt: skip
    if rows:
        table(f"{figures['requests']:,} requests of {PROMPT} + {ANSWER} tokens, {PLACES} at once", columns, rows)
    if peer := figures.get("peer"):
        ours, theirs = (peer["requests_per_second"][name] for name in ("minivllm", "vLLM"))
        rows = [
            (kind, f"{ours[kind]:,.0f}", f"{theirs[kind]:,.0f}", f"{ours[kind] / theirs[kind]:.2f} ×",
             f"{peer['same_tokens'][kind]:.1%}")
            for kind in ours
        ]  # fmt: skip
        columns = ("requests", "minivllm", f"vLLM {peer['version']}", "ours ÷ vLLM's", "same tokens")
        table("Requests per second beside vLLM's CPU build", columns, rows)


def main(arguments: argparse.Namespace) -> None:
    if arguments.peer and not VLLM_PYTHON.exists():
        raise MinivllmError(f"vLLM has no environment at {VLLM_PYTHON.parent.parent}: run make peers")
    rounds = arguments.rounds or (1 if arguments.quick else 2)
    control = Control()
    with control.watch():
        if arguments.peer:
            requests = QUICK_REQUESTS if arguments.quick else PEER_REQUESTS
            counts = QUICK_ADAPTERS if arguments.quick else PEER_ADAPTERS
            figures: dict[str, Any] = {"peer": measure_peers(counts, requests, rounds, arguments.seed)}
        else:
            counts = arguments.adapters or (QUICK_ADAPTERS if arguments.quick else ADAPTERS)
            requests = QUICK_REQUESTS if arguments.quick else REQUESTS
            figures = {"requests": requests, "rounds": rounds, **measure(counts, requests, rounds, arguments.seed)}
    figures["disturbance_peer" if arguments.peer else "disturbance"] = control.record()
    found = record("thousand_adapters", joined(arguments.json, figures))
    show(found["figures"])
    if words := control.disturbance():
        console.print(f"This machine was disturbed ({words}).")
    elif "flat" in figures:
        held = abs(1 - figures["flat"]) <= FLAT
        console.print(f"{'flat' if held else 'not flat'} within {FLAT:.0%}: {figures['flat']:.2f} of the rate")
    report(found, arguments.json)


def joined(path: str | None, figures: dict[str, Any]) -> dict[str, Any]:
    """Return these figures, merged with the file's figures for the other kind of run."""
    if not path or not Path(path).exists():
        return figures
    return read_record(path, "thousand_adapters")["figures"] | figures


def parser() -> argparse.ArgumentParser:
    flags = benchmark_parser(__doc__)
    flags.add_argument("--peer", action="store_true", help="compare our engine with vLLM's CPU build, in turns")
    flags.add_argument("--adapters", type=positive_int, nargs="+", help="numbers of adapters (default: 5 50 200 1000)")
    flags.add_argument("--rounds", type=positive_int, help="rounds of each kind (default: 2, quick: 1)")
    flags.add_argument("--quick", action="store_true", help=f"{QUICK_REQUESTS} requests, up to 50 adapters, one round")
    flags.add_argument("--seed", type=int, default=0, help="seed for prompts and Zipf draws (default: 0)")
    return flags


if __name__ == "__main__":
    run(main, parser())
