"""Our server beside vLLM's CPU server, our load generator beside vLLM's, and what a server keeps of `LLM.generate`.

    make peers                                    # makes vLLM's own environment, among other things
    uv run python benchmarks/serving.py --json benchmarks/results/serving.cpu.json
    uv run python benchmarks/serving.py --quick

The embedded model, fp32, greedy, random prompts; everything in turns, and medians count.

- clients: `minivllm bench serve` and `vllm bench serve` load our server with the same flags.
- servers: the same requests from the same client; first a closed load of 64 clients (capacity), then an open load at
  70 % of vLLM's capacity. Both servers run all the time; the one whose turn it is not is idle.
- share: output tokens per second of the closed load, of what `LLM.generate` makes with all these requests at once.

Without vLLM's environment only the share is measured. The table is followed by one line of JSON.
"""

import argparse
import asyncio
import json
import math
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import vllm_cli
from peers import Peer, Running

from minivllm.benchmarks.client import SampleRequest, Target
from minivllm.benchmarks.datasets import random_requests
from minivllm.benchmarks.load import run_load
from minivllm.benchmarks.metrics import calculate_metrics
from minivllm.config import EMBEDDED_MODEL
from minivllm.errors import MinivllmError
from minivllm.lab.cli import Parser, positive_int, run
from minivllm.lab.progress import track
from minivllm.lab.results import record, write_record
from minivllm.lab.tables import console, table
from minivllm.models.tokenizer import load_tokenizer

NAME = "tiny-python"
MAX_MODEL_LEN = 512
FLAGS = ("--max-model-len", str(MAX_MODEL_LEN), "--dtype", "float32", "--served-model-name", NAME)
FURTHER = ("--host", "127.0.0.1", "--no-enable-prefix-caching", "--max-num-seqs", "256")
INPUT_LEN, OUTPUT_LEN, RANGE_RATIO = 96, 96, 0.5
CONCURRENCY = 64
SHARE_OF_CAPACITY = 0.7
SECONDS_TO_START = 300
LATENCIES = ("median_ttft_ms", "p99_ttft_ms", "median_itl_ms", "p99_itl_ms")
SHOWN_OF_CLIENTS = ("output_throughput", "mean_ttft_ms", *LATENCIES, "mean_tpot_ms")


class Serving:
    """A server's process."""

    def __init__(
        self,
        title: str,
        command: Sequence[str],
        environment: Mapping[str, str],
        folder: Path,
        flags: Sequence[str] = (*FLAGS, *FURTHER),
    ) -> None:
        self.title = title
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self.log = folder / f"{title}.log"
        whole = [*command, "serve", str(EMBEDDED_MODEL), *flags, "--port", str(self.port)]
        with self.log.open("w") as log:
            self.process = subprocess.Popen(whole, stdout=log, stderr=log, env=dict(environment), cwd=folder)

    def __enter__(self) -> "Serving":
        """Waits until it is ready."""
        end = time.monotonic() + SECONDS_TO_START
        while time.monotonic() < end and self.process.poll() is None:
            try:
                with urllib.request.urlopen(f"{self.url}/health", timeout=5):
                    return self
            except OSError:
                time.sleep(0.5)
        self.__exit__()
        raise MinivllmError(f"{self.title} does not start: {' | '.join(self.log.read_text().splitlines()[-5:])}")

    def __exit__(self, *reason: object) -> None:
        self.process.terminate()
        try:
            self.process.wait(30)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()

    def loaded(self, samples: Sequence[SampleRequest], **load: Any) -> dict[str, Any]:
        """The figures of our client."""
        target = Target(self.url, NAME, ignore_eos=True, extra_body={"temperature": 0})
        result = asyncio.run(run_load(target, samples, **load))
        found = calculate_metrics(result, percentile_metrics=("ttft", "tpot", "itl", "e2el"))
        if found["failed"]:
            raise MinivllmError(f"{self.title}: {next(error for error in found['errors'] if error)}")
        return {name: value for name, value in found.items() if isinstance(value, int | float)}


