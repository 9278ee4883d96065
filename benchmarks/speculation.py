"""Compare all methods of speculative decoding that the engine has, by batch size and kind of text,
in one run.

    uv run python benchmarks/speculation.py --json benchmarks/results/speculation.cpu.json --page
    uv run python benchmarks/speculation.py --quick                  # seconds, to see that it works
    uv run python benchmarks/speculation.py --drafts 5 --batches 1 4

Acceptance length is the number of tokens that a verification yields, 1 + accepted / drafts.
Speed-up is the output tokens per second over those of the same engine without drafts, as the median
of rounds in which all methods take turns. Time counts while the batch is whole, from when each
request has its first token until the first one ends. Decoding is greedy, in float32, so that all
methods write the same text; equal texts are counted too. Below 1 ×, a method costs more than it
gains. Memory is what the engine's ledger has beyond the target: the weights of the drafter, and its
cache for each token. Methods that look tokens up draft five, since that costs nearly nothing; those
that run a model draft three. The texts are held-out Python, its docstrings, and random tokens. The
table is followed by one line of JSON; `--page` also writes it into the notes of lesson 07.
"""

import argparse
import ast
import json
import random
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import reduce
from itertools import chain, count, product
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer

from minivllm.config import EMBEDDED_DRAFT, EMBEDDED_EAGLE3, EMBEDDED_MODEL, CacheConfig
from minivllm.config.speculative import MODEL_METHODS
from minivllm.engine.arg_utils import EngineArgs
from minivllm.engine.core import EngineCore
from minivllm.errors import MinivllmError
from minivllm.memory import MemoryLedger
from minivllm.models.tokenizer import load_tokenizer
from minivllm_lab.cli import benchmark_parser, positive_int, run
from minivllm_lab.corpus import held_out_texts
from minivllm_lab.engines.recording import add_greedy, bare_engine, own_clock
from minivllm_lab.marks import put_between_marks
from minivllm_lab.progress import track
from minivllm_lab.results import record, report
from minivllm_lab.tables import markdown_table, table

WAYS: dict[str, dict[str, Any]] = {
    "n-gram": {"method": "ngram", "prompt_lookup_min": 1, "prompt_lookup_max": 3, "num_speculative_tokens": 5},
    "draft model": {"method": "draft_model", "model": str(EMBEDDED_DRAFT), "num_speculative_tokens": 3},
    "EAGLE-3": {"method": "eagle3", "model": str(EMBEDDED_EAGLE3), "num_speculative_tokens": 3},
}
"""A line for each method; one whose weights are not there is left out."""
PROMPT_TOKENS, OUTPUT_TOKENS, MAX_MODEL_LEN, BLOCK_SIZE = 128, 64, 256, 16
KINDS = ("code", "prose", "random")
NAMES = count()
"""Names of requests, none used twice."""
OFF = "off"
LAST_COLUMNS = "Memory by the engine's ledger, in float32; training on one core."
LEAST_PROMPTS = 8
"""However small the batch: one text alone says little."""
NOTES = Path(__file__).resolve().parents[1] / "lessons" / "notes" / "07_speculative_decoding.md"


@dataclass(frozen=True)
class Served:
    """One run: each request's tokens, timed tokens and their seconds, verifications and the drafts
    they accepted.
    """

    outputs: list[list[int]]
    num_tokens: int
    seconds: float
    num_drafts: int
    num_accepted: int

    @property
    def throughput(self) -> float:
        """Output tokens per second."""
        return self.num_tokens / self.seconds

    def and_then(self, other: "Served") -> "Served":
        """Return this run and another one, combined."""
        pairs = zip(vars(self).values(), vars(other).values(), strict=True)
        return Served(*(one + another for one, another in pairs))


def available() -> dict[str, dict[str, Any]]:
    """Return the drafting methods that this engine can run."""
    here = {name: way for name, way in WAYS.items() if way["method"] in ("ngram", *MODEL_METHODS)}
    return {name: way for name, way in here.items() if "model" not in way or Path(way["model"]).is_dir()}


def docstrings(source: str) -> str:
    """Return all docstrings of a Python file, in order."""
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    found = [ast.get_docstring(node) for node in ast.walk(ast.parse(source)) if isinstance(node, kinds)]
    return "\n\n".join(filter(None, found))


