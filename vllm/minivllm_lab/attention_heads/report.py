"""Lesson 09's measurements, its tables, its figure and its command line.

A function `measure_*` or `show_*` measures or counts, prints its table and returns its figures; what it takes as a
callable is code of the lesson.
"""

from __future__ import annotations

import argparse
import math
import statistics
import tempfile
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from minivllm import LLM, SamplingParams
from minivllm.config import EMBEDDED_MODEL, ModelConfig
from minivllm.config.units import GIB
from minivllm.errors import MinivllmError
from minivllm.kernels.unified_attention import unified_attention
from minivllm.memory import kv_bytes_per_token
from minivllm.models.loader import load_model
from minivllm.models.tokenizer import load_tokenizer
from minivllm.platforms.triton_utils import INTERPRETED
from minivllm_lab import palette
from minivllm_lab.attention_heads.pooled_heads import Pool, pooled_checkpoint
from minivllm_lab.cli import lesson_parser, whole_number
from minivllm_lab.corpus import first_passages, held_out_texts
from minivllm_lab.device_rates import copy_bandwidth
from minivllm_lab.figures import panels
from minivllm_lab.followed import without_info
from minivllm_lab.inside import core_of
from minivllm_lab.kernel_trace import KernelTrace, trace_kernel
from minivllm_lab.progress import track, working
from minivllm_lab.proof import furthest, show_errors
from minivllm_lab.quality import decoder_loss
from minivllm_lab.tables import Timed, closing, markdown_table, table
from minivllm_lab.timing import in_turns
from minivllm_simulate.hardware import get_hardware
from minivllm_simulate.known_models import known_model

MODELS = (
    "Llama-2-7b-hf", "Qwen3-0.6B", "Llama-3.1-8B", "Qwen2.5-7B", "Meta-Llama-3-70B", "DeepSeek-V2-Lite", "DeepSeek-V3",
)  # fmt: skip
KIB = 1024
GPU = "H100"
BLOCK_SIZE, REQUESTS = 16, 4
LATENT_CONTEXTS = (256, 1024, 2048)
DIVIDED = ("Meta-Llama-3-70B", "Qwen3-30B-A3B", "DeepSeek-V3")
RANKS = (1, 2, 4, 8, 16)
GROUPS = {
    "Llama-2-7B": 1, "Qwen3-0.6B": 2, "Llama-3.1-8B": 4, "Qwen2.5-7B": 7, "Llama-3-70B": 8,
    "sixteen heads": 16, "Falcon-7B, one KV head": 71, "DeepSeek-V3, one latent": 128,
}  # fmt: skip
"""Query heads that share what is cached. Falcon-7B's 71 are `n_head` of its config.json."""
PROMPTS = ("def add(a, b):\n    return", "class Stack:\n    def __init__(self):\n", "import os\n\ndef read(path):\n")


# ---- 1. bytes and operations -----------------------------------------------------------------------------------------


def show_models(
    cached_per_token: Callable[[ModelConfig], int], decode_flops_per_byte: Callable[[ModelConfig], float]
) -> dict:
    """What a token takes in real models, what it would take if every head had its own, and operations for each byte.

    Raises:
        AssertionError: the lesson counts otherwise than the engine.
    """
    found, rows, ridge = {}, [], get_hardware(GPU).ridge()
    for name in MODELS:
        config = known_model(name)
        token = 2 * config.num_hidden_layers * cached_per_token(config)
        assert token == kv_bytes_per_token(config, "bfloat16"), f"{name}: the engine counts otherwise"
        whole = 2 * config.num_hidden_layers * own_heads(config)
        one = {
            "heads": config.num_attention_heads,
            "kv_heads": "latent" if config.kv_lora_rank else config.num_key_value_heads,
            "kib": token / KIB,
            "own_kib": whole / KIB,
            "ratio": whole / token,
            "intensity": decode_flops_per_byte(config),
            "tokens": int(40 * GIB / token),
        }
        found[name.replace(".", "-")] = one  # a dot would divide the path by which claims.toml finds it
        cells = (f"{one['kib']:.1f}", f"{one['own_kib']:,.0f}", f"{one['ratio']:.0f} ×", f"{one['intensity']:.0f}")
        rows.append((name, one["heads"], one["kv_heads"], *cells, f"{one['tokens']:,}"))
    columns = (
        "model",
        "heads",
        "KV\nheads",
        "KiB a\ntoken",
        "own heads,\nKiB",
        "less\nby",
        "FLOPs\na byte",
        "in 40 GiB",
    )
    caption = f"Two bytes a number. An {GPU} does {ridge:.0f} operations in the time of a byte, by its data sheet."
    table("Keys and values of a token, all layers", columns, rows, caption)
    return {"models": found, "ridge": ridge}


