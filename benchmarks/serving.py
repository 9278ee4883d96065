"""Compare our server with vLLM's CPU server, and with the throughput of `LLM.generate`.

    make peers                                    # makes vLLM's own environment, among other things
    uv run python benchmarks/serving.py --json benchmarks/results/serving.cpu.json
    uv run python benchmarks/serving.py --quick
    uv run python benchmarks/serving.py --clients 32 64   # only closed loads of both servers

The embedded model runs in fp32, greedily, on random prompts; all measurements take turns, and
medians count.

- servers: the same requests from the same client; first a closed load of 64 clients (capacity),
  then an open load at 70 % of vLLM's capacity. Both servers run all the time; the one whose turn it
  is not is idle.
- share: output tokens per second of the closed load, as a share of `LLM.generate`'s with all these
  requests at once.

Without vLLM's environment only the share is measured. The table is followed by one line of JSON.
"""

import argparse
import math
import os
import random
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import vllm_cli
from peer_process import Peer, Running

from minivllm.config import EMBEDDED_MODEL
from minivllm.errors import MinivllmError
from minivllm.models.tokenizer import load_tokenizer
from minivllm_lab.cli import benchmark_parser, positive_int, run
from minivllm_lab.engines.http_load import Answer, Ask, load
from minivllm_lab.progress import track
from minivllm_lab.results import record, report
from minivllm_lab.tables import console, table
from minivllm_simulate.virtual_clock import percentile
from minivllm_simulate.workloads import poisson_arrivals

NAME = "tiny-python"
MAX_MODEL_LEN = 512
FLAGS = ("--max-model-len", str(MAX_MODEL_LEN), "--dtype", "float32", "--served-model-name", NAME)
FURTHER = ("--host", "127.0.0.1", "--no-enable-prefix-caching", "--max-num-seqs", "256")
INPUT_LEN, OUTPUT_LEN, RANGE_RATIO = 96, 96, 0.5
CONCURRENCY = 64
SHARE_OF_CAPACITY = 0.7
SECONDS_TO_START = 300
LATENCIES = ("median_ttft_ms", "p99_ttft_ms", "median_itl_ms", "p99_itl_ms")
ORDINARY_TOKENS = range(300, 4000)
"""Whole words and parts of them, of the embedded model."""


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
        """Wait until the server is ready."""
        end = time.monotonic() + SECONDS_TO_START
        while time.monotonic() < end and self.process.poll() is None:
            try:
                with urllib.request.urlopen(f"{self.url}/health", timeout=5):
                    return self
            except OSError:
                time.sleep(0.5)
        self.__exit__()
        raise MinivllmError(f"{self.title} did not start: {' | '.join(self.log.read_text().splitlines()[-5:])}")

    def __exit__(self, *reason: object) -> None:
        self.process.terminate()
        try:
            self.process.wait(30)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()

    def loaded(self, asks: Sequence[Ask], clients: int | None = None) -> dict[str, float]:
        """Return the figures of a closed load with this many clients or, with None, of an open load
        with the requests' own arrival times.
        """
        return figures_of(load(self.port, asks, clients, "/v1/completions"), asks)


Servers = Mapping[str, Serving]


def random_asks(number: int, input_len: int, output_len: int, range_ratio: float, seed: int = 0) -> list[Ask]:
    """Return streamed requests that arrive all at once, with texts of random tokens as prompts.

    Prompt and output lengths are uniform within `range_ratio` of `input_len` and `output_len`. A
    text made of random tokens is not always tokenized into the same ones, so it is tokenized again
    and cut to its length.
    """
    tokenizer, draw = load_tokenizer(EMBEDDED_MODEL), random.Random(seed)

    def length(mean: int) -> int:
        return draw.randint(math.floor(mean * (1 - range_ratio)), math.ceil(mean * (1 + range_ratio)))

    fixed = {"model": NAME, "temperature": 0, "ignore_eos": True, "stream": True}
    asks = []
    for _ in range(number):
        text = tokenizer.decode(draw.choices(ORDINARY_TOKENS, k=math.ceil(input_len * (1 + range_ratio))))
        prompt = tokenizer.decode(tokenizer.encode(text).ids[: length(input_len)])
        asks.append(Ask({**fixed, "prompt": prompt, "max_tokens": length(output_len)}))
    return asks


