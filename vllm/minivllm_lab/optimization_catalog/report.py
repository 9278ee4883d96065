"""Lesson 05's measurements on the engine, its tables, its figure and its command line.

A function `measure_*` measures, prints its table and returns its figures; what it takes as a callable is code of the
lesson. A function `show_*` only prints what the lesson measured itself.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from minivllm.config import EMBEDDED_MODEL, CacheConfig
from minivllm.entrypoints.llm import LLM
from minivllm.kernels.quantized_linear import quantized_linear
from minivllm.memory import kv_bytes_per_token
from minivllm.models.attention import CausalAttention
from minivllm.models.decoder import Decoder
from minivllm.sampling_params import SamplingParams
from minivllm_lab import palette
from minivllm_lab.cli import lesson_parser, whole_number
from minivllm_lab.drawing import QUIET, line, rect, svg, text, tint
from minivllm_lab.figures import curves, named_bars, panels
from minivllm_lab.optimization_catalog.shared_prefixes import WORK, serve
from minivllm_lab.progress import track
from minivllm_lab.quality import RoundedCache, decoder_loss, read, rounded_weights
from minivllm_lab.recording import bare_engine, record_run
from minivllm_lab.tables import Timed, closing, console, table
from minivllm_lab.timing import median_seconds
from minivllm_simulate.known_models import known_model

LLAMA = known_model("Llama-3.1-8B")
CAPTURED = (1, 2, 4, 8, 16)
"""Rows of the graphs in the example of padding."""
OUTLIERS = (1, 50)
"""Factors applied to one channel: unchanged, and an outlier."""
GRAPH_GAINS = {
    "GPT-2, vLLM on an H200": {"1": 766.6 / 207.7},
    "Qwen3-0.6B, xLLM": {"1": 4.20 / 2.72, "30": 9.85 / 9.11},
    "Llama-2-7B, vLLM": {"1": 1.20 / 1.05},
}
"""Published gains of CUDA graphs, by requests at once: deepspeedai/DeepSpeed#8352 (tokens/s), xLLM-AI/xllm#713 (ms a
token), vllm-project/vllm#1440 (s for 100 tokens)."""
Texts = list[list[int]]
"""Token ids of several texts."""
Quantize = Callable[[Tensor], tuple[Tensor, Tensor]]
"""Rows [..., n] to integers and the scale [...] of each row."""


# ---- prefix caching --------------------------------------------------------------------------------------------------


def measure_prefixes(llm: LLM, without: LLM, text: Sequence[int], users: int, rounds: int) -> dict:
    """Each workload with and without the prefix cache: hit rate in tokens, and the gain in time to first token."""
    found, rows = {}, []
    for name, work in track(WORK.items(), "sharing prefixes"):
        runs = [[serve(one, work, text, users) for one in (llm, without)] for _ in range(rounds)]
        sooner = statistics.median(off.first_token_seconds / on.first_token_seconds for on, off in runs)
        on, off = runs[0]
        hit, same = on.hits / on.queries, statistics.mean(a == b for a, b in zip(on.answers, off.answers, strict=True))
        found[name] = {"tokens": on.queries, "skipped": on.hits, "hit": hit, "sooner": sooner, "same": same}
        rows.append((name, f"{on.queries:,}", f"{on.hits:,}", f"{hit:.1%}", f"{sooner:.1f} ×", f"{same:.0%}"))
    columns = ("work", "prompt tokens", "not computed", "hit rate", "first token sooner", "same answers")
    table(f"Prefix caching, {users} users", columns, rows)
    return found


def show_thrashing(found: Mapping[str, float], rounds: int) -> None:
    """Hit rates by the number of prefixes used in rotation."""
    title = f"A pool of 63 blocks, and prefixes of 8 blocks that come in turn, {rounds} times"
    table(title, ("prefixes", *found), [("hit rate", *(f"{hit:.0%}" for hit in found.values()))])


def measure_salted(llm: LLM, prompt: list[int]) -> dict:
    """Tokens of the same prompt that are found in the cache, by users with salts, one after the other."""
    found, params = {}, SamplingParams(max_tokens=1)
    llm.reset_prefix_cache()
    for who, salt in (("Ann", "a"), ("Bob", "b"), ("Ann again", "a")):
        asked = llm.generate({"prompt_token_ids": prompt, "cache_salt": salt}, params, use_tqdm=False)
        found[who] = asked[0].num_cached_tokens
    table(f"Found in the cache, of the same {len(prompt)} tokens", list(found), [list(found.values())])
    return found


# ---- the KV cache in int8 --------------------------------------------------------------------------------------------