def own_heads(config: ModelConfig) -> int:
    """Numbers that a layer would keep of a token if every query head had a key and a value of its own."""
    if config.kv_lora_rank:
        width = config.qk_nope_head_dim + config.rotary_dim + config.v_head_dim
    else:
        width = 2 * config.head_dim
    return config.num_attention_heads * width


# ---- 2. fewer KV heads -----------------------------------------------------------------------------------------------


def kv_heads_to_try(heads: int) -> list[int]:
    """As many as heads, a quarter, an eighth, one; those that divide."""
    return sorted({heads // part for part in (1, 4, 8, heads) if heads % part == 0}, reverse=True)


def check(arguments: argparse.Namespace) -> None:
    """Raises `MinivllmError` where --head-dim is none that the lesson draws, or there is no such --model."""
    ModelConfig.from_pretrained(arguments.model)
    if arguments.head_dim % 8:
        raise MinivllmError(f"--head-dim is {arguments.head_dim}; it must be a multiple of 8")


def paged_case(kv_heads: int, context: int, arguments: argparse.Namespace, device: torch.device) -> tuple[Tensor, ...]:
    """One decode step of `REQUESTS` requests: q, k_cache, v_cache, query_start_loc, seq_lens, block_table."""
    blocks, dtype = -(-context // BLOCK_SIZE), torch.float32 if device.type == "cpu" else torch.bfloat16
    q = torch.randn(REQUESTS, arguments.heads, arguments.head_dim, device=device, dtype=dtype)
    shape = (2, REQUESTS * blocks, BLOCK_SIZE, kv_heads, arguments.head_dim)
    caches = torch.randn(shape, device=device, dtype=dtype)
    table_ = torch.arange(REQUESTS * blocks, dtype=torch.int32, device=device).view(REQUESTS, blocks)
    starts = torch.arange(REQUESTS + 1, dtype=torch.int32, device=device)
    return q, *caches, starts, torch.full((REQUESTS,), context, dtype=torch.int32, device=device), table_


def measure_shared(grouped_attention: Callable, arguments: argparse.Namespace, device: torch.device) -> dict:
    """The engine's attention over caches of fewer and fewer KV heads, in turns.

    Raises:
        AssertionError: it is not what the lesson's attention gives.
    """
    context = min(arguments.context, 256) if arguments.quick else arguments.context
    scale = arguments.head_dim**-0.5
    steps, bytes_read, rounds = {}, {}, 3 if arguments.quick else 9
    for kv_heads in kv_heads_to_try(arguments.heads):
        case = paged_case(kv_heads, context, arguments, device)
        q, k_cache, v_cache = case[:3]
        keys, values = (cache[: -(-context // BLOCK_SIZE)].flatten(0, 1)[:context] for cache in (k_cache, v_cache))
        off = furthest(unified_attention(*case, scale)[:1].float(), grouped_attention(q[:1], keys, values).float())
        assert off < (1e-4 if q.dtype == torch.float32 else 2e-2), f"{kv_heads} KV heads: off by {off}"
        steps[str(kv_heads)] = partial(unified_attention, *case, scale)
        bytes_read[str(kv_heads)] = 2 * REQUESTS * context * kv_heads * arguments.head_dim * q.element_size()
    with working("decode steps, in turns"):
        seconds, rate = in_turns(steps, rounds, device), copy_bandwidth(device)
    whole, found, rows = statistics.median(seconds[str(arguments.heads)]), {}, []
    for name, moved in bytes_read.items():
        median = statistics.median(seconds[name])
        found[name] = one = {
            "mib": moved / 2**20, "less": bytes_read[str(arguments.heads)] / moved, "ms": 1e3 * median,
            "faster": whole / median, "of_bandwidth": moved / median / rate,
        }  # fmt: skip
        cells = (f"{one['mib']:,.1f}", f"{one['less']:.0f} ×", f"{one['ms']:.2f}", f"{one['faster']:.1f} ×")
        rows.append((name, *cells, f"{one['of_bandwidth']:.0%}"))
    title = f"{REQUESTS} requests, {context:,} tokens each, {arguments.heads} query heads of {arguments.head_dim}"
    columns = ("KV heads", "MiB read", "less", "ms", "faster", "of copy bandwidth")
    table(title, columns, rows, "The engine's attention on this device; the operations are the same in every row.")
    return {"context": context, "heads": arguments.heads, "by_kv_heads": found}


# ---- 3. the latent ---------------------------------------------------------------------------------------------------


def latent_case(
    shape: Mapping[str, int], context: int, dtype: torch.dtype, device: torch.device | str = "cpu"
) -> list[Tensor]:
    """One query over `context` cached tokens: q_nope, q_rope, latents, k_rope, w_uk, w_uv; weights of unit gain."""
    heads, rank = shape["heads"], shape["rank"]
    sizes = (
        (heads, shape["nope"]), (heads, shape["rope"]), (context, rank), (context, shape["rope"]),
        (heads, shape["nope"], rank), (heads, shape["v"], rank),
    )  # fmt: skip
    drawn = [torch.randn(size, dtype=torch.float64) for size in sizes]
    drawn[4:] = [weight / math.sqrt(rank) for weight in drawn[4:]]
    return [one.to(dtype).to(device) for one in drawn]


def latent_shape(name: str) -> dict[str, int]:
    """Heads and widths of a model with latent attention."""
    config = known_model(name)
    return {
        "heads": config.num_attention_heads, "rank": config.kv_lora_rank or 0, "rope": config.rotary_dim,
        "nope": config.qk_nope_head_dim, "v": config.v_head_dim,
    }  # fmt: skip


def latent_operations(shape: Mapping[str, int]) -> dict[str, int]:
    """Operations of one query for each cached token, in one layer, by form."""
    heads, rank, rope, nope, v = (shape[name] for name in ("heads", "rank", "rope", "nope", "v"))
    attended = 2 * heads * (nope + rope + v)
    return {
        "plain": 2 * rank * heads * (nope + v) + attended,
        "attended": attended,
        "absorbed": 2 * heads * (2 * rank + rope),
    }


def measure_latent(
    plain: Callable[..., Tensor],
    absorbed: Callable[..., Tensor],
    arguments: argparse.Namespace,
    device: torch.device,
) -> dict:
    """Both forms of latent attention, in DeepSeek-V2-Lite's shape: the same numbers, and their times, in turns."""
    shape, found, rows = latent_shape("DeepSeek-V2-Lite"), {}, []
    for context in track(LATENT_CONTEXTS[:1] if arguments.quick else LATENT_CONTEXTS, "attending to latents"):
        case = latent_case(shape, context, torch.float32, device)
        forms = {"plain": partial(plain, *case), "absorbed": partial(absorbed, *case)}
        off = furthest(forms["plain"](), forms["absorbed"]())
        assert off < 1e-4, f"the two forms differ by {off}"
        seconds = in_turns(forms, 3 if arguments.quick else 7, device)
        ms = {name: 1e3 * statistics.median(ones) for name, ones in seconds.items()}
        found[str(context)] = one = {**ms, "faster": ms["plain"] / ms["absorbed"], "off": off}
        cells = (f"{ms['plain']:.2f}", f"{ms['absorbed']:.2f}", f"{one['faster']:.0f} ×", f"{off:.0e}")
        rows.append((f"{context:,}", *cells))
    operations = {name: latent_operations(latent_shape(name)) for name in ("DeepSeek-V2-Lite", "DeepSeek-V3")}
    table(
        "One query, DeepSeek-V2-Lite's shape: a layer's attention, ms",
        ("cached tokens", "plain", "absorbed", "faster", "differ by"),
        rows,
    )
    rows = [
        (name, *(f"{one[form]:,}" for form in ("plain", "attended", "absorbed"))) for name, one in operations.items()
    ]
    columns = ("model", "plain", "of it attending", "absorbed")
    table("Operations of one query for each cached token, a layer", columns, rows)
    return {"contexts": found, "operations": operations}


# ---- 4. the kernels --------------------------------------------------------------------------------------------------

HEAD_CASES = ((4, 4, 64), (6, 2, 80), (8, 1, 128), (14, 2, 64), (20, 1, 16))
"""Query heads, KV heads, head dim."""
LENGTHS = (0, 1, 31, 32, 67)
LATENT_CASES = (
    {"heads": 3, "rank": 16, "rope": 16, "nope": 12, "v": 10},
    {"heads": 16, "rank": 64, "rope": 16, "nope": 32, "v": 32},
    {"heads": 20, "rank": 32, "rope": 32, "nope": 24, "v": 24},
)


def head_case(heads: int, kv_heads: int, head_dim: int, lengths: Sequence[int] = LENGTHS) -> tuple[Tensor, ...]:
    """Random q, keys, values in float16 and lengths, as `decode` takes them; slots beyond the lengths are full, too."""
    slots = max(lengths) + 5
    q = torch.randn(len(lengths), heads, head_dim).half()
    keys, values = torch.randn(2, len(lengths), slots, kv_heads, head_dim).half()
    return q, keys, values, torch.tensor(lengths, dtype=torch.int32)


def one_by_one(grouped_attention: Callable[..., Tensor], case: Sequence[Tensor]) -> Tensor:
    """The lesson's attention on each request of a `head_case`, in float64; zeros for a request without tokens."""
    q, keys, values, lengths = case
    rows = []
    for one, k, v, length in zip(q.double(), keys.double(), values.double(), lengths.tolist(), strict=True):
        rows.append(grouped_attention(one[None], k[:length], v[:length])[0] if length else torch.zeros_like(one))
    return torch.stack(rows)


def latent_batch(shape: Mapping[str, int], lengths: Sequence[int] = LENGTHS) -> tuple[Tensor, ...]:
    """Arguments of the lesson's `latent_decode`, float32: q_nope, q_rope, cache, lengths, w_uk, w_uv."""
    slots, cases = max(lengths) + 5, [latent_case(shape, max(lengths) + 5, torch.float32) for _ in lengths]
    assert all(len(case[2]) == slots for case in cases)
    q_nope, q_rope, latents, k_rope = (torch.stack([case[place] for case in cases]) for place in range(4))
    cache = torch.cat([latents, k_rope], dim=-1).contiguous()
    return q_nope, q_rope, cache, torch.tensor(lengths, dtype=torch.int32), *cases[0][4:]


def latents_one_by_one(absorbed_attention: Callable[..., Tensor], batch: Sequence[Tensor]) -> Tensor:
    """The lesson's attention on each request of a `latent_batch`, in float64; zeros for a request without tokens."""
    q_nope, q_rope, cache, lengths, w_uk, w_uv = (one.double() for one in batch)
    rows, rank = [], w_uk.shape[2]
    for index, length in enumerate(lengths.int().tolist()):
        seen = cache[index, :length].split([rank, cache.shape[2] - rank], dim=1)
        empty = q_nope.new_zeros(len(w_uv), w_uv.shape[1])
        rows.append(absorbed_attention(q_nope[index], q_rope[index], *seen, w_uk, w_uv) if length else empty)
    return torch.stack(rows)


def traced(decode: Callable[..., Tensor], *arguments: Any, **more: Any) -> KernelTrace:
    """What the kernel of one of the lesson's calls reads and writes."""
    traces: list[KernelTrace] = []
    decode(*arguments, **more, launch=lambda *call, **constants: traces.append(trace_kernel(*call, **constants)))
    return traces[0]


def verify_kernels(
    grouped_attention: Callable[..., Tensor],
    absorbed_attention: Callable[..., Tensor],
    decode: Callable[..., Tensor],
    latent_decode: Callable[..., Tensor],
    device: torch.device,
    quick: bool,
) -> dict:
    """Both kernels against float64 on shapes that nothing divides, and the bytes of keys and values that they read.

    `quick`: one shape for each of them, and the bytes of a request of one tile.

    Raises:
        AssertionError: one is wrong.
    """
    errors = {}
    for heads, kv_heads, head_dim in track(HEAD_CASES[1:2] if quick else HEAD_CASES, "verifying the grouped kernel"):
        case = head_case(heads, kv_heads, head_dim)
        found = decode(*(one.to(device) for one in case))
        words = f"{heads} query heads, {kv_heads} KV head{'s' * (kv_heads > 1)} of {head_dim}"
        errors[words] = furthest(found, one_by_one(grouped_attention, case))
    largest = show_errors("The grouped kernel", errors, 2e-3)
    errors = {}
    for shape in track(LATENT_CASES[:1] if quick else LATENT_CASES, "verifying the latent kernel"):
        batch = latent_batch(shape)
        found = latent_decode(*(one.to(device) for one in batch))
        words = f"{shape['heads']} heads, latents of {shape['rank']} + {shape['rope']}"
        errors[words] = furthest(found, latents_one_by_one(absorbed_attention, batch))
    latent = show_errors("The latent kernel", errors, 2e-5, "float32")
    counted = count_bytes(decode, latent_decode, 32 if quick else 48) if INTERPRETED else {}
    return {"largest_error": largest, "largest_latent_error": latent, "bytes": counted}


def count_bytes(decode: Callable[..., Tensor], latent_decode: Callable[..., Tensor], tokens: int) -> dict:
    """Bytes of one request's keys and values, or latents, that are read, traced: by the query heads of a program.

    Raises:
        AssertionError: a program with all heads of a group reads more than there is.
    """
    heads, lengths, found = 32, (tokens,), {}
    for kv_heads in (8, 1):
        case = head_case(heads, kv_heads, 32, lengths)
        by_heads = {}
        for mine in sorted({1, 4, heads // kv_heads}):
            trace = traced(decode, *case, heads_a_program=mine)
            by_heads[str(mine)] = sum(trace.arguments[name].bytes_read for name in ("keys", "values"))
        cached = 2 * 2 * kv_heads * 32 * sum(lengths)
        found[str(kv_heads)] = {"name": f"{kv_heads} KV head{'s' * (kv_heads > 1)} of 32", "cached": cached, **by_heads}
    batch = latent_batch({"heads": heads, "rank": 64, "rope": 16, "nope": 32, "v": 32}, lengths)
    by_heads = {
        str(rows): traced(latent_decode, *batch, rows=rows).arguments["cache"].bytes_read for rows in (16, heads)
    }
    found["latent"] = {"name": "a latent of 64 + 16", "cached": 4 * 80 * sum(lengths), **by_heads}
    shown = ("1", "4", "16", "32")
    for one in found.values():
        most = max((count for count in shown if count in one), key=int)
        assert one[most] == one["cached"], f"{one['name']}: {most} heads a program read {one[most]} bytes"
    rows = [
        (one["name"], f"{one['cached']:,}", *(f"{one[count]:,}" if count in one else "" for count in shown))
        for one in found.values()
    ]
    columns = (
        "32 query heads on",
        "bytes there",
        "read, 1 head\na program",
        *(f"{count} heads" for count in shown[1:]),
    )
    table(f"Bytes of keys and values read: a request of {lengths[0]} tokens", columns, rows)
    return found


# ---- 5. what sharing costs -------------------------------------------------------------------------------------------


def measure_pooled(pool: Pool, arguments: argparse.Namespace, device: torch.device) -> dict:
    """Held-out loss of the model, and of the model with its KV heads pooled into one, without any training after."""
    texts, length = (4, 128) if arguments.quick else (16, 256)
    tokenizer = load_tokenizer(arguments.model)
    ids = first_passages([tokenizer.encode(text[:8000]).ids for text in held_out_texts()], texts, length)
    with tempfile.TemporaryDirectory() as folder, torch.inference_mode(), working("reading held-out texts"):
        pooled = pooled_checkpoint(arguments.model, Path(folder) / "pooled", 1, pool)
        model, config = load_model(arguments.model, device, "float32")
        losses = {
            "own": decoder_loss(model, ids),
            "pooled": decoder_loss(load_model(pooled, device, "float32")[0], ids),
        }
    losses["guess"] = math.log(config.vocab_size)
    found = {"kv_heads": config.num_key_value_heads, "texts": len(ids), "tokens": length, **losses}
    rows = [
        (f"as trained, {config.num_key_value_heads} KV heads", f"{losses['own']:.2f}"),
        ("pooled into one, untrained", f"{losses['pooled']:.2f}"),
        ("guessing, every token alike", f"{losses['guess']:.2f}"),
    ]
    table(f"Loss on {len(ids)} held-out texts of {length} tokens, nats a token", ("KV heads", "loss"), rows)
    return found


def siblings_table(figures: Mapping[str, dict]) -> str:
    """The Markdown table of models that were trained alike, of the figures in attention_siblings.<machine>.json.

    Losses are compared seed by seed, since equal seeds saw the same text in the same order.
    """
    names = {
        "mha": "MHA, 8 KV heads",
        "gqa": "GQA, 2 KV heads",
        "mqa": "MQA, 1 KV head",
        "mla": "MLA, a latent of 56 + 8",
    }
    whole, rows = figures["tiny-python-mha"]["held_out_loss_of_seed"], []
    for key, words in names.items():
        one = figures[f"tiny-python-{key}"]
        losses = one["held_out_loss_of_seed"]
        above = [loss - whole[seed] for seed, loss in losses.items() if seed in whole]
        shown = ", ".join(f"{loss:.2f}" for loss in losses.values())
        worse = "" if key == "mha" else f"{statistics.mean(above):+.2f} ({min(above):+.2f} to {max(above):+.2f})"
        kept = one["cached_numbers_per_token_and_layer"]
        rows.append((words, kept, f"{one['parameters']:,}", shown, worse))
    columns = ("trained alike", "numbers kept of a token, a layer", "parameters", "loss, by seed", "above MHA")
    return markdown_table(columns, rows)


# ---- 6. break it -----------------------------------------------------------------------------------------------------


def show_ranks(kv_heads_of_rank: Callable[[int, int, int], list[int]]) -> dict:
    """Bytes of a token on one rank and on all, by ranks: the gain that replication eats.

    Raises:
        AssertionError: the lesson's rule is not the engine's.
    """
    found, rows = {}, []
    for name in DIVIDED:
        config, by_ranks = known_model(name), {}
        for tp in RANKS:
            heads = 1 if config.kv_lora_rank else config.num_key_value_heads
            held = [len(kv_heads_of_rank(rank, tp, heads)) for rank in range(tp)]
            of_head = kv_bytes_per_token(config, "bfloat16") / heads / KIB
            assert held[0] * of_head * KIB == kv_bytes_per_token(config, "bfloat16", tp), f"{name}, {tp} ranks"
            by_ranks[str(tp)] = {"rank": max(held) * of_head, "all": sum(held) * of_head}
        found[name] = by_ranks
        for key, where in (("rank", "one GPU"), ("all", "all")):
            rows.append((f"{name}, {where}", *(f"{one[key]:,.0f}" for one in by_ranks.values())))
    columns = ("KiB of a token on", *(f"{tp} GPU{'s' * (tp > 1)}" for tp in RANKS))
    kept = "Eight KV heads, four, and a latent, which counts as one: every GPU keeps it."
    table("A cache divided over GPUs", columns, rows, kept)
    return found


def run_two_ranks(
    pool: Pool, kv_heads_of_rank: Callable[[int, int, int], list[int]], arguments: argparse.Namespace
) -> dict:
    """The engine on one rank and on two, with the model's KV heads and with one: tokens, and bytes that ranks keep.

    Raises:
        AssertionError: tokens differ, or a rank keeps other than the rule says.
    """
    found, rows, own = {}, [], ModelConfig.from_pretrained(arguments.model).num_key_value_heads
    with tempfile.TemporaryDirectory() as folder, working("engines of one rank and of two"), without_info():
        pooled = pooled_checkpoint(arguments.model, Path(folder) / "pooled", 1, pool)
        for name, model, heads in (("own", arguments.model, own), ("one", pooled, 1)):
            if name == "own" and arguments.quick:
                continue
            runs = {tp: served(model, tp) for tp in (1, 2)}
            assert runs[1][0] == runs[2][0], f"{name}: two ranks say something else"
            share = {tp: [len(kv_heads_of_rank(rank, tp, heads)) / heads for rank in range(tp)] for tp in runs}
            for tp, (_, kept) in runs.items():
                assert kept == [int(part * runs[1][1][0]) for part in share[tp]], f"{name}: ranks keep {kept}"
            found[name] = one = {"one_rank": runs[1][1][0], "rank": runs[2][1][0], "all": sum(runs[2][1])}
            cells = (f"{one[key] / KIB:,.0f}" for key in ("one_rank", "rank", "all"))
            rows.append((f"{heads} KV head{'s' * (heads > 1)}", *cells, f"{one['all'] / one['one_rank']:.0f} ×"))
    columns = ("embedded model with", "one rank", "each of two", "both", "both, of one")
    table("The engine's KV cache for the same 512 tokens, KiB; the same text each time", columns, rows)
    return found


def served(model: str | Path, tp: int) -> tuple[list[list[int]], list[int]]:
    """Greedy tokens of an engine of so many ranks, and the bytes of each rank's cache."""
    llm = LLM(
        model, device="cpu", dtype="float32", max_model_len=128, num_gpu_blocks_override=32, tensor_parallel_size=tp
    )
    try:
        params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
        outputs = llm.generate(list(PROMPTS), params, use_tqdm=False)
        kept = core_of(llm).executor.collective_rpc("kv_cache_bytes")
    finally:
        llm.shutdown()
    return [list(output.outputs[0].token_ids) for output in outputs], kept


def show_padding(padded_rows: Callable[[int], int]) -> dict:
    """Rows of the matrix product that hold a query, by the size of the group."""
    found = {name: {"heads": heads, "rows": padded_rows(heads)} for name, heads in GROUPS.items()}
    rows = [(name, one["heads"], one["rows"], f"{one['heads'] / one['rows']:.0%}") for name, one in found.items()]
    columns = ("group of", "query heads", "rows of the product", "hold a query")
    table("A matrix product has 16 rows or more, and a power of two", columns, rows)
    return found


# ---- the whole lesson ------------------------------------------------------------------------------------------------


def close(found: dict, disturbance: str) -> None:
    """Print the conclusions; `disturbance` says what else kept the machine busy, if anything."""
    models, shared = found["models"]["models"], found["shared"]["by_kv_heads"]
    llama, deepseek, one = models["Llama-3-1-8B"], models["DeepSeek-V3"], shared["1"]
    ranks, two = found["ranks"]["Meta-Llama-3-70B"], found["two_ranks"]["one"]
    closing(
        f"Llama-3.1-8B keeps {llama['kib']:.0f} KiB of a token, a quarter of what 32 KV heads would take, and does "
        f"{llama['intensity']:.0f} operations a byte; DeepSeek-V3 keeps {deepseek['kib']:.0f} KiB, and does "
        f"{deepseek['intensity']:.0f}.",
        Timed(
            f"With one KV head in place of {found['shared']['heads']}, a decode step reads {one['less']:.0f} times "
            f"less, and takes {1 / one['faster']:.2f} of the time."
        ),
        f"Beyond its KV heads a model's cache is copied: 8 heads on 16 GPUs take {ranks['16']['all']:.0f} KiB a token "
        f"in place of {ranks['1']['all']:.0f}. One head on two ranks of the engine: {two['all'] / two['one_rank']:.0f} "
        "times the bytes of one.",
        disturbance=disturbance,
    )


def draw(found: dict, path: str) -> None:
    """Bytes a token against operations a byte; bytes and time of a step by KV heads; bytes by ranks."""
    with panels(path, 3) as (left, middle, right):
        for name, one in zip(MODELS, found["models"]["models"].values(), strict=True):
            colour = palette.ORANGE if one["kv_heads"] == "latent" else palette.BLUE
            left.plot([one["kib"]], [one["intensity"]], "o", color=colour)
            words = name.removeprefix("Meta-").removesuffix("-hf")
            right_half = one["kib"] > 200
            left.annotate(
                words, (one["kib"], one["intensity"]), (-6 if right_half else 6, -9), textcoords="offset points",
                ha="right" if right_half else "left", fontsize=8,
            )  # fmt: skip
        left.axhline(found["models"]["ridge"], color=palette.GREY, linewidth=1)
        left.annotate(
            f"ridge of an {GPU}", (26, found["models"]["ridge"]), (0, 4), textcoords="offset points", fontsize=8
        )
        left.set(title="Read and computed", xlabel="KiB a token", ylabel="FLOPs a byte", xscale="log", yscale="log")
        left.set(xlim=(24, 640), ylim=(0.7, 600))
        sizes = (32, 64, 128, 256, 512)
        left.set_xticks(sizes, [str(size) for size in sizes])
        left.minorticks_off()
        shared = found["shared"]["by_kv_heads"]
        places = range(len(shared))
        middle.plot(places, [1 / one["less"] for one in shared.values()], "o-", color=palette.BLUE, label="bytes")
        middle.plot(places, [1 / one["faster"] for one in shared.values()], "o-", color=palette.ORANGE, label="time")
        middle.set_xticks(places, list(shared))
        middle.set(title="A decode step", xlabel="KV heads", ylabel="of that with all", yscale="log")
        parts = (1, 4, 8, 32)
        middle.set_yticks([1 / part for part in parts], ["1", *(f"1/{part}" for part in parts[1:])])
        middle.minorticks_off()
        middle.legend(fontsize=8)
        for (name, by_ranks), colour in zip(found["ranks"].items(), palette.SERIES, strict=False):
            ranks = [int(tp) for tp in by_ranks]
            right.plot(
                ranks, [one["all"] / by_ranks["1"]["all"] for one in by_ranks.values()], "o-", color=colour, label=name
            )
        right.set_xscale("log", base=2)
        right.set_xticks(ranks, [str(tp) for tp in ranks])
        right.set(title="Kept on all GPUs", xlabel="GPUs", ylabel="of that on one", ylim=(0, None))
        right.legend(fontsize=8)


def parser(doc: str | None) -> argparse.ArgumentParser:
    """The lesson's own flags, besides the common ones; `doc` is shown by --help."""
    flags = lesson_parser(doc or "", EMBEDDED_MODEL)
    flags.add_argument("--heads", type=whole_number(1, 256), default=32, help="query heads, 1 to 256 (default: 32)")
    flags.add_argument("--head-dim", type=whole_number(8, 256), default=128, help="numbers of a head (default: 128)")
    flags.add_argument(
        "--context", type=whole_number(1, 32768), default=2048, help="tokens of each request (default: 2048)"
    )
    return flags
