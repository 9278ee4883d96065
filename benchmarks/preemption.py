"""Measure pools that are too small: where a live server's p99 leaves its floor.

    uv run python benchmarks/preemption.py --json benchmarks/results/preemption.cpu.json      # 4 minutes
    uv run python benchmarks/preemption.py --quick

`minivllm serve` with the embedded model in fp32 gets an open load of real clients, at a share of its
capacity. Each `--num-gpu-blocks-override` has its own server, with the same requests at the same
moments. Preemptions, recomputed tokens and the pool's usage are read from the server's `/metrics`,
the usage a few times per second. The table is followed by one line of JSON.
"""

import argparse
import os
import re
import statistics
import sys
import tempfile
import threading
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from serving import NAME, Serving, at_rate, random_asks

from minivllm_lab.cli import benchmark_parser, positive_int, run
from minivllm_lab.disturbance import Control
from minivllm_lab.engines.http_load import Ask
from minivllm_lab.marks import put_between_marks
from minivllm_lab.progress import track
from minivllm_lab.results import record, report
from minivllm_lab.tables import console, markdown_table, table

MAX_MODEL_LEN, BLOCK_SIZE = 512, 16
POOLS = (768, 384, 256, 192, 128, 80)
QUICK_POOLS = (768, 128)
"""Blocks that requests can use; a server gets one more, the null block."""
INPUT_LEN, OUTPUT_LEN, RANGE_RATIO = 64, 192, 0.75
LOADED, CLIENTS, SHARE_OF_CAPACITY = 160, 32, 0.6
ASK_EVERY = 0.1
"""Seconds between two looks at how full the pool is."""
COUNTERS = {"preemptions": "vllm:num_preemptions_total", "recomputed_tokens": "minivllm:recomputed_tokens_total"}
USAGE = "vllm:kv_cache_usage_perc"
KEPT = ("p99_e2el_ms", "median_e2el_ms", "p99_ttft_ms", "median_ttft_ms", "p99_itl_ms", "output_throughput")
SHOWN = ("p99_e2el_ms", "p99_ttft_ms", "output_throughput")
CLIFF_COLUMNS = (
    "blocks",
    "of the filled",
    "p99 of answers, ms",
    "p99 of first tokens",
    "tokens/s",
    "preemptions",
    "recomputed",
    "full",
)
NOTES = Path(__file__).resolve().parents[1] / "lessons" / "notes" / "11_preemption.md"


def metrics(port: int) -> dict[str, float]:
    """Return the server's counts since its start, and its pool's usage."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as page:
        text = page.read().decode()
    return {name: counted(text, full) for name, full in (*COUNTERS.items(), ("usage", USAGE))}


def counted(text: str, name: str) -> float:
    """Return the sum of a metric's values in Prometheus's text, or 0 if it is missing."""
    return sum(float(value) for value in re.findall(rf"^{re.escape(name)}\{{[^}}]*\}} (\S+)$", text, re.MULTILINE))


@contextmanager
def watched(port: int) -> Iterator[list[float]]:
    """Poll the pool's usage while the block runs, and yield the list of values."""
    seen: list[float] = []
    done = threading.Event()

    def ask() -> None:
        while not done.wait(ASK_EVERY):
            seen.append(metrics(port)["usage"])

    thread = threading.Thread(target=ask)
    thread.start()
    try:
        yield seen
    finally:
        done.set()
        thread.join()


def loaded(server: Serving, asks: Sequence[Ask]) -> dict[str, float]:
    """Return the figures of one pool under the open load, together with the server's own counts."""
    before = metrics(server.port)
    with watched(server.port) as usage:
        found = server.loaded(asks)
    after = metrics(server.port)
    figures = {name: found[name] for name in (*KEPT, "duration", "total_input_tokens", "total_output_tokens")}
    figures |= {name: after[name] - before[name] for name in COUNTERS}
    useful = figures["total_input_tokens"] + figures["total_output_tokens"] - len(asks)
    figures["wasted"] = figures["recomputed_tokens"] / (useful + figures["recomputed_tokens"])
    figures["mean_usage"], figures["most_usage"] = statistics.mean(usage), max(usage)
    return figures