def measure_cache(llm: LLM, model: str, texts: Texts, context: int, device: torch.device) -> dict:
    """The engine's int8 cache: bytes of a token, loss and agreement on held-out text, and the time of a decode step."""
    kinds, here = ("float32", "bfloat16", "fp8", "int8"), llm.llm_engine.model_config
    sizes = {k: {"here": kv_bytes_per_token(here, k), "llama": kv_bytes_per_token(LLAMA, k)} for k in kinds}
    fits = {k: sizes["bfloat16"]["llama"] / sizes[k]["llama"] for k in kinds}
    settings = {"device": device.type, "num_gpu_blocks_override": 300, "max_model_len": 1024}
    full, quantized = read(llm, texts), read(LLM(model, kv_cache_dtype="int8", **settings), texts)
    added, agreement = quantized.loss - full.loss, quantized.agreement(full)
    faster = _step_seconds(model, device, context, "auto") / _step_seconds(model, device, context, "int8")
    caption = (
        f"read by the engine: loss {full.loss:.4f}, in int8 {added:+.4f}, same favourite token at {agreement:.1%}; "
        f"a decode step of 8 requests at {context} tokens is {faster:.2f} × as fast"
    )
    rows = [(k, *(f"{size:,}" for size in sizes[k].values()), f"{fits[k]:.2f} ×") for k in kinds]
    table("Bytes of a token", ("KV cache", "this model", "Llama-3.1-8B", "fits, of bfloat16"), rows, caption)
    return {"bytes": sizes, "capacity": fits, "loss": full.loss, "added": added, "agreement": agreement,
            "faster": faster, "context": context}  # fmt: skip


