"""Lesson 09's tables, its figure and its command line; the kernels' part is in `kernel_cases`.

A function `measure_*` or `show_*` prints its table and returns its figures; the callables that it
takes are the lesson's own code.
"""

from __future__ import annotations

import argparse
import math
import statistics
import tempfile
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from minivllm.config import ModelConfig
from minivllm.config.units import GIB
from minivllm.errors import MinivllmError
from minivllm.kernels.unified_attention import unified_attention
from minivllm.memory import kv_bytes_per_token
from minivllm.models.loader import load_model
from minivllm.models.tokenizer import load_tokenizer
from minivllm_lab.attention_heads.kernel_cases import latent_case
from minivllm_lab.attention_heads.pooled_heads import Pool, pooled_checkpoint
from minivllm_lab.cli import lesson_parser, whole_number
from minivllm_lab.corpus import first_passages, held_out_texts
from minivllm_lab.engines.quality import decoder_loss
from minivllm_lab.lesson import LessonCode
from minivllm_lab.pictures import palette
from minivllm_lab.pictures.figures import panels
from minivllm_lab.progress import track, working
from minivllm_lab.proof import furthest
from minivllm_lab.tables import Timed, closing, console, record_table, table
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
DEEPSEEK_V2_LITE = {"heads": 16, "rank": 512, "rope": 64, "nope": 128, "v": 128}
DIVIDED = ("Meta-Llama-3-70B", "Qwen3-30B-A3B", "DeepSeek-V3")
RANKS = (1, 2, 4, 8, 16)


# ---- 1. bytes and operations ---------------------------------------------------------------------


def show_models(cached_per_token: LessonCode, decode_flops_per_byte: LessonCode) -> dict:
    """Print the KV bytes per token of real models, as they are and with one KV head per query head,
    and their operations per byte.

    Raises:
        AssertionError: the lesson's count differs from the engine's.
    """
    records, ridge = {}, get_hardware(GPU).ridge()
    for name in MODELS:
        config = known_model(name)
        token = 2 * config.num_hidden_layers * cached_per_token(config)
        assert token == kv_bytes_per_token(config, "bfloat16"), f"{name}: the engine's count differs"
        own = 2 * config.num_hidden_layers * own_heads(config)
        records[name] = {
            "heads": config.num_attention_heads,
            "kv_heads": "latent" if config.kv_lora_rank else config.num_key_value_heads,
            "kib": token / KIB,
            "ratio": own / token,
            "intensity": decode_flops_per_byte(config),
            "chats": int(40 * GIB / token / 4096),
        }
    record_table(
        "What a token takes, and how many chats 40 GiB hold",
        records,
        "model {name} | heads {heads} | KV heads {kv_heads} | KiB a token {kib:.1f} | off by {ratio:.0f} × | "
        "operations a byte {intensity:.0f} | chats of 4,096 {chats}",
    )
    # claims.toml finds a figure by a path with dots, so names have none
    return {"models": {name.replace(".", "-"): record for name, record in records.items()}, "ridge": ridge}


def own_heads(config: ModelConfig) -> int:
    """Count the numbers that a layer would keep per token if each query head had its own key and
    value.
    """
    if config.kv_lora_rank:
        width = config.qk_nope_head_dim + config.rotary_dim + config.v_head_dim
    else:
        width = 2 * config.head_dim
    return config.num_attention_heads * width


# ---- 2. fewer KV heads ---------------------------------------------------------------------------


def check(arguments: argparse.Namespace) -> None:
    """Raise `MinivllmError` if --head-dim is not a multiple of 8."""
    if arguments.head_dim % 8:
        raise MinivllmError(f"--head-dim is {arguments.head_dim}; it must be a multiple of 8")


