"""A calculator of how a model uses a GPU's memory.

    python -m minivllm_lab.calculator Qwen/Qwen3-8B --gpu H100 --max-model-len 32768
    python -m minivllm_lab.calculator path/to/model --gpu A100-80 --tp 2 --kv-cache-dtype fp8

The model is a local directory, a well-known model (no network needed), or any model of the Hugging
Face hub.
"""

import argparse
from collections import Counter

from minivllm.config.units import GIB
from minivllm.errors import MinivllmError
from minivllm.memory import MemoryLedger
from minivllm.memory.bytes_per_token import KV_DTYPES
from minivllm.memory.kv_layers import FullLayer
from minivllm_lab.cli import Parser, positive_int, run
from minivllm_lab.tables import console, table
from minivllm_simulate.hardware import HARDWARE
from minivllm_simulate.known_models import find_model
from minivllm_simulate.memory import StateLayer, WindowLayer, memory_ledger

KINDS = {FullLayer: "full attention", WindowLayer: "sliding windows", StateLayer: "linear attention"}


def print_ledger(name: str, ledger: MemoryLedger) -> None:
    """Print the ledger as a table, followed by what vLLM prints at start-up."""
    total = ledger.device.memory_bytes
    rows = [
        (row.name + (" (estimate)" if row.estimated else ""), f"{row.bytes / GIB:.2f}", f"{row.bytes / total:.1%}")
        for row in ledger.rows
    ]
    rows.append(("device memory", f"{total / GIB:.2f}", "100.0%"))
    table(f"{name} on {ledger.device.name}", ("what it goes to", "GiB", "share"), rows)
    console.print(f"KV cache: {cache_of(ledger)}")
    console.print(f"Available KV cache memory: {ledger.kv_bytes / GIB:.2f} GiB")
    console.print(f"GPU KV cache size: {ledger.tokens:,} tokens")
    concurrency = f"{ledger.concurrency:.2f}x"
    console.print(f"Maximum concurrency for {ledger.max_model_len:,} tokens per request: {concurrency}")


def cache_of(ledger: MemoryLedger) -> str:
    """Describe the cache that a token takes, or that a request takes if layers differ in what they
    keep per token.
    """
    if ledger.bytes_per_token is not None:
        return f"{ledger.bytes_per_token:,} bytes a token on this GPU, blocks of {ledger.block_size}"
    kinds = Counter(KINDS[type(layer)] for layer in ledger.kv.groups)
    groups = ", ".join(f"{count} of {kind}" for kind, count in kinds.items())
    blocks, size = ledger.kv.blocks_per_request(ledger.max_model_len), ledger.kv.block_bytes
    return (
        f"groups of layers that share one pool: {groups}; a request of {ledger.max_model_len:,} tokens takes "
        f"{blocks:,} blocks of {size / 2**20:.2f} MiB, {blocks * size / GIB:.2f} GiB on this GPU"
    )


def main(arguments: argparse.Namespace) -> None:
    """Print a model's ledger."""
    model = find_model(arguments.model)
    asked, limit = arguments.max_model_len or 0, model.max_position_embeddings
    if limit and asked > limit:
        raise MinivllmError(f"--max-model-len is {asked}; the model supports at most {limit} tokens")
    ledger = memory_ledger(
        model, arguments.gpu, max_model_len=arguments.max_model_len,
        gpu_memory_utilization=arguments.gpu_memory_utilization, tp=arguments.tp, kv_dtype=arguments.kv_cache_dtype,
        weight_dtype=arguments.weight_dtype, block_size=arguments.block_size,
        weights=None if arguments.weights_gib is None else int(arguments.weights_gib * GIB),
        max_num_batched_tokens=arguments.max_num_batched_tokens, max_num_seqs=arguments.max_num_seqs,
    )  # fmt: skip
    print_ledger(arguments.model, ledger)


def parser() -> argparse.ArgumentParser:
    """Return the calculator's own flags, named as in vLLM."""
    flags = Parser(prog="minivllm_lab.calculator", description=__doc__)
    flags.add_argument("model", help="a model directory, a well-known model or a name on the hub")
    add_server_flags(flags)
    flags.set_defaults(gpu_memory_utilization=0.92, max_num_batched_tokens=8192, max_num_seqs=256)
    flags.add_argument("--weight-dtype", default="auto")
    flags.add_argument("--weights-gib", type=float, help="size of the weights on one GPU, if they cannot be counted")
    flags.add_argument("--block-size", type=int, default=16)
    return flags


def add_server_flags(flags: argparse.ArgumentParser) -> None:
    """Add vLLM's flags that decide how a server uses its GPUs' memory; most are None if left out."""
    flags.add_argument("--gpu", default="H100", help=f"one of {', '.join(HARDWARE)} (default: H100)")
    flags.add_argument("--tp", type=positive_int, default=1, help="GPUs that share one copy of the model")
    flags.add_argument("--max-model-len", type=positive_int, help="longest request (default: the model's own limit)")
    flags.add_argument("--max-num-seqs", type=positive_int)
    flags.add_argument("--max-num-batched-tokens", type=positive_int)
    flags.add_argument("--gpu-memory-utilization", type=float)
    flags.add_argument("--kv-cache-dtype", default="auto", help=f"one of {', '.join(KV_DTYPES)}")


if __name__ == "__main__":
    run(main, parser())
