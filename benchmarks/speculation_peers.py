"""Speculative decoding beside vLLM's: the same method on the same prompts, in turns, in one run.

    make .peers                                             # vLLM's own environment, once
    uv run python benchmarks/speculation_peers.py --json benchmarks/results/speculation_peers.cpu.json

The embedded model in float32, greedy, windows of held-out Python of 128 tokens and 64 tokens for each; k drafts. For
each method both engines start, warm up, and take turns as in `peers.py`: all requests at once, then one alone. vLLM's
tokens a second are held against the mean of ours before and after. The table
is followed by one line of JSON.
"""

import argparse
import json
import statistics
import tempfile
from contextlib import ExitStack
from itertools import pairwise
from pathlib import Path
from typing import Any

from peers import VLLM_PYTHON, Peer, Running, Turn, agreement
from speculation import OUTPUT_TOKENS, WAYS, prompts_of

from minivllm.config import EMBEDDED_MODEL
from minivllm.errors import MinivllmError
from minivllm_lab.cli import Parser, positive_int, run
from minivllm_lab.progress import track
from minivllm_lab.results import record, write_record
from minivllm_lab.tables import table

METHODS: dict[str, dict[str, Any] | None] = {"off": None, **WAYS}
SHAPE = {"model": str(EMBEDDED_MODEL), "load_format": "auto", "device": "cpu"}
LIMITS = {"max_model_len": 512, "max_num_batched_tokens": 2048}


def compare(work: dict[str, Any], vllm_python: Path, rounds: int, folder: Path) -> dict[str, Any]:
    """Tokens a second of both, for all requests and for one alone, and how many times vLLM's ours is."""
    peers = Peer("minivllm", "run_minivllm.py", "float32"), Peer("vLLM", "run_vllm.py", "float32", python=vllm_python)
    with ExitStack() as processes:
        ours, theirs = (processes.enter_context(Running(peer, work, folder)) for peer in peers)
        turns, others = [Turn.of(ours)], []
        for _ in range(rounds):
            others.append(Turn.of(theirs))
            turns.append(Turn.of(ours))
    tokens = {"all": sum(one["output"] for one in work["requests"]), "one": work["requests"][0]["output"]}
    found: dict[str, Any] = {"version": theirs.facts["version"]}
    for what, count in tokens.items():
        mine, other = [getattr(turn, what) for turn in turns], [getattr(turn, what) for turn in others]
        between = [statistics.mean(pair) for pair in pairwise(mine)]
        found[what] = {
            "ours": round(count / statistics.median(mine)),
            "vllm": round(count / statistics.median(other)),
            "times": round(statistics.median(b / a for a, b in zip(between, other, strict=True)), 3),
        }
    return found | {"same": agreement(turns[-1].outputs, others[-1].outputs)}


def main(arguments: argparse.Namespace) -> None:
    """Compare method by method."""
    vllm_python = Path(arguments.vllm_python).absolute()
    if not vllm_python.exists():
        raise MinivllmError(f"there is no vLLM at {vllm_python}: make .peers sets up its environment")
    prompts = prompts_of("code", SHAPE["model"], arguments.batch)
    work = SHAPE | LIMITS | {"requests": [{"prompt": prompt, "output": OUTPUT_TOKENS} for prompt in prompts]}
    found = {}
    with tempfile.TemporaryDirectory() as name:
        for method, way in track(METHODS.items(), "comparing"):
            config = way and {**way, "num_speculative_tokens": arguments.drafts}
            found[method] = compare(work | {"speculative_config": config}, vllm_python, arguments.rounds, Path(name))
    columns = ["method", f"{arguments.batch} at once, ours", "vLLM's", "×", "alone, ours", "vLLM's", "×", "same tokens"]
    rows = []
    for method, one in found.items():
        cells = [
            f"{one[what][side]:,}" if side != "times" else f"{one[what][side]:.2f}"
            for what in ("all", "one")
            for side in ("ours", "vllm", "times")
        ]
        rows.append((method, *cells, f"{one['same']:.0%}"))
    table("Output tokens a second with drafts, beside vLLM's CPU build", columns, rows)
    result = record("speculation_peers", {"drafts": arguments.drafts, "batch": arguments.batch, "methods": found})
    if arguments.json:
        write_record(arguments.json, result)
    print(json.dumps(result))


def parser() -> argparse.ArgumentParser:
    """The command line."""
    flags = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    flags.add_argument("--drafts", type=positive_int, default=3, help="num_speculative_tokens (default: 3)")
    flags.add_argument("--batch", type=positive_int, default=16, help="requests at once (default: 16)")
    flags.add_argument("--rounds", type=positive_int, default=5, help="turns of both engines (default: 5)")
    flags.add_argument("--vllm-python", metavar="FILE", default=str(VLLM_PYTHON), help="the interpreter that has vLLM")
    flags.add_argument("--json", metavar="FILE", help="also write the figures to FILE")
    return flags


if __name__ == "__main__":
    run(main, parser())
