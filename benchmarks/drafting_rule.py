"""What `draft_only_if_faster` loses against the better of always and never drafting.

    uv run python benchmarks/drafting_rule.py --json benchmarks/results/drafting_rule.cpu.json
    uv run python benchmarks/drafting_rule.py --quick

Closed load: as many requests are served at once as `--batches` says, and each that ends is followed by another, so that
most steps of a large batch have a prompt in them. Three engines take turns, round after round, on the same prompts:
without drafts, with n-gram drafts, with the rule. What they serve before the first round is not counted: there the rule
sees both modes. The one of the first two with the higher median is the better; the rule is compared with that, round by
round, and the median counts. Nine cases take more than seven minutes; FILE has each as soon as it is known. The table
is followed by one line of JSON.
"""

import argparse
import json
import statistics
import time
from collections.abc import Iterable, Iterator
from itertools import cycle
from typing import Any

from speculation import KINDS, LEAST_PROMPTS, NAMES, OUTPUT_TOKENS, WAYS, engine_of, prompts_of

from minivllm.config import EMBEDDED_MODEL
from minivllm.core.messages import EngineCoreRequest
from minivllm.engine.core import EngineCore
from minivllm.lab.cli import Parser, positive_int, run
from minivllm.lab.progress import track
from minivllm.lab.recording import own_clock
from minivllm.lab.results import record, write_record
from minivllm.lab.tables import table
from minivllm.sampling_params import SamplingParams

ENGINES: dict[str, dict[str, Any] | None] = {
    "never": None,
    "always": WAYS["n-gram"],
    "rule": {**WAYS["n-gram"], "draft_only_if_faster": True},
}
TURN_STEPS, WARM_UP_STEPS = 300, 200


class ClosedLoad:
    """An engine that always serves `batch` requests; the next prompt follows when one ends."""

    def __init__(self, core: EngineCore, prompts: Iterable[list[int]], batch: int) -> None:
        self.core, self.batch, self.clock = core, batch, own_clock(core)
        self.prompts: Iterator[list[int]] = cycle(prompts)
        self.num_running = 0
        self.params = SamplingParams(temperature=0.0, max_tokens=OUTPUT_TOKENS, ignore_eos=True)

    def throughput(self, num_steps: int) -> float:
        """Output tokens a second over so many steps."""
        num_tokens, start = 0, self.clock()
        for _ in range(num_steps):
            while self.num_running < self.batch:
                request = EngineCoreRequest(str(next(NAMES)), next(self.prompts), self.params, (), time.monotonic())
                self.core.add_request(request)
                self.num_running += 1
            outputs = self.core.step().outputs
            num_tokens += sum(len(one.new_token_ids) for one in outputs)
            self.num_running -= sum(one.finish_reason is not None for one in outputs)
        return num_tokens / (self.clock() - start)


def compare(arguments: argparse.Namespace, batch: int, kind: str) -> dict[str, float]:
    """Medians over rounds: drafting always over never, and the rule over the better of the two."""
    prompts = prompts_of(kind, arguments.model, max(batch, LEAST_PROMPTS))
    steps = 20 if arguments.quick else TURN_STEPS
    loads = {name: ClosedLoad(engine_of(arguments, way, batch), prompts, batch) for name, way in ENGINES.items()}
    for load in loads.values():
        load.throughput(min(steps, WARM_UP_STEPS))
    rounds = [{name: load.throughput(steps) for name, load in loads.items()} for _ in range(arguments.rounds)]
    ratio = statistics.median(one["always"] / one["never"] for one in rounds)
    better = "always" if ratio > 1 else "never"
    shares = [one["rule"] / one[better] for one in rounds]
    return {"always": round(ratio, 3), "rule": round(statistics.median(shares), 3)}


def main(arguments: argparse.Namespace) -> None:
    """Compares at each batch and on each kind of text."""
    cases = [(batch, kind) for batch in arguments.batches for kind in KINDS]
    found: dict[str, dict[str, float]] = {}
    for batch, kind in track(cases, "comparing"):
        found[f"{batch} {kind}"] = compare(arguments, batch, kind)
        if arguments.json:
            write_record(arguments.json, record_of(arguments, found))
    rows = [(case, f"{one['always']:.2f}", f"{one['rule']:.2f}") for case, one in found.items()]
    table("Drafting only if it is faster", ["requests, text", "always ÷ never", "rule ÷ the better"], rows)
    print(json.dumps(record_of(arguments, found)))


def record_of(arguments: argparse.Namespace, found: dict[str, dict[str, float]]) -> dict[str, Any]:
    """The cases so far, with the machine and the versions."""
    return record(
        "drafting_rule", {"drafts": arguments.drafts or WAYS["n-gram"]["num_speculative_tokens"], "cases": found}
    )


def parser() -> argparse.ArgumentParser:
    """The command line."""
    flags = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    flags.add_argument("--model", default=str(EMBEDDED_MODEL), help="another model's folder or name")
    flags.add_argument("--drafts", type=positive_int, help="num_speculative_tokens (default: 5)")
    flags.add_argument("--batches", type=positive_int, nargs="+", default=[1, 8, 32], help="requests at once")
    flags.add_argument("--rounds", type=positive_int, default=7, help="turns of all engines (default: 7)")
    flags.add_argument("--quick", action="store_true", help="few steps, to see that it works")
    flags.add_argument("--json", metavar="FILE", help="also write the figures to FILE")
    return flags


if __name__ == "__main__":
    run(main, parser())