def at_rate(asks: Sequence[Ask], rate: float) -> list[Ask]:
    """Return the same requests with Poisson arrivals at this rate per second."""
    times = poisson_arrivals(rate, len(asks), seed=1)
    return [replace(ask, at=at) for ask, at in zip(asks, times, strict=True)]


def prompt_tokens(asks: Sequence[Ask]) -> list[list[int]]:
    """Return the prompts' token ids as the server sees them."""
    return [one.ids for one in load_tokenizer(EMBEDDED_MODEL).encode_batch([ask.body["prompt"] for ask in asks])]


def figures_of(answers: Sequence[Answer], asks: Sequence[Ask]) -> dict[str, float]:
    """Return the throughput from the first request to the last event, and the latencies to the
    first event, between events, and to the last.
    """
    duration = max(one.events[-1] for one in answers) - min(one.due for one in answers)
    generated = sum(ask.body["max_tokens"] for ask in asks)
    found = {
        "duration": duration,
        "total_input_tokens": sum(map(len, prompt_tokens(asks))),
        "total_output_tokens": generated,
        "request_throughput": len(asks) / duration,
        "output_throughput": generated / duration,
    }
    for name, seconds in (
        ("ttft", [one.ttft for one in answers]),
        ("itl", [gap for one in answers for gap in one.itls]),
        ("e2el", [one.latency for one in answers]),
    ):
        found[f"median_{name}_ms"] = 1e3 * statistics.median(seconds)
        found[f"p99_{name}_ms"] = 1e3 * percentile(seconds, 0.99)
    return found


