"""Measure the engine on a busy machine: its rate alone, and beside one, two and four busy
processes.

    uv run python benchmarks/busy.py              # 5 minutes, on a machine that is otherwise idle
    uv run python benchmarks/busy.py --quick

The embedded model serves 128 requests at once in fp32, greedily; prompts and outputs have 16 to 128
tokens. Each waiting policy has a process of its own, and all take turns; the median counts. The
busy processes are loops in Python that this script starts and ends. The first policy is the
engine's own: its threads spin, but sleep while other processes want the cores. In the others, the
environment sets how long they spin: always (the library's own default), for a fixed number of
iterations, or never. The table is followed by one line of JSON.
"""

import argparse
import statistics
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from peer_models import requests_of
from peer_process import SETTLED_SECONDS, Peer, Running, busy_processes
from processors import with_others

from minivllm.config import EMBEDDED_MODEL, ModelConfig
from minivllm_lab.cli import benchmark_parser, positive_int, run
from minivllm_lab.progress import track
from minivllm_lab.results import record, report
from minivllm_lab.tables import console, table

OURS, SPINNING, PASSIVE = "as it is", "always spinning", "never spinning"
WAYS: dict[str, dict[str, str]] = {
    OURS: {},
    SPINNING: {"GOMP_SPINCOUNT": "300000"},
    "10,000 turns": {"GOMP_SPINCOUNT": "10000"},
    "1,000 turns": {"GOMP_SPINCOUNT": "1000"},
    PASSIVE: {"OMP_WAIT_POLICY": "passive"},
}
NEIGHBOURS = (0, 1, 2, 4)


def work_of(requests: int, seed: int) -> dict[str, Any]:
    """Return the work in the form that `peer_engines/run_minivllm.py` reads."""
    vocab_size = ModelConfig.from_pretrained(EMBEDDED_MODEL).vocab_size
    shape = {"model": str(EMBEDDED_MODEL), "load_format": "auto", "max_model_len": 1024, "max_num_batched_tokens": 2048}
    return {**shape, "device": "cpu", "requests": requests_of(requests, 16, 128, vocab_size, seed)}


def measure(neighbours: tuple[int, ...], rounds: int, work: dict[str, Any]) -> dict[str, dict[str, dict[str, Any]]]:
    """Measure tokens per second by waiting policy and number of busy processes; return the median
    and every round.
    """
    tokens = sum(one["output"] for one in work["requests"])
    turns: dict[str, dict[str, list[float]]] = {way: {str(count): [] for count in neighbours} for way in WAYS}
    with tempfile.TemporaryDirectory() as name, ExitStack() as processes:
        peers = [
            Peer(way, "run_minivllm.py", "float32", environment={"MINIVLLM_LOGGING_LEVEL": "WARNING", **environment})
            for way, environment in WAYS.items()
        ]
        engines = [processes.enter_context(Running(peer, work, Path(name))) for peer in track(peers, "starting")]
        for count in track(neighbours, "turns"):
            with busy_processes(count):
                for engine in [engine for _ in range(rounds) for engine in engines]:
                    time.sleep(SETTLED_SECONDS)
                    turns[engine.peer.title][str(count)].append(tokens / engine.ask("all")["seconds"])
    return {
        way: {count: {"rate": statistics.median(rates), "turns": rates} for count, rates in found.items()}
        for way, found in turns.items()
    }


def against(rates: dict[str, dict[str, dict[str, Any]]]) -> dict[str, float]:
    """Return the engine's rate as a share: when alone, of always spinning; beside busy processes,
    of never spinning.
    """
    return {
        count: one["rate"] / rates[SPINNING if count == "0" else PASSIVE][count]["rate"]
        for count, one in rates[OURS].items()
    }


def show(rates: dict[str, dict[str, dict[str, Any]]]) -> None:
    """Print the table, and the engine's own policy as a share of the better of the other two."""
    counts = list(rates[OURS])
    columns = ("waiting policy", *("alone" if count == "0" else f"beside {count}" for count in counts))
    rows = [(way, *(f"{found[count]['rate']:,.0f}" for count in counts)) for way, found in rates.items()]
    table("Tokens per second, alone and beside busy processes", columns, rows)
    alone, *beside = against(rates).values()
    console.print(
        f"{OURS}: alone {alone:.0%} of always spinning; beside {', '.join(counts[1:])} busy processes "
        f"{', '.join(f'{share:.0%}' for share in beside)} of never spinning"
    )


def main(arguments: argparse.Namespace) -> None:
    quick = arguments.quick
    rounds = arguments.rounds or (1 if quick else 3)
    work = work_of(32 if quick else 128, arguments.seed)
    rates = measure((0, 4) if quick else NEIGHBOURS, rounds, work)
    show(rates)
    figures = {"ways": rates, "against": against(rates), "rounds": rounds, "requests": len(work["requests"])}
    found = record("busy", figures)
    report(with_others(arguments.json, found), arguments.json)


def parser() -> argparse.ArgumentParser:
    flags = benchmark_parser(__doc__)
    flags.add_argument("--quick", action="store_true", help="32 requests, one round, alone and beside four processes")
    flags.add_argument("--rounds", type=positive_int, help="rounds of each policy (default: 3, quick: 1)")
    flags.add_argument("--seed", type=int, default=0, help="seed for lengths and prompts (default: 0)")
    return flags


if __name__ == "__main__":
    run(main, parser())
