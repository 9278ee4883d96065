"""Where the time of an engine's step goes: schedule, prepare, forward (of it attention), head, sample, update, text.

    uv run python benchmarks/steps.py
    uv run python benchmarks/steps.py --dtype bfloat16 --requests 16

The work of `benchmarks/peers.py`: prompts and outputs of 16 to 256 tokens, greedy, all requests at once. Every part is
timed by the wall clock in every step; what is shown are the sums over the fastest of several runs, and their shares.
The table is followed by one line of JSON.
"""

import argparse
import json
import time
from collections import defaultdict
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any
from unittest import mock

from peers import requests_of

from minivllm.config import EMBEDDED_MODEL
from minivllm.engine.engine_args import DTYPES, EngineArgs
from minivllm.engine.llm_engine import LLMEngine
from minivllm.lab.cli import Parser, positive_int, run
from minivllm.lab.progress import track
from minivllm.lab.results import record, write_json
from minivllm.lab.tables import table
from minivllm.sampling_params import SamplingParams
from minivllm.worker.attention import PagedAttention

PARTS = ("schedule", "prepare", "attention", "rest of forward", "head", "sample", "update", "text", "between")


class Stopwatch:
    """Seconds by part. What runs inside another part is taken out of the outer one."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self._inside: list[float] = []

    def watch(self, part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function, timed."""

        def timed(*arguments: Any, **named: Any) -> Any:
            self._inside.append(0.0)
            start = time.perf_counter()
            result = function(*arguments, **named)
            passed = time.perf_counter() - start
            self.seconds[part] += passed - self._inside.pop()
            if self._inside:
                self._inside[-1] += passed
            return result

        return timed


def watched_methods(engine: LLMEngine) -> list[tuple[str, object, str]]:
    """(part, object, method): what a step is made of, outer ones included."""
    scheduler, runner = engine.core.scheduler, engine.core.runner
    return [
        ("schedule", scheduler, "schedule"),
        ("prepare", runner, "_update_states"),
        ("prepare", runner, "prepare_inputs"),
        ("attention", PagedAttention, "__call__"),
        ("rest of forward", runner, "forward"),
        ("head", runner.model, "compute_logits"),
        ("sample", runner, "sample_tokens"),
        ("update", scheduler, "update_from_output"),
        ("text", engine.output_processor, "process_outputs"),
    ]


def run_once(engine: LLMEngine, requests: list[dict]) -> tuple[dict[str, float], int]:
    """(seconds by part, steps) of serving these requests."""
    watch, steps = Stopwatch(), 0
    for index, one in enumerate(requests):
        params = SamplingParams(temperature=0.0, max_tokens=one["output"], ignore_eos=True)
        engine.add_request(str(index), {"prompt_token_ids": one["prompt"]}, params)
    with ExitStack() as patches:
        for part, owner, name in watched_methods(engine):
            patches.enter_context(mock.patch.object(owner, name, watch.watch(part, getattr(owner, name))))
        step = watch.watch("between", engine.step)
        while engine.has_unfinished_requests():
            step()
            steps += 1
    return dict(watch.seconds), steps


def main(arguments: argparse.Namespace) -> None:
    """Run a few times, keep the fastest, show its parts."""
    args = EngineArgs(
        model=EMBEDDED_MODEL,
        dtype=arguments.dtype,
        device="cpu",
        max_model_len=1024,
        max_num_seqs=256,
        max_num_batched_tokens=2048,
        enable_prefix_caching=False,
        show_ledger=False,
    )
    engine = LLMEngine(args)
    requests = requests_of(arguments.requests, 16, 256, engine.model_config.vocab_size, arguments.seed)
    run_once(engine, requests[:8])
    runs = [run_once(engine, requests) for _ in track(range(arguments.rounds), "rounds")]
    parts, steps = min(runs, key=lambda one: sum(one[0].values()))
    total, tokens = sum(parts.values()), sum(one["output"] for one in requests)
    rows = [(part, f"{parts[part] / steps * 1e3:.3f}", f"{parts[part] / total:.0%}") for part in PARTS]
    rows.append(("all", f"{total / steps * 1e3:.3f}", f"{tokens / total:,.0f} tokens/s"))
    table(f"A step of {len(requests)} requests, {arguments.dtype}, mean of {steps}", ("part", "ms", "share"), rows)
    figures = {
        "milliseconds": {part: parts[part] / steps * 1e3 for part in PARTS},
        "steps": steps,
        "tokens_per_second": tokens / total,
        "dtype": arguments.dtype,
        "requests": len(requests),
    }
    print(json.dumps(record("steps", figures)))
    if arguments.json:
        write_json(arguments.json, "steps", figures)


def parser() -> argparse.ArgumentParser:
    """The command line."""
    flags = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    flags.add_argument("--dtype", choices=DTYPES[1:], default="float32", help="of weights, cache and computation")
    flags.add_argument("--requests", type=positive_int, default=128, help="how many (default: 128)")
    flags.add_argument("--rounds", type=positive_int, default=5, help="runs, of which the fastest counts (default: 5)")
    flags.add_argument("--json", metavar="FILE", help="also write the figures to FILE")
    flags.add_argument("--seed", type=int, default=0, help="seed of lengths and prompts (default: 0)")
    return flags


if __name__ == "__main__":
    run(main, parser())