def windows(tokenizer: Tokenizer, texts: Iterable[str], count: int) -> list[list[int]]:
    """Cut `count` prompts of PROMPT_TOKENS tokens out of the texts; some overlap, and none is at
    the beginning of a text.

    Raises:
        MinivllmError: the texts do not have that many.
    """
    found = []
    for text in texts:
        token_ids = tokenizer.encode(text).ids
        starts = range(PROMPT_TOKENS, len(token_ids) - PROMPT_TOKENS, PROMPT_TOKENS // 4)
        found += [token_ids[start : start + PROMPT_TOKENS] for start in starts]
    if len(found) < count:
        raise MinivllmError(f"there are only {len(found)} held-out prompts, not {count}: choose smaller --batches")
    return random.Random(0).sample(found, count)


def prompts_of(kind: str, model: str, count: int) -> list[list[int]]:
    """Return `count` prompts of one kind."""
    tokenizer = load_tokenizer(model)
    if kind == "random":
        draw = random.Random(0)
        return [[draw.randrange(tokenizer.get_vocab_size()) for _ in range(PROMPT_TOKENS)] for _ in range(count)]
    texts = held_out_texts()
    return windows(tokenizer, texts if kind == "code" else ["\n\n".join(map(docstrings, texts))], count)


def engine_of(arguments: argparse.Namespace, way: dict[str, Any] | None, batch: int) -> EngineCore:
    """Return an engine that serves `batch` requests at once."""
    cache = CacheConfig(
        num_gpu_blocks=2 + batch * (MAX_MODEL_LEN // BLOCK_SIZE + 1),
        block_size=BLOCK_SIZE,
        enable_prefix_caching=False,
    )
    config = way and (way | {"num_speculative_tokens": arguments.drafts} if arguments.drafts else way)
    settings = {"max_model_len": MAX_MODEL_LEN, "max_num_seqs": batch, "dtype": "float32"}
    return bare_engine(arguments.model, torch.device("cpu"), cache, speculative_config=config, **settings)


def costs(model: str, ways: dict[str, dict[str, Any]]) -> dict[str, dict[str, float]]:
    """Map each method to its bytes in the engine's ledger, its cache's bytes per token, and its
    minutes of training; OFF is the target.

    The minutes are read from `training.json` beside the weights, or are 0 if there is none. Memory
    on the host is not in the ledger.
    """
    found = {}
    for name, way in {OFF: None, **ways}.items():
        ledger, weights = ledger_of(model, way), model if way is None else way.get("model")
        row = "draft model" if way else "weights and rotary table"
        trained = Path(weights or "") / "training.json"
        found[name] = {
            "bytes": sum(one.bytes for one in ledger.rows if one.name == row),
            "bytes_per_token": ledger.bytes_per_token - (found[OFF]["bytes_per_token"] if way else 0),
            "minutes": round(json.loads(trained.read_text())["minutes"], 1) if weights and trained.is_file() else 0,
        }
    return found


def ledger_of(model: str, way: dict[str, Any] | None) -> MemoryLedger:
    """Return the memory ledger of an engine for one request, in float32 as in the comparison."""
    settings = {"max_model_len": MAX_MODEL_LEN, "max_num_seqs": 1, "dtype": "float32", "skip_tokenizer_init": True}
    core = EngineCore(EngineArgs(model=model, device="cpu", speculative_config=way, **settings))
    try:
        assert core.ledger is not None, "no number of blocks was given"
        return core.ledger
    finally:
        core.shutdown()


def serve(core: EngineCore, prompts: Sequence[list[int]], max_tokens: int) -> Served:
    """Serve these prompts all at once; time counts from when each has its first token until the
    first request ends.
    """
    outputs: dict[str, list[int]] = {str(next(NAMES)): [] for _ in prompts}
    before, clock, seconds, counted = core.scheduler.spec_decoding_stats.copy(), own_clock(core), 0.0, 0
    for name, prompt in zip(outputs, prompts, strict=True):
        add_greedy(core, name, prompt, max_tokens)
    whole = True
    while core.has_unfinished_requests():
        generating, start = whole and all(outputs.values()), clock()
        results = core.step().outputs
        if generating:
            seconds += clock() - start
            counted += sum(len(one.new_token_ids) for one in results)
        whole = whole and not any(one.finish_reason for one in results)
        for one in results:
            outputs[one.request_id].extend(one.new_token_ids)
    after = core.scheduler.spec_decoding_stats
    drafts, accepted = after.num_drafts - before.num_drafts, after.num_accepted_tokens - before.num_accepted_tokens
    return Served([*outputs.values()], counted, seconds, drafts, accepted)


def serve_in_batches(core: EngineCore, prompts: Sequence[list[int]], batch: int, max_tokens: int) -> Served:
    """Serve all prompts, `batch` at once."""
    parts = [prompts[start : start + batch] for start in range(0, len(prompts), batch)]
    return reduce(Served.and_then, (serve(core, part, max_tokens) for part in parts))


def compare(arguments: argparse.Namespace, batch: int, ways: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Map each method and kind of text to acceptance length, speed-up over no drafts, and share of
    equal texts.
    """
    least = 2 if arguments.quick else LEAST_PROMPTS
    cores = {name: engine_of(arguments, way, batch) for name, way in {OFF: None, **ways}.items()}
    prompts = {kind: prompts_of(kind, arguments.model, max(batch, least)) for kind in KINDS}
    tokens, found = 16 if arguments.quick else OUTPUT_TOKENS, {name: {} for name in ways}
    for kind in KINDS:
        for core in cores.values():
            serve(core, prompts[kind][:batch], 8)  # warms up
        rounds = [
            {name: serve_in_batches(core, prompts[kind], batch, tokens) for name, core in cores.items()}
            for _ in range(arguments.rounds)
        ]
        for name in ways:
            run, plain = (reduce(Served.and_then, (one[way] for one in rounds)) for way in (name, OFF))
            ratios = [one[name].throughput / one[OFF].throughput for one in rounds]
            found[name][kind] = {
                "length": round(1 + run.num_accepted / max(1, run.num_drafts), 3),
                "drafts": run.num_drafts,
                "speed_up": round(statistics.median(ratios), 3),
                "same": statistics.mean(a == b for a, b in zip(run.outputs, plain.outputs, strict=True)),
            }
    return found


def cells(outcome: dict[str, Any]) -> tuple[list[str], list[tuple[str, ...]]]:
    """Return the columns and rows of the table; `outcome` has `ways` by method, batch and kind of
    text, and `costs` by method.
    """
    ways, costs_of = outcome["ways"], outcome["costs"]
    of_batches = [*chain.from_iterable((f"length, {b}", f"× off, {b}") for b in next(iter(ways.values())))]
    rows = [("no drafts", "", *[""] * len(of_batches), *shown_costs(costs_of[OFF]))]
    for (name, way), kind in product(ways.items(), KINDS):
        shown = chain.from_iterable(
            (f"{one[kind]['length']:.2f}", f"{one[kind]['speed_up']:.2f}") for one in way.values()
        )
        first = kind == KINDS[0]
        rows.append((name if first else "", kind, *shown, *(shown_costs(costs_of[name]) if first else ("", "", ""))))
    return ["method", "text", *of_batches, "MB", "B/token", "trained, min"], rows


def shown_costs(cost: dict[str, float]) -> tuple[str, ...]:
    """Format megabytes, bytes of a token, and minutes of training, with a dash where there is
    none.
    """
    shown = f"{cost['bytes'] / 1e6:.1f}", f"{cost['bytes_per_token']:,}", f"{cost['minutes']:.0f}"
    return tuple(one if float(one.replace(",", "")) else "–" for one in shown)


def page_table(outcome: dict[str, Any]) -> str:
    """Return the table of lesson 07's notes, and the sentence on its last columns."""
    return f"{markdown_table(*cells(outcome))}\n\n{LAST_COLUMNS}"


def main(arguments: argparse.Namespace) -> None:
    """Compare all methods at each batch size."""
    ways = available()
    if arguments.quick:
        arguments.batches, arguments.rounds = [1, 4], 1
    by_batch = {batch: compare(arguments, batch, ways) for batch in track(arguments.batches, "comparing")}
    figures = {
        name: {str(batch): found[name] for batch, found in by_batch.items()} for name in ways
    }  # way -> batch -> kind
    same = statistics.mean(one["same"] for way in figures.values() for batch in way.values() for one in batch.values())
    drafts = {name: arguments.drafts or way["num_speculative_tokens"] for name, way in ways.items()}
    outcome = {"drafts": drafts, "ways": figures, "costs": costs(arguments.model, ways)}
    caption = f"Length and speed-up by number of requests. Same texts as without drafts: {same:.1%}. {LAST_COLUMNS}"
    table("Speculation, method by method", *cells(outcome), caption)
    result = record("speculation", outcome)
    if arguments.page:
        NOTES.write_text(put_between_marks(NOTES.read_text(), "speculation", page_table(outcome)))
    report(result, arguments.json)


def parser() -> argparse.ArgumentParser:
    flags = benchmark_parser(__doc__)
    flags.add_argument("--model", default=str(EMBEDDED_MODEL), help="the model's folder or name")
    flags.add_argument("--drafts", type=positive_int, help="num_speculative_tokens of all methods (default: 5 and 3)")
    flags.add_argument("--batches", type=positive_int, nargs="+", default=[1, 8, 64], help="batch sizes")
    flags.add_argument("--rounds", type=positive_int, default=5, help="rounds of all methods (default: 5)")
    flags.add_argument("--quick", action="store_true", help="small batches, one round")
    flags.add_argument("--page", action="store_true", help="also write the table into the notes of lesson 07")
    return flags


if __name__ == "__main__":
    run(main, parser())
