"""What `draft_only_if_faster` loses against the better of always and never drafting.

    uv run python benchmarks/drafting_rule.py --json benchmarks/results/drafting_rule.cpu.json
    uv run python benchmarks/drafting_rule.py --quick

Closed load: as many requests are served at once as `--batches` says, and each that ends is followed by another, so that
most steps of a large batch have a prompt in them. Four engines take turns of a few tokens, in another order each round,
on the same prompts: without drafts, with n-gram drafts, with the rule, and once more without drafts, as a control. All
do the same work, and a machine that is slow for a second is slow for all four. What they serve before the first round
is not counted: there the rule sees both modes. A rate is of all rounds together. The faster of the first two is the
better; the rule is compared with that. The two engines without drafts differ by what this machine cannot tell apart.
Nine cases take some seven minutes; FILE has each as soon as it is known. The table is followed by one line of JSON.
"""

import argparse
import json
import random
import time
from collections.abc import Iterable, Iterator
from itertools import chain, cycle, repeat
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
    "control": None,
}
TURN_TOKENS, WARM_UP_TOKENS = 20, 200
LEAST_AT_ONCE = 4
"""One request has four times as many rounds as four at once: texts differ in what is accepted, and few say little."""


class ClosedLoad:
    """An engine that always serves `batch` requests; the next prompt follows when one ends.

    The first ones are of all lengths. Else requests without drafts would end together for ever, and their prompts fill
    one step, where drafts would scatter them.
    """

    def __init__(self, core: EngineCore, prompts: Iterable[list[int]], batch: int) -> None:
        self.core, self.batch, self.clock = core, batch, own_clock(core)
        self.prompts: Iterator[list[int]] = cycle(prompts)
        self.num_running = 0
        self.lengths = chain(
            (max(1, OUTPUT_TOKENS * place // batch) for place in range(1, batch)), repeat(OUTPUT_TOKENS)
        )
        self.num_tokens, self.num_counted, self.seconds, self.due = 0, 0, 0.0, 0

    @property
    def throughput(self) -> float:
        """Output tokens a second, of all that was counted."""
        return self.num_counted / self.seconds

    def serve(self, tokens_each: int) -> None:
        """Steps until so many more tokens are due for each request, and counts tokens and seconds.

        The last step may give more than are due. Then the next call has fewer to serve, so that engines that give
        several tokens a step do no more than the others.
        """
        self.due += tokens_each * self.batch
        num_tokens, start = self.num_tokens, self.clock()
        while self.num_tokens < self.due:
            while self.num_running < self.batch:
                params = SamplingParams(temperature=0.0, max_tokens=next(self.lengths), ignore_eos=True)
                self.core.add_request(
                    EngineCoreRequest(str(next(NAMES)), next(self.prompts), params, (), time.monotonic())
                )
                self.num_running += 1
            outputs = self.core.step().outputs
            self.num_tokens += sum(len(one.new_token_ids) for one in outputs)
            self.num_running -= sum(one.finish_reason is not None for one in outputs)
        self.num_counted += self.num_tokens - num_tokens
        self.seconds += self.clock() - start

    def forget(self) -> None:
        """Counts from here."""
        self.num_counted, self.seconds = 0, 0.0


def compare(arguments: argparse.Namespace, batch: int, kind: str) -> dict[str, float]:
    """Rates: drafting always over never, the rule over the better of the two, the control over never."""
    prompts = prompts_of(kind, arguments.model, max(batch, LEAST_PROMPTS))
    loads = {name: ClosedLoad(engine_of(arguments, way, batch), prompts, batch) for name, way in ENGINES.items()}
    for load in loads.values():
        load.serve(WARM_UP_TOKENS)
        load.forget()
    order, turns = list(loads.values()), random.Random(0)
    for _ in range(2 if arguments.quick else arguments.rounds * max(1, LEAST_AT_ONCE // batch)):
        turns.shuffle(order)
        for load in order:
            load.serve(TURN_TOKENS)
    never, always, rule, control = (loads[name].throughput for name in ENGINES)
    ratios = {"always": always / never, "rule": rule / max(always, never), "control": control / never}
    return {name: round(ratio, 3) for name, ratio in ratios.items()}


def main(arguments: argparse.Namespace) -> None:
    """Compares at each batch and on each kind of text."""
    cases = [(batch, kind) for batch in arguments.batches for kind in KINDS]
    found: dict[str, dict[str, float]] = {}
    for batch, kind in track(cases, "comparing"):
        found[f"{batch} {kind}"] = compare(arguments, batch, kind)
        if arguments.json:
            write_record(arguments.json, record_of(arguments, found))
    rows = [(case, *(f"{ratio:.2f}" for ratio in one.values())) for case, one in found.items()]
    columns = ["requests, text", "always ÷ never", "rule ÷ the better", "never ÷ never"]
    table("Drafting only if it is faster", columns, rows)
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
    flags.add_argument(
        "--rounds", type=positive_int, default=100, help="turns of all engines, of four requests or more (default: 100)"
    )
    flags.add_argument("--quick", action="store_true", help="two rounds, to see that it works")
    flags.add_argument("--json", metavar="FILE", help="also write the figures to FILE")
    return flags


if __name__ == "__main__":
    run(main, parser())
