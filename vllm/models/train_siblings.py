"""Train four small sibling models that differ only in how many heads share keys and values, and
compare their losses.

    uv run python vllm/models/train_siblings.py                 # every missing run, then the comparison
    uv run python vllm/models/train_siblings.py --seeds 1       # the first seed of each only
    uv run python vllm/models/train_siblings.py --compare       # only compare the finished runs

    tiny-python-mha   8 query heads, 8 KV heads
    tiny-python-gqa   8 query heads, 2 KV heads
    tiny-python-mqa   8 query heads, 1 KV head
    tiny-python-mla   8 query heads, a latent vector of 56 numbers and one rotated key of 8: as much cache as GQA

Width and depth are those of `tiny-python-draft`; tokenizer, corpus and recipe are `train.py`'s.
Runs with one seed see the same windows in the same order. The parameters that fewer KV heads save
go into the MLP's width, so that all four models are equally large, to within 0.03 %. Nothing is
compiled: on a CPU that takes longer than such a short run saves.

Each run's directory is complete or absent: an interrupted run starts over, and the others are kept.
With --ship, the models of seed 0 are copied beside this file.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import sys
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from train import HERE, SIBLINGS_COMPARED, Corpus, Shape, build_model, fit, load_tokenizer, save

from minivllm.config import EMBEDDED_MODEL, EMBEDDED_SIBLINGS
from minivllm_lab.corpus import corpus_files, is_held_out, read_texts
from minivllm_lab.results import write_json

RUNS = HERE.parents[1] / "out" / "siblings"
SIBLINGS = {
    "tiny-python-mha": Shape(128, 2, 8, 8, 344, 8e-3),
    "tiny-python-gqa": Shape(128, 2, 8, 2, 408, 8e-3),
    "tiny-python-mqa": Shape(128, 2, 8, 1, 419, 8e-3),
    "tiny-python-mla": Shape(128, 2, 8, 8, 380, 8e-3, kv_lora_rank=56),
}

console = Console()


def run_directory(name: str, seed: int) -> Path:
    """Return the directory for a run's model and its `training.json`."""
    return RUNS / f"{name}-{seed}"


def train_missing(seeds: int, tokens: int) -> None:
    """Train the missing runs, seed by seed, so that a comparison of the first seeds is ready first."""
    runs = [(name, seed) for seed in range(seeds) for name in SIBLINGS]
    runs = [run for run in runs if not (run_directory(*run) / "training.json").exists()]
    if not runs:
        return
    tokenizer = load_tokenizer(EMBEDDED_MODEL)
    corpus = Corpus.encoded(tokenizer, read_texts([path for path in corpus_files() if not is_held_out(path)]), seed=0)
    for name, seed in runs:
        torch.manual_seed(seed)
        shape = SIBLINGS[name]
        model = build_model(shape)
        facts = fit(model, corpus, f"{name}-{seed}", None, tokens, shape.learning_rate, seed)
        save(model, tokenizer, run_directory(name, seed), facts)
        console.print(f"{name}-{seed}: held-out loss {facts['held_out_loss']:.4f}, {facts['minutes']:.1f} minutes")


def compare() -> None:
    """Save the losses of the seeds that all siblings have, with means and spreads, with the other
    results.
    """
    facts = {name: facts_by_seed(name) for name in SIBLINGS}
    seeds = sorted(set.intersection(*(set(found) for found in facts.values())))
    if not seeds:
        console.print("no seed has finished for all four yet")
        return
    figures = {name: figures_of(shape, [facts[name][seed] for seed in seeds]) for name, shape in SIBLINGS.items()}
    write_json(
        SIBLINGS_COMPARED, "attention_siblings", figures, unit="nats per token", held_out="files never trained on"
    )
    console.print(f"wrote {SIBLINGS_COMPARED}")


def facts_by_seed(name: str) -> dict[int, dict[str, Any]]:
    """Return the recorded facts of a sibling's finished runs, by seed."""
    found = (json.loads(path.read_text()) for path in RUNS.glob(f"{name}-*/training.json"))
    return {facts["seed"]: facts for facts in found}


def figures_of(shape: Shape, runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Return one sibling's figures over its runs, in the order of their seeds."""
    losses = [round(facts["held_out_loss"], 4) for facts in runs]
    return {
        "num_attention_heads": shape.num_attention_heads,
        "num_key_value_heads": None if shape.kv_lora_rank else shape.num_key_value_heads,
        "intermediate_size": shape.intermediate_size,
        "cached_numbers_per_token_and_layer": cached_numbers(shape),
        "parameters": runs[0]["parameters"],
        "tokens_seen": runs[0]["tokens_seen"],
        "held_out_loss_of_seed": {str(facts["seed"]): loss for facts, loss in zip(runs, losses, strict=True)},
        "held_out_loss_mean": round(statistics.mean(losses), 4),
        "held_out_loss_spread": round(max(losses) - min(losses), 4),
        "minutes": round(sum(facts["minutes"] for facts in runs), 1),
    }


def cached_numbers(shape: Shape) -> int:
    """Return how many numbers a token leaves in one layer's cache: keys and values of each KV head,
    or latent and rotated key.
    """
    width = shape.hidden_size // shape.num_attention_heads
    return shape.kv_lora_rank + width // 2 if shape.kv_lora_rank else 2 * shape.num_key_value_heads * width


def ship() -> None:
    """Copy the models of seed 0 beside this file."""
    for directory in EMBEDDED_SIBLINGS.values():
        shutil.copytree(run_directory(directory.name, 0), directory, dirs_exist_ok=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3, help="seeds 0, 1, ... of each sibling")
    parser.add_argument("--tokens", type=int, default=1_000_000, help="tokens that each run sees")
    parser.add_argument("--compare", action="store_true", help="only compare the finished runs")
    parser.add_argument("--ship", action="store_true", help="copy the models of seed 0 beside this file")
    arguments = parser.parse_args()
    if not arguments.compare:
        train_missing(arguments.seeds, arguments.tokens)
    compare()
    if arguments.ship:
        ship()


if __name__ == "__main__":
    sys.exit(main())