def _step_seconds(model: str, device: torch.device, context: int, kv_cache_dtype: str) -> float:
    """The median decode step of 8 requests at `context` tokens."""
    pool = CacheConfig(num_gpu_blocks=1 + 8 * (context // 16 + 2), enable_prefix_caching=False)
    core = bare_engine(model, device, pool, kv_cache_dtype=kv_cache_dtype, max_model_len=context + 32)
    return record_run(core, [(context, 24)] * 8).decode_seconds


def int8_caches(quantize: Quantize) -> dict[str, Callable[[Tensor], Tensor]]:
    """Functions that round keys or values [tokens, heads, head_dim] as an int8 cache does, by scale granularity."""

    def per_token_and_head(x: Tensor) -> Tensor:
        integers, scales = quantize(x)
        return integers * scales[..., None]

    def per_tensor(x: Tensor) -> Tensor:
        return per_token_and_head(x.reshape(1, 1, -1)).view_as(x)

    return {"a scale per token and head": per_token_and_head, "a scale per tensor": per_tensor}


def measure_outlier(model: Decoder, texts: Texts, quantize: Quantize) -> dict:
    """Loss added by an int8 cache, by granularity of the scale: for the model as it is, and with one channel × 50."""
    plain, lengths, found = decoder_loss(model, texts), [len(one) for one in texts], {}
    for name, rounded in int8_caches(quantize).items():
        caches = {str(size): RoundedCache(model.config, lengths, rounded, size) for size in OUTLIERS}
        found[name] = {size: decoder_loss(model, texts, cache) - plain for size, cache in caches.items()}
    rows = [(name, *(f"{value:+.4f}" for value in one.values())) for name, one in found.items()]
    table("Loss that an int8 cache adds", ("", "as it is", "one channel × 50"), rows)
    return found


# ---- weights in int8 and int4 ----------------------------------------------------------------------------------------


def stored(
    weight: Tensor, group: int | None, quantize: Quantize, quantize_int4: Callable, dequantize_int4: Callable
) -> tuple[Tensor, float]:
    """Weights [n, k] rounded to int4 groups (None: int8, one scale per row), and bits per weight with 16-bit scales."""
    if group is None:
        integers, scales = quantize(weight)
        return integers * scales[:, None], 8 + 16 / weight.shape[1]
    packed, scales = quantize_int4(weight, min(group, weight.shape[1]))
    return dequantize_int4(packed, scales, weight.shape[1]), (8 * packed.numel() + 16 * scales.numel()) / weight.numel()


def measure_weights(
    model: Decoder, texts: Texts, group: int, quantize: Quantize, quantize_int4: Callable, dequantize_int4: Callable
) -> dict:
    """Bits, error and loss of all layers' weights, in int8, and in int4 by the size of its groups."""
    by = quantize, quantize_int4, dequantize_int4
    ways: dict = {"int8, a scale per row": None, "int4, a scale per row": 1 << 20}
    ways |= {f"int4, groups of {size}": size for size in sorted({16, 128, group}, reverse=True)}
    layer: Any = model.layers[0]
    base, shape, found, rows = decoder_loss(model, texts), layer.mlp.gate_up_proj.weight, {}, []
    for name, size in track(ways.items(), "rounding weights"):
        found[name] = {"bits": stored(shape, size, *by)[1]}
        for outlier in OUTLIERS:
            with rounded_weights(model, lambda weight, size=size: stored(weight, size, *by)[0], outlier) as error:
                found[name] |= {f"error_{outlier}": error, f"added_{outlier}": decoder_loss(model, texts) - base}
        bits, error, added, _, worse = found[name].values()
        rows.append((name, f"{bits:.2f}", f"{error:.1%}", f"{added:+.4f}", f"{worse:+.4f}"))
    slower, inside = _products(quantize)
    caption = (
        f"one row times 2,048² int8 weights on a CPU, of float32's time: {slower:.1f} × if dequantized first, "
        f"{inside:.2f} × by the engine, which unpacks inside the product"
    )
    columns = ("stored as", "bits", "error", "loss added", "one channel × 50")
    table(f"Weights of the layers (loss {base:.4f})", columns, rows, caption)
    return {"ways": found, "loss": base, "slower": slower, "unpacked_inside": inside}


def _products(quantize: Quantize) -> tuple[float, float]:
    """Time of one row times int8 weights relative to float32: dequantized first, and by the engine."""
    x, weight = torch.randn(1, 2048), torch.randn(2048, 2048)
    integers, scales = quantize(weight)
    first = median_seconds(lambda: x @ (integers * scales[:, None]).T)
    inside = median_seconds(lambda: quantized_linear(x, integers, scales[:, None]))
    plain = median_seconds(lambda: x @ weight.T)
    return first / plain, inside / plain


# ---- CUDA graphs -----------------------------------------------------------------------------------------------------


def replay_wrongly(
    buffers_of: Callable[[int, int], Any], padded_size: Callable[[int, Sequence[int]], int | None]
) -> dict:
    """The graph of each batch; a replay without padding, and one of a graph that is too small: cache and output.

    `buffers_of(largest, cache_slots)` makes the lesson's buffers.
    """
    graphs = {str(batch): padded_size(batch, CAPTURED) for batch in (1, 3, 5, 9, 17)}
    columns = ("requests", *graphs)
    table("The graph that a step is padded to", columns, [("rows", *(size or "none" for size in graphs.values()))])
    found: dict = {"graphs": graphs}
    for name, pad in (("padded", True), ("not padded", False)):
        buffers = buffers_of(8, 16)
        buffers.replay(4, [1, 2, 3, 4], [10, 11, 12, 13])
        buffers.cache[13] = 99  # the fourth request has left; its slot belongs to another request
        buffers.replay(4, [5, 6, 7], [10, 11, 12], pad)
        found[name] = buffers.cache[13]
    buffers = buffers_of(8, 16)
    buffers.replay(8, [1, 2, 3, 4, 5], [1, 2, 3, 4, 5])
    found |= {"right": [60, 70, 80, 90, 110], "too small": buffers.replay(4, [6, 7, 8, 9, 11], [1, 2, 3, 4, 5])}
    after = f"somebody else's 99 is then {found['padded']} if the rest is padded, {found['not padded']} if not"
    console.print(f"A graph of 4 rows replayed for 3 requests: {after}.")
    console.print(f"Replayed for 5: out come {found['too small']}, and right is {found['right']}.")
    return found


def graph_replay() -> str:
    """The SVG of `lessons/figures/05_graph_replay.svg`: a step launched one by one, and replayed. Not to scale."""
    launch, kernel, left, count = 74, 34, 120, 8
    ways = {
        "one by one": ([(launch * place, launch) for place in range(count)],
                       [(launch * (place + 1), kernel) for place in range(count)]),
        "as a graph": ([(0, launch)], [(launch + kernel * place, kernel) for place in range(count)]),
    }  # fmt: skip
    shapes = [text(20, 28, "The same eight kernels (not to scale)", bold=True)]
    for index, (name, (launches, kernels)) in enumerate(ways.items()):
        y = 52 + 112 * index
        shapes += [text(20, y + 12, name), text(104, y + 33, "host", anchor="end", colour=QUIET)]
        shapes.append(text(104, y + 67, "GPU", anchor="end", colour=QUIET))
        words = "launch" if len(launches) > 1 else "replay"
        shapes += [
            rect(left + x, y + 18, w - 4, 22, tint(palette.ORANGE, 0.4), label=words, size=12) for x, w in launches
        ]
        shapes += [rect(left + x, y + 52, w - 4, 22, tint(palette.BLUE, 0.45)) for x, w in kernels]
        end = left + kernels[-1][0] + kernels[-1][1]
        shapes.append(line((end, y + 14), (end, y + 82), palette.INK, dash="3 3"))
        shapes.append(text(end - 6, y + 92, "the step ends", size=12, anchor="end"))
    label = "Launched one by one, the GPU waits between kernels; replayed as a graph, they follow one another"
    return svg(left + launch * count + kernel + 20, 272, *shapes, label=label) + "\n"


# ---- tensor parallelism ----------------------------------------------------------------------------------------------


@torch.inference_mode()
def measure_parallel(model: Decoder, column_then_row: Callable, all_reduce_bytes: Callable) -> dict:
    """One layer's two halves on one rank and on two; what GPUs would send for Llama-3-70B."""
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
    off = {n: (column_then_row(x, *h, 1) - column_then_row(x, *h, 2)).abs().max().item() for n, h in halves.items()}
    large, counts = known_model("Meta-Llama-3-70B"), (64, 8192)
    shape = large.hidden_size, large.num_hidden_layers
    sent = {str(ranks): {str(n): all_reduce_bytes(n, *shape, ranks) for n in counts} for ranks in (2, 4, 8)}
    rows = [(ranks, *(f"{count / 1e6:,.0f} MB" for count in one.values())) for ranks, one in sent.items()]
    caption = "two ranks differ from one by " + ", ".join(f"{error:.0e} ({name})" for name, error in off.items())
    table("Llama-3-70B: each GPU sends, in a step of", ("GPUs", "64 tokens", "8,192 tokens"), rows, caption)
    return {"off": max(off.values()), "sent": sent}


# ---- the whole lesson ------------------------------------------------------------------------------------------------


def close(found: dict, disturbance: str) -> None:
    """Print the conclusions; `disturbance` says what else kept the machine busy, if anything."""
    prefix, kv = found["prefix"], found["kv"]
    closing(
        f"The prefix cache spared an agent {prefix['an agent']['hit']:.0%} of its prefill, users behind one "
        f"instruction {prefix['one system prompt']['hit']:.0%}, and strangers {prefix['strangers']['hit']:.0%}. With "
        f"10 prefixes in turn in a pool for 7 it spared {found['thrash']['10']:.0%}.",
        f"An int8 cache holds {kv['capacity']['int8']:.2f} times Llama-3.1-8B's tokens and added {kv['added']:+.4f} to "
        f"the loss; int4 weights without groups, with one outlier channel, added "
        f"{found['weights']['ways']['int4, a scale per row']['added_50']:+.2f}.",
        Timed(
            f"The first token came {prefix['an agent']['sooner']:.1f} × as fast for the agent, "
            f"{prefix['one system prompt']['sooner']:.1f} × behind one instruction, "
            f"{prefix['strangers']['sooner']:.1f} × for strangers."
        ),
        disturbance=disturbance,
    )


def draw(found: dict, path: str) -> None:
    """Hit rates when prefixes outgrow the pool; loss by bits of the weights; published gains of graphs."""
    with panels(path, 3) as (left, middle, right):
        curves(left, {"hits": found["thrash"]}, factor=100)
        left.set(title="Prefixes outgrow the pool", xlabel="prefixes of 8 blocks, pool of 63", ylabel="% hits", ylim=-2)
        for (name, one), colour in zip(found["weights"]["ways"].items(), palette.SERIES, strict=False):
            middle.plot(one["bits"], one["added_1"], "o", color=colour, label=name)
            middle.plot(one["bits"], one["added_50"], "x", color=colour)
        middle.set(title="Weights (×: outlier channel)", xlabel="bits per weight", ylabel="loss added, nats per token")
        middle.set(yscale="log", ylim=(5e-5, 300))
        middle.legend(fontsize=8, loc="upper right")
        gains = [
            (f"{name}, {batch} at once: {gain:.2f} ×", gain, palette.SKY)
            for name, one in GRAPH_GAINS.items()
            for batch, gain in one.items()
        ]
        named_bars(right, gains)
        right.set(title="CUDA graphs (published)", xlabel="× as fast", xlim=(0, 4))


def even(text: str) -> int:
    """An argparse type: an even number of at least 2."""
    value = whole_number(2)(text)
    if value % 2:
        raise argparse.ArgumentTypeError(f"must be an even number, got {value}")
    return value


def parser(doc: str | None) -> argparse.ArgumentParser:
    """The lesson's own flags, besides the common ones; `doc` is shown by --help."""
    flags = lesson_parser(doc or "", EMBEDDED_MODEL)
    users = whole_number(2, 32)
    flags.add_argument("--users", type=users, default=8, help="who share prefixes, 2 to 32 (default: 8; quick: 4)")
    flags.add_argument("--group", type=even, default=64, help="weights that share an int4 scale (default: 64)")
    return flags