def medians(turns: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """The median of each figure."""
    return {name: statistics.median(turn[name] for turn in turns) for name in turns[0]}


def in_turns(rounds: int, what: str, **kinds: Callable[[], dict[str, float]]) -> dict[str, dict[str, Any]]:
    """Measure each kind once a round; the medians, and the lowest and highest output throughput."""
    turns: dict[str, list[dict[str, float]]] = {name: [] for name in kinds}
    for name in track([name for _ in range(rounds) for name in kinds], what):
        turns[name].append(kinds[name]())
    spread = {name: sorted(turn["output_throughput"] for turn in found) for name, found in turns.items()}
    return {name: medians(found) | {"spread": [spread[name][0], spread[name][-1]]} for name, found in turns.items()}


def compare_clients(ours: Serving, folder: Path, number: int, rounds: int) -> dict[str, Any]:
    """Both load generators as commands, on our server; a second one of each says what is noise."""

    def figures(command: Sequence[str], environment: Mapping[str, str]) -> dict[str, float]:
        path = folder / "client.json"
        flags = {
            "backend": "openai", "base-url": ours.url, "model": NAME, "tokenizer": EMBEDDED_MODEL,
            "dataset-name": "random", "num-prompts": number, "random-input-len": INPUT_LEN,
            "random-output-len": OUTPUT_LEN, "random-range-ratio": 0.0, "max-concurrency": 16, "seed": 1,
            "temperature": 0, "result-dir": folder, "result-filename": path.name,
        }  # fmt: skip
        given = [text for flag, value in flags.items() for text in (f"--{flag}", str(value))]
        whole = [*command, "bench", "serve", *given, "--ignore-eos", "--save-result", "--disable-tqdm"]
        done = subprocess.run(whole, capture_output=True, text=True, env=dict(environment), cwd=folder)
        if done.returncode:
            raise MinivllmError(f"{command[0]}: {' | '.join(done.stderr.splitlines()[-5:])}")
        found = json.loads(path.read_text())
        return {name: found[name] for name in ("completed", "total_output_tokens", *SHOWN_OF_CLIENTS)}

    own, vllm = [sys.executable, "-P", "-m", "minivllm"], [str(vllm_cli.ENVIRONMENT / "bin" / "vllm")]
    variables = vllm_cli.variables(folder)
    return in_turns(
        rounds,
        "clients",
        minivllm=lambda: figures(own, os.environ),
        vllm=lambda: figures(vllm, variables),
        minivllm_again=lambda: figures(own, os.environ),
        vllm_again=lambda: figures(vllm, variables),
    )


def compare_servers(ours: Serving, vllm: Serving, samples: Sequence[SampleRequest], rounds: int) -> dict[str, Any]:
    """At saturation, then at a share of vLLM's capacity."""
    servers = {"minivllm": ours, "vllm": vllm}
    closed = in_turns(
        rounds,
        "closed load",
        **{name: lambda one=one: one.loaded(samples, max_concurrency=CONCURRENCY) for name, one in servers.items()},
    )
    rate = SHARE_OF_CAPACITY * closed["vllm"]["request_throughput"]
    opened = in_turns(
        rounds,
        "open load",
        **{name: lambda one=one: one.loaded(samples, request_rate=rate, seed=1) for name, one in servers.items()},
    )
    return {"closed": closed, "open": opened, "request_rate": rate}


def share_of_offline(ours: Serving, samples: Sequence[SampleRequest], rounds: int, folder: Path) -> dict[str, Any]:
    """Output tokens per second of the server, and of `LLM.generate` with the same requests."""
    tokenizer = load_tokenizer(EMBEDDED_MODEL)
    requests = [{"prompt": tokenizer.encode(str(one.prompt)).ids, "output": one.expected_output_len} for one in samples]
    shape = {"model": str(EMBEDDED_MODEL), "load_format": "auto", "max_model_len": MAX_MODEL_LEN}
    work = shape | {"max_num_batched_tokens": 2048, "device": "cpu", "requests": requests}
    tokens = sum(one.expected_output_len for one in samples)
    with Running(Peer("offline", "run_minivllm.py", "float32"), work, folder) as offline:
        found = in_turns(
            rounds,
            "share",
            offline=lambda: {"output_throughput": tokens / offline.ask("all")["seconds"]},
            closed=lambda: ours.loaded(samples, max_concurrency=CONCURRENCY),
            at_once=lambda: ours.loaded(samples, request_rate=math.inf),
        )
    whole = found["offline"]["output_throughput"]
    shares = {name: found[name]["output_throughput"] / whole for name in ("closed", "at_once")}
    return {"turns": found, "shares": shares}


def measured(arguments: argparse.Namespace) -> dict[str, Any]:
    """The record of a whole run."""
    rounds = arguments.rounds or (1 if arguments.quick else 5)
    number = 24 if arguments.quick else 256
    samples = random_requests(
        load_tokenizer(EMBEDDED_MODEL), number, input_len=INPUT_LEN, output_len=OUTPUT_LEN, range_ratio=RANGE_RATIO
    )
    figures: dict[str, Any] = {"rounds": rounds, "requests": number}
    with tempfile.TemporaryDirectory() as name, ExitStack() as processes:
        folder = Path(name)
        command = [sys.executable, "-P", "-m", "minivllm"]
        ours = processes.enter_context(Serving("minivllm", command, os.environ, folder))
        ours.loaded(samples[:16])
        figures["share"] = share_of_offline(ours, samples, rounds, folder)
        if not vllm_cli.ENVIRONMENT.exists():
            console.print(f"left out: vLLM, which has no environment at {vllm_cli.ENVIRONMENT} (make peers)")
            return record("serving", figures)
        figures["vllm"] = vllm_cli.vllm_version()
        figures["clients"] = compare_clients(ours, folder, number, rounds)
        vllm_command = [str(vllm_cli.ENVIRONMENT / "bin" / "vllm")]
        variables = vllm_cli.variables(folder)
        vllm = processes.enter_context(Serving("vllm", vllm_command, variables, folder))
        vllm.loaded(samples[:16])
        figures["servers"] = compare_servers(ours, vllm, samples, rounds)
    return record("serving", figures)


def show(figures: Mapping[str, Any]) -> None:
    """The tables."""
    shares = figures["share"]["shares"]
    rows = [(name, f"{one['output_throughput']:,.0f}") for name, one in figures["share"]["turns"].items()]
    table("Output tokens a second: LLM.generate and our server", ("requests", "tokens/s"), rows)
    console.print(f"the server keeps {shares['closed']:.0%} (64 clients), {shares['at_once']:.0%} (all at once)")
    if "servers" not in figures:
        return
    kinds = list(figures["clients"])
    rows = [(name, *(f"{figures['clients'][kind][name]:,.1f}" for kind in kinds)) for name in SHOWN_OF_CLIENTS]
    table("The same server, seen by two clients", ("figure", *kinds), rows)
    servers = figures["servers"]
    closed = {name: one["output_throughput"] for name, one in servers["closed"].items()}
    rows = [
        ("tokens/s at saturation", *(f"{rate:,.0f}" for rate in closed.values())),
        *((name, *(f"{servers['open'][which][name]:,.1f}" for which in closed)) for name in LATENCIES),
    ]
    table(f"Two servers; latencies at {servers['request_rate']:.1f} requests a second", ("figure", *closed), rows)
    console.print(f"at saturation ours makes {closed['minivllm'] / closed['vllm']:.2f} × vLLM's tokens")


def main(arguments: argparse.Namespace) -> None:
    """Measure, show, keep."""
    found = measured(arguments)
    show(found["figures"])
    print(json.dumps(found))
    if arguments.json:
        write_record(arguments.json, found)


def parser() -> argparse.ArgumentParser:
    """The command line."""
    flags = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    flags.add_argument("--rounds", type=positive_int, help="turns that each gets (default: 5, quick: 1)")
    flags.add_argument("--quick", action="store_true", help="a tenth of the requests, one round")
    flags.add_argument("--json", metavar="FILE", help="also write the figures to FILE")
    return flags


if __name__ == "__main__":
    run(main, parser())
