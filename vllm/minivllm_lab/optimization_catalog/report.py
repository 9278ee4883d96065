"""Lesson 05's measurements on the engine, its tables, its figure and its command line.

Each `measure_*` function measures, prints its table and returns its figures; its callables are the
lesson's own code.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from minivllm.config import EMBEDDED_MODEL
from minivllm.entrypoints.llm import LLM
from minivllm.models.attention import CausalAttention
from minivllm.models.decoder import Decoder
from minivllm.sampling_params import SamplingParams
from minivllm_lab import palette
from minivllm_lab.cli import lesson_parser, whole_number
from minivllm_lab.figures import curves, named_bars, panels
from minivllm_lab.optimization_catalog.shared_prefixes import WORK, serve
from minivllm_lab.progress import track
from minivllm_lab.tables import Timed, closing, console, table
from minivllm_simulate.known_models import known_model

CAPTURED = (1, 2, 4, 8, 16)
"""Rows of the graphs in the example of padding."""
GRAPH_GAINS = {
    "GPT-2, vLLM on an H200": {"1": 766.6 / 207.7},
    "Qwen3-0.6B, xLLM": {"1": 4.20 / 2.72, "30": 9.85 / 9.11},
    "Llama-2-7B, vLLM": {"1": 1.20 / 1.05},
}
"""Published gains of CUDA graphs, by requests at once: deepspeedai/DeepSpeed#8352 (tokens/s),
xLLM-AI/xllm#713 (ms a token), vllm-project/vllm#1440 (s for 100 tokens).
"""


# ---- prefix caching ------------------------------------------------------------------------------


def measure_prefixes(llm: LLM, without: LLM, text: Sequence[int], users: int, rounds: int) -> dict:
    """Serve each workload with and without the prefix cache; measure the hit rate and the gain in
    time to first token.
    """
    results, rows = {}, []
    for name, work in track(WORK.items(), "sharing prefixes"):
        runs = [[serve(engine, work, text, users) for engine in (llm, without)] for _ in range(rounds)]
        sooner = statistics.median(off.first_token_seconds / on.first_token_seconds for on, off in runs)
        on, off = runs[0]
        hit = on.hits / on.queries
        same = statistics.mean(a == b for a, b in zip(on.answers, off.answers, strict=True))
        results[name] = {"tokens": on.queries, "skipped": on.hits, "hit": hit, "sooner": sooner, "same": same}
        rows.append((name, f"{on.queries:,}", f"{on.hits:,}", f"{hit:.1%}", f"{sooner:.1f} ×", f"{same:.0%}"))
    columns = ("work", "prompt tokens", "not computed", "hit rate", "first token sooner", "same answers")
    table(f"Prefix caching, {users} users", columns, rows)
    return results


def show_thrashing(rates: Mapping[str, float], rounds: int) -> None:
    """Print hit rates by the number of prefixes that are requested in turn."""
    title = f"A pool of 63 blocks, and prefixes of 8 blocks requested in turn, {rounds} times"
    table(title, ("prefixes", *rates), [("hit rate", *(f"{rate:.0%}" for rate in rates.values()))])


def measure_salted(llm: LLM, prompt: list[int]) -> dict:
    """Count the cached tokens of one prompt sent by users with different salts, one after the
    other.
    """
    cached, params = {}, SamplingParams(max_tokens=1)
    llm.reset_prefix_cache()
    for user, salt in (("Ann", "a"), ("Bob", "b"), ("Ann again", "a")):
        outputs = llm.generate({"prompt_token_ids": prompt, "cache_salt": salt}, params, use_tqdm=False)
        cached[user] = outputs[0].num_cached_tokens
    table(f"Found in the cache, of the same {len(prompt)} tokens", list(cached), [list(cached.values())])
    return cached


# ---- CUDA graphs ---------------------------------------------------------------------------------


def replay_wrongly(
    buffers_of: Callable[[int, int], Any], padded_size: Callable[[int, Sequence[int]], int | None]
) -> dict:
    """Print the graph that each batch gets, a replay without padding, and a replay of a graph that
    is too small.

    `buffers_of(largest, cache_slots)` makes the lesson's buffers.
    """
    graphs = {str(batch): padded_size(batch, CAPTURED) for batch in (1, 3, 5, 9, 17)}
    sizes = ("rows", *(size or "none" for size in graphs.values()))
    table("The graph that a step is padded to", ("requests", *graphs), [sizes])
    results: dict = {"graphs": graphs}
    for name, pad in (("padded", True), ("not padded", False)):
        buffers = buffers_of(8, 16)
        buffers.replay(4, [1, 2, 3, 4], [10, 11, 12, 13])
        buffers.cache[13] = 99  # the fourth request has ended; its slot belongs to another request
        buffers.replay(4, [5, 6, 7], [10, 11, 12], pad)
        results[name] = buffers.cache[13]
    buffers = buffers_of(8, 16)
    buffers.replay(8, [1, 2, 3, 4, 5], [1, 2, 3, 4, 5])
    too_small, right = buffers.replay(4, [6, 7, 8, 9, 11], [1, 2, 3, 4, 5]), [60, 70, 80, 90, 110]
    after = f"another request's 99 is then {results['padded']} with padding, {results['not padded']} without"
    console.print(f"A graph of 4 rows replayed for 3 requests: {after}.")
    console.print(f"Replayed for 5, it returns {too_small} instead of {right}.")
    return results | {"right": right, "too small": too_small}


# ---- tensor parallelism --------------------------------------------------------------------------


@torch.inference_mode()
def measure_parallel(model: Decoder, column_then_row: Callable, all_reduce_bytes: Callable) -> dict:
    """Compare one layer's two halves on one rank and on two; print what GPUs would send for
    Llama-3-70B.
    """
    config = model.config
    layer: Any = model.layers[0]
    x, attend = torch.randn(24, config.hidden_size).to(layer.mlp.down_proj.weight), CausalAttention(config)
    shares = [count * config.head_dim for count in (config.num_attention_heads, *[config.num_key_value_heads] * 2)]

    def heads(*qkv: Tensor) -> Tensor:
        return attend(0, *(part.unflatten(1, (-1, config.head_dim)) for part in qkv)).flatten(1)

    halves = {
        "attention": (layer.self_attn.qkv_proj.weight.split(shares), layer.self_attn.o_proj.weight, heads),
        "mlp": (layer.mlp.gate_up_proj.weight.chunk(2), layer.mlp.down_proj.weight, lambda g, u: F.silu(g) * u),
    }
    off = {}
    for name, half in halves.items():
        off[name] = (column_then_row(x, *half, 1) - column_then_row(x, *half, 2)).abs().max().item()
    large, counts = known_model("Meta-Llama-3-70B"), (64, 8192)
    shape = large.hidden_size, large.num_hidden_layers
    sent = {str(ranks): {str(n): all_reduce_bytes(n, *shape, ranks) for n in counts} for ranks in (2, 4, 8)}
    rows = [(ranks, *(f"{count / 1e6:,.0f} MB" for count in steps.values())) for ranks, steps in sent.items()]
    caption = "two ranks differ from one by " + ", ".join(f"{error:.0e} ({name})" for name, error in off.items())
    table("Llama-3-70B: each GPU sends, in a step of", ("GPUs", "64 tokens", "8,192 tokens"), rows, caption)
    return {"off": max(off.values()), "sent": sent}


# ---- the whole lesson ----------------------------------------------------------------------------


def close(results: dict, disturbance: str) -> None:
    """Print the conclusions; leave out those from timings if there was a `disturbance`."""
    prefix, kv = results["prefix"], results["kv"]
    closing(
        f"The prefix cache spared an agent {prefix['an agent']['hit']:.0%} of its prefill, users behind one "
        f"instruction {prefix['one system prompt']['hit']:.0%}, and strangers {prefix['strangers']['hit']:.0%}. With "
        f"10 prefixes in turn in a pool for 7 it spared {results['thrash']['10']:.0%}.",
        f"An int8 cache holds {kv['capacity']['int8']:.2f} times Llama-3.1-8B's tokens and added {kv['added']:+.4f} to "
        f"the loss; int4 weights without groups, with one outlier channel, added "
        f"{results['weights']['ways']['int4, a scale per row']['added_50']:+.2f}.",
        Timed(
            f"The first token arrived {prefix['an agent']['sooner']:.1f} × as fast for the agent, "
            f"{prefix['one system prompt']['sooner']:.1f} × behind one instruction, "
            f"{prefix['strangers']['sooner']:.1f} × for strangers."
        ),
        disturbance=disturbance,
    )


def draw(results: dict, path: str) -> None:
    """Plot hit rates when prefixes outgrow the pool, loss by bits of the weights, and published
    gains of graphs.
    """
    with panels(path, 3) as (left, middle, right):
        curves(left, {"hits": results["thrash"]}, factor=100)
        left.set(title="Prefixes outgrow the pool", xlabel="prefixes of 8 blocks, pool of 63", ylabel="% hits", ylim=-2)
        for (name, way), colour in zip(results["weights"]["ways"].items(), palette.SERIES, strict=False):
            middle.plot(way["bits"], way["added_1"], "o", color=colour, label=name)
            middle.plot(way["bits"], way["added_50"], "x", color=colour)
        middle.set(title="Weights (×: outlier channel)", xlabel="bits per weight", ylabel="loss added, nats per token")
        middle.set(yscale="log", ylim=(5e-5, 300))
        middle.legend(fontsize=8, loc="upper right")
        gains = [
            (f"{name}, {batch} at once: {gain:.2f} ×", gain, palette.SKY)
            for name, batches in GRAPH_GAINS.items()
            for batch, gain in batches.items()
        ]
        named_bars(right, gains)
        right.set(title="CUDA graphs (published)", xlabel="× as fast", xlim=(0, 4))


def parser(doc: str | None) -> argparse.ArgumentParser:
    """Build the parser: the common flags and the lesson's own; --help shows `doc`."""
    flags = lesson_parser(doc or "", EMBEDDED_MODEL)
    users = whole_number(2, 32)
    flags.add_argument("--users", type=users, default=8, help="users sharing prefixes, 2 to 32 (default: 8; quick: 4)")
    groups = (16, 32, 64, 128, 256)
    flags.add_argument("--group", type=int, choices=groups, default=64, help="weights that share an int4 scale")
    return flags
