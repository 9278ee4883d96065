"""What the process seam costs: `LLM` with the core in its own process beside `LLM` with the core in this one.

    uv run python benchmarks/core_process.py --json benchmarks/results/core_process.cpu.json
    uv run python benchmarks/core_process.py --quick

The embedded model, fp32, greedy. Both engines stand ready and take turns on the same prompts, another one first in each
round; the ratio of a round's two rates is what counts, and of those the median. Both must give the same tokens. "A
second of the same" is a second engine in this process: how far its ratio is from 1 says how far to trust the others.
The table is followed by one line of JSON.
"""

import argparse
import json
import statistics
import time
from typing import Any

from peers import requests_of

from minivllm import LLM, SamplingParams
from minivllm.config import EMBEDDED_MODEL, ModelConfig
from minivllm.errors import MinivllmError
from minivllm_lab.cli import Parser, positive_int, run
from minivllm_lab.progress import track
from minivllm_lab.results import record, write_record
from minivllm_lab.tables import table

BATCHES, QUICK_BATCHES = (1, 8, 64), (1, 8)
BASE = "in this process"
ENGINES: dict[str, dict[str, Any]] = {
    BASE: {},
    "a second of the same": {},
    "in its own process": {"multiprocess": True},
}
LEAST_TOKENS = 1024
"""Output tokens of a turn, so that it lasts long enough to be timed; at least one request for each place."""
ANSWER = 64


def turn_of(llm: LLM, prompts: list[list[int]]) -> tuple[float, list[list[int]]]:
    """Output tokens a second, and the tokens."""
    params = SamplingParams(temperature=0.0, max_tokens=ANSWER, ignore_eos=True)
    start = time.perf_counter()
    outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)
    seconds = time.perf_counter() - start
    tokens = [list(output.outputs[0].token_ids) for output in outputs]
    return sum(map(len, tokens)) / seconds, tokens


def compare(batch: int, rounds: int, seed: int) -> dict[str, Any]:
    """Medians over rounds of each engine's rate and of its ratio to the base's, with so many requests at once.

    Raises:
        MinivllmError: the engines' tokens differ.
    """
    vocab_size = ModelConfig.from_pretrained(EMBEDDED_MODEL).vocab_size
    requests = requests_of(max(batch, LEAST_TOKENS // ANSWER), 16, 64, vocab_size, seed)
    prompts = [request["prompt"] for request in requests]
    settings = {"device": "cpu", "dtype": "float32", "max_model_len": 256, "max_num_seqs": batch}
    llms = {name: LLM(EMBEDDED_MODEL, enable_prefix_caching=False, **settings, **own) for name, own in ENGINES.items()}
    expected = {name: turn_of(llm, prompts)[1] for name, llm in llms.items()}
    if any(tokens != expected[BASE] for tokens in expected.values()):
        raise MinivllmError(f"the engines' tokens differ with {batch} requests at once")
    found: list[dict[str, float]] = []
    for index in track(range(rounds), f"{batch} at once"):
        order = [*llms][index % len(llms) :] + [*llms][: index % len(llms)]
        found.append({name: turn_of(llms[name], prompts)[0] for name in order})
    for llm in llms.values():
        llm.llm_engine.engine_core.shutdown()
    return {
        name: {
            "tokens_per_second": round(statistics.median(one[name] for one in found)),
            "ratio": round(statistics.median(one[name] / one[BASE] for one in found), 3),
        }
        for name in ENGINES
    }


def main(arguments: argparse.Namespace) -> None:
    """Compares with each number of requests at once."""
    batches, rounds = (QUICK_BATCHES, 2) if arguments.quick else (BATCHES, arguments.rounds)
    found = {str(batch): compare(batch, rounds, arguments.seed) for batch in batches}
    rows = [
        (batch, name, f"{one['tokens_per_second']:,}", f"{one['ratio']:.2f}")
        for batch, engines in found.items()
        for name, one in engines.items()
    ]
    table("Where the core runs", ["requests at once", "the core", "tokens a second", "of the first"], rows)
    result = record("core_process", {"rounds": rounds, "batches": found})
    if arguments.json:
        write_record(arguments.json, result)
    print(json.dumps(result))


def parser() -> argparse.ArgumentParser:
    """The command line."""
    flags = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    flags.add_argument("--rounds", type=positive_int, default=7, help="turns of each engine (default: 7)")
    flags.add_argument("--seed", type=int, default=0, help="of the prompts (default: 0)")
    flags.add_argument("--quick", action="store_true", help="two rounds of less, to see that it works")
    flags.add_argument("--json", metavar="FILE", help="also write the figures to FILE")
    return flags


if __name__ == "__main__":
    run(main, parser())