def paged_case(kv_heads: int, context: int, arguments: argparse.Namespace, device: torch.device) -> tuple[Tensor, ...]:
    """Return the tensors of a decode step with `REQUESTS` requests: q, k_cache, v_cache,
    query_start_loc, seq_lens, block_table.
    """
    blocks, dtype = -(-context // BLOCK_SIZE), torch.float32 if device.type == "cpu" else torch.bfloat16
    q = torch.randn(REQUESTS, arguments.heads, arguments.head_dim, device=device, dtype=dtype)
    shape = (2, REQUESTS * blocks, BLOCK_SIZE, kv_heads, arguments.head_dim)
    caches = torch.randn(shape, device=device, dtype=dtype)
    block_table = torch.arange(REQUESTS * blocks, dtype=torch.int32, device=device).view(REQUESTS, blocks)
    starts = torch.arange(REQUESTS + 1, dtype=torch.int32, device=device)
    return q, *caches, starts, torch.full((REQUESTS,), context, dtype=torch.int32, device=device), block_table


def measure_shared(grouped_attention: LessonCode, arguments: argparse.Namespace, device: torch.device) -> dict:
    """Time the engine's attention on caches with fewer and fewer KV heads, in alternating rounds.

    Raises:
        AssertionError: the result differs from the lesson's attention.
    """
    context = min(arguments.context, 256) if arguments.quick else arguments.context
    scale = arguments.head_dim**-0.5
    steps, bytes_read = {}, {}
    heads = arguments.heads  # as many KV heads, a quarter and an eighth of them where that divides evenly, and one
    for kv_heads in sorted({heads // part for part in (1, 4, 8, heads) if heads % part == 0}, reverse=True):
        case = paged_case(kv_heads, context, arguments, device)
        q, k_cache, v_cache = case[:3]
        keys, values = (cache[: -(-context // BLOCK_SIZE)].flatten(0, 1)[:context] for cache in (k_cache, v_cache))
        off = furthest(unified_attention(*case, scale)[:1].float(), grouped_attention(q[:1], keys, values).float())
        assert off < (1e-4 if q.dtype == torch.float32 else 2e-2), f"{kv_heads} KV heads: off by {off}"
        steps[str(kv_heads)] = partial(unified_attention, *case, scale)
        bytes_read[str(kv_heads)] = 2 * REQUESTS * context * kv_heads * arguments.head_dim * q.element_size()
    with working("decode steps, in turns"):
        times = in_turns(steps, 3 if arguments.quick else 9, device)
    seconds = {name: statistics.median(each) for name, each in times.items()}
    most, records = str(arguments.heads), {}
    for name, moved in bytes_read.items():
        records[name] = {
            "mib": moved / 2**20,
            "less": bytes_read[most] / moved,
            "ms": 1e3 * seconds[name],
            "faster": seconds[most] / seconds[name],
        }
    record_table(
        f"{REQUESTS} requests, {context:,} tokens each, {arguments.heads} query heads of {arguments.head_dim}",
        records,
        "KV heads {name} | MiB read {mib:,.1f} | less by {less:.0f} × | ms {ms:.2f} | faster by {faster:.1f} ×",
    )
    return {"context": context, "heads": arguments.heads, "by_kv_heads": records}


# ---- 3. the latent -------------------------------------------------------------------------------


def measure_latent(
    plain: LessonCode, absorbed: LessonCode, arguments: argparse.Namespace, device: torch.device
) -> dict:
    """Time both forms of latent attention in DeepSeek-V2-Lite's shape, alternating between them,
    and compare their results.
    """
    records = {}
    for context in track(LATENT_CONTEXTS[:1] if arguments.quick else LATENT_CONTEXTS, "attending to latents"):
        case = latent_case(DEEPSEEK_V2_LITE, context, torch.float32, device)
        forms = {"plain": partial(plain, *case), "absorbed": partial(absorbed, *case)}
        off = furthest(forms["plain"](), forms["absorbed"]())
        assert off < 1e-4, f"the two forms differ by {off}"
        times = in_turns(forms, 3 if arguments.quick else 7, device)
        ms = {name: 1e3 * statistics.median(each) for name, each in times.items()}
        records[str(context)] = {**ms, "faster": ms["plain"] / ms["absorbed"], "off": off}
    record_table(
        "One query, DeepSeek-V2-Lite's shape: a layer's attention, ms",
        {f"{int(context):,}": record for context, record in records.items()},
        "cached tokens {name} | plain {plain:.2f} | absorbed {absorbed:.2f} | faster {faster:.0f} ×",
    )
    return {"contexts": records}


# ---- 5. what sharing costs ------------------------------------------------------------------------


def measure_pooled(pool: Pool, arguments: argparse.Namespace, device: torch.device) -> dict:
    """Measure the model's held-out loss, as it is and with its KV heads pooled into one without
    further training.
    """
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
    console.print(
        f"Held-out loss, nats a token: {losses['own']:.2f} as trained, {losses['pooled']:.2f} with all KV heads "
        f"averaged into one, {losses['guess']:.2f} by guessing"
    )
    return {"kv_heads": config.num_key_value_heads, "texts": len(ids), "tokens": length, **losses}


# ---- 6. break it ---------------------------------------------------------------------------------


def show_ranks(kv_heads_of_rank: LessonCode) -> dict:
    """Show a token's KV bytes on one rank and on all ranks, by the number of ranks: replication
    undoes the gain.

    Raises:
        AssertionError: the lesson's rule is not the engine's.
    """
    records, rows = {}, []
    for name in DIVIDED:
        config = known_model(name)
        heads = 1 if config.kv_lora_rank else config.num_key_value_heads
        head_kib = kv_bytes_per_token(config, "bfloat16") / heads / KIB
        records[name] = by_ranks = {}
        for tp in RANKS:
            held = [len(kv_heads_of_rank(rank, tp, heads)) for rank in range(tp)]
            assert held[0] * head_kib * KIB == kv_bytes_per_token(config, "bfloat16", tp), f"{name}, {tp} ranks"
            by_ranks[str(tp)] = {"rank": max(held) * head_kib, "all": sum(held) * head_kib}
        for key, where in (("rank", "one GPU"), ("all", "all")):
            rows.append((f"{name}, {where}", *(f"{record[key]:,.0f}" for record in by_ranks.values())))
    columns = ("KiB of a token on", *(f"{tp} GPU{'s' * (tp > 1)}" for tp in RANKS))
    caption = "Eight KV heads, four, and a latent, which counts as one: every GPU keeps it."
    table("A cache divided over GPUs", columns, rows, caption)
    return records


# ---- the whole lesson ----------------------------------------------------------------------------


def close(figures: dict, disturbance: str) -> None:
    """Print the conclusions; `disturbance` says what else kept the machine busy, if anything."""
    llama, mqa = figures["models"]["models"]["Meta-Llama-3-70B"], figures["shared"]["by_kv_heads"]["1"]
    ranks = figures["ranks"]["Meta-Llama-3-70B"]
    closing(
        f"Llama-3-70B keeps {llama['kib']:.0f} KiB of a token. A plan that counts its query heads is off by "
        f"{llama['ratio']:.0f}.",
        Timed(
            f"With one KV head, a step reads {mqa['less']:.0f} times less, and is {mqa['faster']:.0f} times as fast."
        ),
        f"On 8 GPUs each keeps {ranks['8']['rank']:.0f} KiB of a token, and on 16 still {ranks['16']['rank']:.0f}.",
        disturbance=disturbance,
    )


def draw(figures: dict, path: str) -> None:
    """Plot how many times fewer bytes a decode step reads, and how many times faster it is."""
    shared = figures["shared"]["by_kv_heads"]
    ticks = (1, 2, 4, 8, 16, 32)
    with panels(path, 1, width=6) as (axes,):
        for key, words, colour in (("less", "fewer bytes", palette.BLUE), ("faster", "faster", palette.ORANGE)):
            axes.plot(range(len(shared)), [record[key] for record in shared.values()], "o-", color=colour, label=words)
        axes.set(
            title="A decode step, against a KV head for each head", xlabel="KV heads", ylabel="times", yscale="log"
        )
        axes.set_xticks(range(len(shared)), list(shared))
        axes.set_yticks(ticks, [str(tick) for tick in ticks])
        axes.minorticks_off()
        axes.legend()


def parser(doc: str | None) -> argparse.ArgumentParser:
    """Add the lesson's own flags to the common ones; `--help` shows `doc`."""
    flags = lesson_parser(doc)
    flags.add_argument("--heads", type=whole_number(1, 256), default=32, help="query heads, 1 to 256 (default: 32)")
    flags.add_argument("--head-dim", type=whole_number(8, 256), default=128, help="numbers per head (default: 128)")
    flags.add_argument(
        "--context", type=whole_number(1, 32768), default=2048, help="tokens of each request (default: 2048)"
    )
    return flags