def measure_cliff(pools: Sequence[int], number: int) -> dict[str, Any]:
    """Put the same load on servers whose pools differ; the largest pool comes first and decides how
    high that load is.
    """
    asks = random_asks(number, INPUT_LEN, OUTPUT_LEN, RANGE_RATIO, seed=1)
    found: dict[str, Any] = {"pools": {}}
    rate = 0.0
    with tempfile.TemporaryDirectory() as name:
        for blocks in track(sorted(pools, reverse=True), "serving"):
            with serving(blocks, Path(name)) as server:
                server.loaded(asks[:CLIENTS], CLIENTS)  # to warm up
                if not rate:
                    closed = server.loaded(asks, CLIENTS)
                    rate = SHARE_OF_CAPACITY * closed["request_throughput"]
                    found |= {"capacity": closed["request_throughput"], "rate": rate}
                found["pools"][str(blocks)] = loaded(server, at_rate(asks, rate))
    largest = max(pools)
    found["filled"] = found["pools"][str(largest)]["mean_usage"] * largest
    found["most_filled"] = found["pools"][str(largest)]["most_usage"] * largest
    found["work"] = {"requests": number, "input": INPUT_LEN, "output": OUTPUT_LEN, "range_ratio": RANGE_RATIO}
    return found


def serving(blocks: int, folder: Path) -> Serving:
    """Start a server whose requests can use `blocks` blocks."""
    flags = (
        "--host", "127.0.0.1", "--dtype", "float32", "--served-model-name", NAME, "--max-model-len", str(MAX_MODEL_LEN),
        "--max-num-seqs", "64", "--no-enable-prefix-caching", "--block-size", str(BLOCK_SIZE),
        "--num-gpu-blocks-override", str(blocks + 1),
    )  # fmt: skip
    return Serving(f"pool_{blocks}", [sys.executable, "-P", "-m", "minivllm"], os.environ, folder, flags)


def cliff_cells(found: Mapping[str, Any]) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """Return the columns and rows of the table, the largest pool first."""
    rows = []
    for blocks, pool in found["pools"].items():
        times = [f"{pool[name]:,.0f}" for name in SHOWN]
        counts = [f"{pool['preemptions']:.0f}", f"{pool['wasted']:.1%}", f"{pool['mean_usage']:.0%}"]
        rows.append((blocks, f"{int(blocks) / found['filled']:.2f}", *times, *counts))
    return CLIFF_COLUMNS, rows


def page_table(found: Mapping[str, Any]) -> str:
    """Return the Markdown table for lesson 11's notes."""
    return markdown_table(*cliff_cells(found))


def show_cliff(found: Mapping[str, Any]) -> None:
    """Print the table."""
    caption = (
        f"{found['work']['requests']} requests at {found['rate']:.1f} per second, {SHARE_OF_CAPACITY:.0%} of what "
        f"{CLIENTS} clients reach; with the largest pool they fill {found['filled']:.0f} blocks on average, "
        f"{found['most_filled']:.0f} at most. Recomputed: share of all computed tokens. Full: mean usage."
    )
    table("A live server, by the size of its pool", *cliff_cells(found), caption)


def main(arguments: argparse.Namespace) -> None:
    """Measure the cliff, and note whether anything disturbed it."""
    control = Control(loads_cores=True)
    pools = arguments.pools or (QUICK_POOLS if arguments.quick else POOLS)
    with control.watch():
        cliff = measure_cliff(pools, 60 if arguments.quick else LOADED)
    if words := control.disturbance():
        console.print(f"This machine was disturbed ({words}).")
    show_cliff(cliff)
    report(record("preemption", {"cliff": cliff, "disturbance": control.record()}), arguments.json)
    if arguments.page:
        NOTES.write_text(put_between_marks(NOTES.read_text(), "cliff", page_table(cliff)))


def parser() -> argparse.ArgumentParser:
    flags = benchmark_parser(__doc__)
    flags.add_argument(
        "--pools", type=positive_int, nargs="+", help="blocks that requests can use (default: 768 to 80)"
    )
    flags.add_argument("--quick", action="store_true", help="two pools, fewer requests")
    flags.add_argument("--page", action="store_true", help="also write the live server's table into lesson 11's notes")
    return flags


if __name__ == "__main__":
    run(main, parser())