def medians(turns: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return the median of each figure."""
    return {name: statistics.median(turn[name] for turn in turns) for name in turns[0]}


def in_turns(rounds: int, what: str, **kinds: Callable[[], dict[str, float]]) -> dict[str, dict[str, Any]]:
    """Measure each kind once per round; return the medians, and the lowest and highest output
    throughput.
    """
    turns: dict[str, list[dict[str, float]]] = {name: [] for name in kinds}
    for name in track([name for _ in range(rounds) for name in kinds], what):
        turns[name].append(kinds[name]())
    spread = {name: sorted(turn["output_throughput"] for turn in found) for name, found in turns.items()}
    return {name: medians(found) | {"spread": [spread[name][0], spread[name][-1]]} for name, found in turns.items()}


def closed_load(servers: Servers, asks: Sequence[Ask], rounds: int, clients: int) -> dict[str, dict[str, Any]]:
    """Compare the servers where each client sends its next request when it has its answer."""
    turns = {name: lambda one=one: one.loaded(asks, clients) for name, one in servers.items()}
    return in_turns(rounds, f"{clients} clients", **turns)


def compare_servers(servers: Servers, asks: Sequence[Ask], rounds: int) -> dict[str, Any]:
    """Compare both servers at saturation, then at a share of vLLM's capacity."""
    closed = closed_load(servers, asks, rounds, CONCURRENCY)
    rate = SHARE_OF_CAPACITY * closed["vllm"]["request_throughput"]
    timed = at_rate(asks, rate)
    opened = in_turns(rounds, "open load", **{name: lambda one=one: one.loaded(timed) for name, one in servers.items()})
    return {"closed": closed, "open": opened, "request_rate": rate}


def share_of_offline(ours: Serving, asks: Sequence[Ask], rounds: int, folder: Path) -> dict[str, Any]:
    """Compare the server's output tokens per second with those of `LLM.generate` on the same
    requests.
    """
    outputs = [ask.body["max_tokens"] for ask in asks]
    prompts = prompt_tokens(asks)
    requests = [{"prompt": prompt, "output": output} for prompt, output in zip(prompts, outputs, strict=True)]
    shape = {"model": str(EMBEDDED_MODEL), "load_format": "auto", "max_model_len": MAX_MODEL_LEN}
    work = shape | {"max_num_batched_tokens": 2048, "device": "cpu", "requests": requests}
    with Running(Peer("offline", "run_minivllm.py", "float32"), work, folder) as offline:
        found = in_turns(
            rounds,
            "share",
            offline=lambda: {"output_throughput": sum(outputs) / offline.ask("all")["seconds"]},
            closed=lambda: ours.loaded(asks, CONCURRENCY),
            at_once=lambda: ours.loaded(asks),
        )
    whole = found["offline"]["output_throughput"]
    shares = {name: found[name]["output_throughput"] / whole for name in ("closed", "at_once")}
    return {"turns": found, "shares": shares}


def measured(arguments: argparse.Namespace) -> dict[str, Any]:
    """Run everything and return the record."""
    rounds = arguments.rounds or (1 if arguments.quick else 5)
    number = 24 if arguments.quick else 256
    asks = random_asks(number, INPUT_LEN, OUTPUT_LEN, RANGE_RATIO)
    figures: dict[str, Any] = {"rounds": rounds, "requests": number}
    with tempfile.TemporaryDirectory() as name, ExitStack() as processes:
        folder = Path(name)
        command = [sys.executable, "-P", "-m", "minivllm"]
        ours = processes.enter_context(Serving("minivllm", command, os.environ, folder))
        ours.loaded(asks[:16])
        if not arguments.clients:
            figures["share"] = share_of_offline(ours, asks, rounds, folder)
        if not vllm_cli.ENVIRONMENT.exists():
            console.print(f"skipped: vLLM, which has no environment at {vllm_cli.ENVIRONMENT} (run make peers)")
            return record("serving", figures)
        figures["vllm"] = vllm_cli.vllm_version()
        vllm_command = [str(vllm_cli.ENVIRONMENT / "bin" / "vllm")]
        variables = vllm_cli.variables(folder)
        vllm = processes.enter_context(Serving("vllm", vllm_command, variables, folder))
        vllm.loaded(asks[:16])
        servers = {"minivllm": ours, "vllm": vllm}
        if arguments.clients:
            loads = {str(number): closed_load(servers, asks, rounds, number) for number in arguments.clients}
            figures["clients"] = loads
        else:
            figures["servers"] = compare_servers(servers, asks, rounds)
    return record("serving", figures)


def show(figures: Mapping[str, Any]) -> None:
    """Print the tables."""
    for clients, found in figures.get("clients", {}).items():
        rate = {name: one["output_throughput"] for name, one in found.items()}
        ours, vllm = rate["minivllm"], rate["vllm"]
        console.print(f"{clients} clients: {ours:,.0f} tokens/s, and vLLM {vllm:,.0f}: {ours / vllm:.2f} ×")
    if "share" not in figures:
        return
    shares = figures["share"]["shares"]
    rows = [(name, f"{one['output_throughput']:,.0f}") for name, one in figures["share"]["turns"].items()]
    table("Output tokens per second: LLM.generate and our server", ("requests", "tokens/s"), rows)
    console.print(f"our server's share: {shares['closed']:.0%} with 64 clients, {shares['at_once']:.0%} all at once")
    if "servers" not in figures:
        return
    servers = figures["servers"]
    closed = {name: one["output_throughput"] for name, one in servers["closed"].items()}
    rows = [
        ("tokens/s at saturation", *(f"{rate:,.0f}" for rate in closed.values())),
        *((name, *(f"{servers['open'][which][name]:,.1f}" for which in closed)) for name in LATENCIES),
    ]
    table(f"Two servers; latencies at {servers['request_rate']:.1f} requests per second", ("figure", *closed), rows)
    console.print(f"at saturation, ours generates {closed['minivllm'] / closed['vllm']:.2f} × vLLM's tokens/s")


def main(arguments: argparse.Namespace) -> None:
    found = measured(arguments)
    show(found["figures"])
    report(found, arguments.json)


def parser() -> argparse.ArgumentParser:
    flags = benchmark_parser(__doc__)
    flags.add_argument("--rounds", type=positive_int, help="rounds for each server (default: 5, quick: 1)")
    flags.add_argument("--clients", type=positive_int, nargs="+", metavar="N", help="only closed loads, of N clients")
    flags.add_argument("--quick", action="store_true", help="a tenth of the requests, one round")
    return flags


if __name__ == "__main__":
    run(main, parser())
