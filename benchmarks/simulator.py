"""How well the simulator predicts the engine: fitted on some runs, tested on others.

    uv run python benchmarks/simulator.py

The embedded model on this machine, requests that all wait at once. A straight line through the steps of the fitted runs
is the cost of a step; the scheduler under the virtual clock then predicts runs that the line has not seen, with other
lengths, batch sizes and budgets. The table is followed by one line of JSON.
"""

import argparse
import json
import random
from dataclasses import dataclass

import torch

from minivllm.config import EMBEDDED_MODEL, CacheConfig
from minivllm_lab.cli import Parser, run
from minivllm_lab.progress import track
from minivllm_lab.recording import Recording, bare_engine, foretell, record_run
from minivllm_lab.results import record, write_json
from minivllm_lab.tables import table
from minivllm_simulate.cost_model import FittedCost, model_error

MAX_LEN, CACHE = 512, CacheConfig(num_gpu_blocks=1025, enable_prefix_caching=False)


@dataclass(frozen=True)
class Case:
    """A run: how many requests, up to how long, and the two limits of a step."""

    requests: int
    longest_prompt: int
    longest_output: int
    max_num_seqs: int
    max_num_batched_tokens: int

    def lengths(self, seed: int) -> list[tuple[int, int]]:
        """(prompt, output) of each request, uniform from 1."""
        draw = random.Random(seed)
        return [
            (draw.randint(1, self.longest_prompt), draw.randint(1, self.longest_output)) for _ in range(self.requests)
        ]

    def limits(self) -> dict[str, int]:
        """The engine's settings."""
        return {"max_num_seqs": self.max_num_seqs, "max_num_batched_tokens": self.max_num_batched_tokens}


FITTED = {
    "alone": Case(4, 64, 48, 1, 2048),
    "a few": Case(16, 128, 48, 4, 2048),
    "many": Case(48, 128, 48, 32, 2048),
    "long prompts": Case(12, 400, 24, 8, 512),
}
FORETOLD = {
    "a dozen at once": Case(36, 96, 64, 12, 2048),
    "small budget": Case(32, 128, 48, 16, 64),
    "short answers": Case(48, 256, 8, 24, 1024),
    "long answers": Case(16, 16, 128, 16, 2048),
}


def measured(case: Case, seed: int) -> Recording:
    """The engine's run of a case."""
    core = bare_engine(EMBEDDED_MODEL, torch.device("cpu"), CACHE, max_model_len=MAX_LEN, **case.limits())
    return record_run(core, case.lengths(seed))


def main(arguments: argparse.Namespace) -> None:
    """Fit, predict, compare."""
    cases = FITTED | FORETOLD
    runs = {name: measured(case, arguments.seed) for name, case in track(cases.items(), "running")}
    cost = FittedCost.fit([step for name in FITTED for step in runs[name].steps])
    rows, figures = [], {}
    for name, case in cases.items():
        off = foretell(case.lengths(arguments.seed), runs[name], cost)
        step, count = model_error(cost, runs[name].steps).median_step, len(runs[name].steps)
        figures[name] = {"step": step, "run": off, "steps": count, "foretold": name in FORETOLD}
        kind = "fitted" if name in FITTED else "foretold"
        rows.append((name, kind, count, f"{runs[name].throughput:,.0f}", f"±{step:.0%}", f"{off:+.0%}"))
    table("The simulator against the engine", ("run", "", "steps", "tokens/s", "a step (median)", "the run"), rows)
    outcome = {"cost": vars(cost), "runs": figures}
    print(json.dumps(record("simulator", outcome)))
    if arguments.json:
        write_json(arguments.json, "simulator", outcome)


def parser() -> argparse.ArgumentParser:
    """The command line."""
    flags = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    flags.add_argument("--json", metavar="FILE", help="also write the figures to FILE")
    flags.add_argument("--seed", type=int, default=0, help="seed of the lengths (default: 0)")
    return flags


if __name__ == "__main__":
    run(main, parser())
