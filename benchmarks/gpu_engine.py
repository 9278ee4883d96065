"""Measure the engine on a GPU: decode steps against what they must read, prefills against what they
must compute, and the start.

    uv run python benchmarks/gpu_engine.py                  # the shape of Llama-3.1-8B, random weights, bf16
    uv run python benchmarks/gpu_engine.py --shape qwen3-0.6b
    uv run python benchmarks/gpu_engine.py --page           # also into PERFORMANCE.md
    uv run python benchmarks/gpu_engine.py --model FOLDER --device cpu --quick

Two engines run in one process and take turns: one launches a step before the previous step's tokens
are on the host, the other waits for them (`async_scheduling`). A decode step's time is the
difference between answers of 96 and of 32 tokens to the same prompts, divided by 64; the median of
the rounds counts. The floor of a step is the time to read its weights, keys and values at the
measured bandwidth of a copy. A prefill is an answer of one token; its operations are those of the
matmuls and of attention. Then random requests are served, and the kernels that are compiled
meanwhile are counted: each would delay its request by a second. The tables are followed by one line
of JSON, which also goes to benchmarks/results/gpu_engine.<the GPU's name>.json (not with --quick,
unless --json names a file). The script needs torch, triton, transformers, numpy and rich, and 50 GB
on the GPU.
"""

import argparse
import json
import random
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from minivllm.config import ModelConfig
from minivllm.entrypoints.llm import LLM
from minivllm.platforms.device import pick_device
from minivllm.platforms.triton_utils import triton
from minivllm.sampling_params import SamplingParams
from minivllm_lab.cli import Parser, positive_int, run
from minivllm_lab.device_rates import copy_bandwidth, matmul_rate
from minivllm_lab.engines.inside import runner_of
from minivllm_lab.marks import put_between_marks
from minivllm_lab.progress import track
from minivllm_lab.results import ensure_writable, read_record, record, report
from minivllm_lab.tables import console, markdown_table, table
from minivllm_simulate.memory import parameter_groups

RESULTS = Path(__file__).resolve().parent / "results"
PERFORMANCE = RESULTS.parent / "PERFORMANCE.md"
LLAMA_8B = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 128256, "hidden_size": 4096,
    "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
    "head_dim": 128, "max_position_embeddings": 131072, "rms_norm_eps": 1e-5, "rope_theta": 500000.0,
    "tie_word_embeddings": False, "attention_bias": False, "hidden_act": "silu", "torch_dtype": "bfloat16",
    "bos_token_id": 128000, "eos_token_id": 128001,
}  # fmt: skip
QWEN3_06B = {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "vocab_size": 151936, "hidden_size": 1024,
    "intermediate_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 16, "num_key_value_heads": 8,
    "head_dim": 128, "max_position_embeddings": 40960, "rms_norm_eps": 1e-6, "rope_theta": 1000000.0,
    "tie_word_embeddings": True, "attention_bias": False, "hidden_act": "silu", "torch_dtype": "bfloat16",
    "bos_token_id": 151643, "eos_token_id": 151645,
}  # fmt: skip
SHAPES = {"llama-3.1-8b": ("Llama-3.1-8B", LLAMA_8B), "qwen3-0.6b": ("Qwen3-0.6B", QWEN3_06B)}
"""Name of the flag to the model's name and its config."""
AHEAD, WAITING = "ahead", "waiting"
DECODES = ((1, 128), (1, 4096), (8, 1024), (64, 1024), (256, 256))
PREFILLS = ((1, 512), (1, 8192), (8, 1024))
SHORT, LONG = 32, 96
Table = tuple[tuple[str, ...], Sequence[tuple[object, ...]]]
BLOCKS = 6500
"""Of the cache, 16 tokens each: enough for all requests of a case at once."""


def engines(model: str, device: str, quick: bool) -> tuple[dict[str, LLM], list[float]]:
    """Start both engines; return them, and the seconds that each took to start. The first one
    compiles the kernels.
    """
    found, seconds = {}, []
    for name in (AHEAD, WAITING):
        start = time.perf_counter()
        found[name] = LLM(
            model,
            device=device,
            load_format="dummy",
            max_model_len=256 if quick else 8192 + 128,
            max_num_seqs=8 if quick else 256,
            num_gpu_blocks_override=200 if quick else BLOCKS,
            enable_prefix_caching=False,
            skip_tokenizer_init=True,
            async_scheduling=name == AHEAD,
        )
        seconds.append(round(time.perf_counter() - start, 1))
    return found, seconds


def serve(llm: LLM, prompts: list[list[int]], answer: int, temperature: float = 0.0) -> float:
    """Return the seconds it takes to answer these prompts with `answer` tokens each."""
    params = SamplingParams(temperature=temperature, max_tokens=answer, ignore_eos=True, seed=0)
    start = time.perf_counter()
    llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)
    return time.perf_counter() - start


def prompts_of(count: int, length: int, vocab_size: int, draw: random.Random) -> list[list[int]]:
    """Return `count` random prompts of `length` tokens."""
    return [[draw.randrange(1, vocab_size) for _ in range(length)] for _ in range(count)]


def numbers_read(config: ModelConfig) -> int:
    """Count the weights that a step reads: all of them, except an embedding that is not the head as
    well, of which it reads only a few rows.
    """
    groups = parameter_groups(config)
    return sum(groups.values()) - (groups["embedding"] if groups["head"] else 0)


def decode(llms: dict[str, LLM], requests: int, prompt: int, bandwidth: float, rounds: int) -> dict[str, Any]:
    """Measure one row: milliseconds per decode step of each engine, and the floor in the middle of
    the answer.
    """
    config = runner_of(llms[AHEAD]).config
    draw, steps = random.Random(0), {name: [] for name in llms}
    for _ in range(rounds):
        prompts = prompts_of(requests, prompt, config.vocab_size, draw)
        for name, llm in llms.items():
            longer = serve(llm, prompts, LONG) - serve(llm, prompts, SHORT)
            steps[name].append(longer / (LONG - SHORT))
    keys = requests * (prompt + (SHORT + LONG) // 2)
    itemsize = runner_of(llms[AHEAD]).dtype.itemsize
    per_token = 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim
    floor = itemsize * (numbers_read(config) + keys * per_token) / bandwidth
    took = {name: statistics.median(seconds) for name, seconds in steps.items()}
    return {
        "requests": requests,
        "prompt": prompt,
        **{f"{name}_ms": round(1e3 * seconds, 3) for name, seconds in took.items()},
        "floor_ms": round(1e3 * floor, 3),
        "share_of_floor": round(floor / took[AHEAD], 3),
        "tokens_per_s": round(requests / took[AHEAD]),
        "gain": round(statistics.median(b / a for a, b in zip(*steps.values(), strict=True)), 3),
    }


def prefill(llm: LLM, requests: int, prompt: int, rounds: int) -> dict[str, Any]:
    """Measure one row: milliseconds until all requests have their first token, and operations per
    second.
    """
    config = runner_of(llm).config
    head = config.vocab_size * config.hidden_size
    pairs = requests * prompt * (prompt + 1) // 2
    attention = 4 * config.head_dim * config.num_attention_heads * config.num_hidden_layers * pairs
    draw = random.Random(1)
    seconds = statistics.median(
        serve(llm, prompts_of(requests, prompt, config.vocab_size, draw), 1) for _ in range(rounds)
    )
    operations = 2 * (numbers_read(config) - head) * requests * prompt + attention + 2 * head * requests
    return {
        "requests": requests,
        "prompt": prompt,
        "ms": round(1e3 * seconds, 1),
        "tokens_per_s": round(requests * prompt / seconds),
        "tflops": round(operations / seconds / 1e12, 1),
    }


@contextmanager
def kernels_compiled() -> Iterator[list[str]]:
    """Yield a list that collects the name of each kernel when Triton compiles it, or loads it for
    the first time.
    """
    names: list[str] = []

    def note(**launch: Any) -> bool:
        names.append(launch["fn"].name)
        return False

    before, triton.knobs.runtime.jit_cache_hook = triton.knobs.runtime.jit_cache_hook, note
    try:
        yield names
    finally:
        triton.knobs.runtime.jit_cache_hook = before


def compiled_later(llms: dict[str, LLM], quick: bool) -> list[str]:
    """List the kernels that are compiled while random requests are served."""
    draw, vocab_size = random.Random(2), runner_of(llms[AHEAD]).config.vocab_size
    with kernels_compiled() as names:
        for _ in range(3 if quick else 20):
            count, longest = draw.choice([1, 3, 7]), draw.choice([5, 60] if quick else [5, 100, 900, 4000])
            prompts = [one for _ in range(count) for one in prompts_of(1, draw.randint(1, longest), vocab_size, draw)]
            for llm in llms.values():
                serve(llm, prompts, draw.randint(1, 12), draw.choice([0.0, 1.0]))
    return names


def measured(arguments: argparse.Namespace) -> dict[str, Any]:
    """Run everything and return the record."""
    device = pick_device(arguments.device)
    rounds = arguments.rounds or (1 if arguments.quick else 3)
    name, config = SHAPES[arguments.shape]
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(config))
        llms, seconds = engines(arguments.model or folder, device.type, arguments.quick)
    bandwidth = copy_bandwidth(device)
    dtype = str(runner_of(llms[AHEAD]).dtype).removeprefix("torch.")
    cases = ((1, 16), (8, 16)) if arguments.quick else DECODES
    figures = {
        "model": arguments.model or f"the shape of {name}",
        "dtype": dtype,
        "rounds": rounds,
        "copy_gb_per_s": round(bandwidth / 1e9, 1),
        "matmul_tflops": round(matmul_rate(device, dtype, arguments.quick) / 1e12, 1),
        "start_seconds": seconds,
        "decode": [decode(llms, *case, bandwidth, rounds) for case in track(cases, "decoding")],
        "prefill": [
            prefill(llms[AHEAD], *case, rounds)
            for case in track(((1, 128),) if arguments.quick else PREFILLS, "prefilling")
        ],
        "compiled_later": compiled_later(llms, arguments.quick),
    }
    return record("gpu_engine", figures)


def decode_table(figures: dict[str, Any]) -> Table:
    """Return the columns and rows of the decode table."""
    columns = ("requests", "prompt", "waiting, ms", "ahead, ms", "gain", "floor, ms", "floor ÷ ahead", "tokens/s")
    rows = [
        (
            row["requests"], f"{row['prompt']:,}", f"{row['waiting_ms']:.2f}", f"{row['ahead_ms']:.2f}",
            f"{row['gain']:.2f} ×", f"{row['floor_ms']:.2f}", f"{row['share_of_floor']:.0%}",
            f"{row['tokens_per_s']:,}",
        )
        for row in figures["decode"]
    ]  # fmt: skip
    return columns, rows


def prefill_table(figures: dict[str, Any]) -> Table:
    """Return the columns and rows of the prefill table."""
    rows = [
        (row["requests"], f"{row['prompt']:,}", f"{row['ms']:.1f}", f"{row['tokens_per_s']:,}", f"{row['tflops']:.0f}")
        for row in figures["prefill"]
    ]
    return ("requests", "prompt", "ms", "tokens/s", "TFLOP/s"), rows


def kernel_table(figures: dict[str, Any]) -> Table:
    """Return the columns and rows of the attention figures from `benchmarks/kernels.py`."""
    rows: list[tuple[object, ...]] = [
        (f"{row['case']}, {row['kv']}", f"{row['engine_us']:.0f}", f"{row['gb_per_s']:,.0f} GB/s, of a copy's",
         f"{row['share_of_copy']:.0%}")
        for row in figures["decode"]
    ]  # fmt: skip
    whole = figures["prefill"]
    best = f"{whole['tflops']:.0f} TFLOP/s, of torch's {whole['best']}"
    rows.append((f"{whole['case']}, bf16", f"{1e3 * whole['engine_ms']:,.0f}", best, f"{whole['share_of_best']:.0%}"))
    return ("attention, 32 heads on 8, d = 128", "µs", "rate", "share"), rows


def markdown(found: dict[str, Any], kernels: dict[str, Any]) -> str:
    """Return PERFORMANCE.md's section on the GPU."""
    figures, where = found["figures"], found["machine"]
    start, again = figures["start_seconds"]
    versions = where["versions"]
    return (
        f"{markdown_table(*decode_table(figures))}\n\n{markdown_table(*prefill_table(figures))}\n\n"
        f"{markdown_table(*kernel_table(kernels['figures']))}\n\n"
        f"Measured by `benchmarks/gpu_engine.py` and `benchmarks/kernels.py` on one {where['gpu']}: torch "
        f"{versions['torch']}, Triton {versions['triton']}; a copy runs at {figures['copy_gb_per_s']:,.0f} GB/s, a "
        f"matmul in {figures['dtype']} at {figures['matmul_tflops']:.0f} TFLOP/s; medians of "
        f"{figures['rounds']} rounds. The first engine started in {start:.0f} s, compiling kernels; the second, which "
        f"found them compiled, in {again:.0f} s. While random requests were served, "
        f"{len(figures['compiled_later']) or 'no'} kernels were compiled."
    )


def show(figures: dict[str, Any]) -> None:
    """Print the tables."""
    table(f"A decode step; {figures['model']}, {figures['dtype']}", *decode_table(figures))
    table("Prefill, until the first token", *prefill_table(figures))
    start, again = figures["start_seconds"]
    console.print(
        f"started in {start} s, and with kernels already compiled in {again} s; a copy runs at "
        f"{figures['copy_gb_per_s']:,} GB/s, a matmul at {figures['matmul_tflops']:,} TFLOP/s; kernels "
        f"compiled while random requests were served: {len(figures['compiled_later'])}"
    )


def _results_of(device_name: str) -> Path:
    device = pick_device(device_name)
    name = "-".join(torch.cuda.get_device_name(device).lower().split()) if device.type == "cuda" else "cpu"
    return RESULTS / f"gpu_engine.{name}.json"


def main(arguments: argparse.Namespace) -> None:
    """Measure, or read an earlier run; print the tables and save the record."""
    path = arguments.json or (None if arguments.quick or arguments.source else _results_of(arguments.device))
    if path:
        ensure_writable(path)
    found = read_record(arguments.source, "gpu_engine") if arguments.source else measured(arguments)
    show(found["figures"])
    report(found, path)
    if arguments.page:
        source = str(arguments.source or path)
        kernels = read_record(source.replace("gpu_engine.", "kernels."), "kernels")
        PERFORMANCE.write_text(put_between_marks(PERFORMANCE.read_text(), "gpu", markdown(found, kernels)))


def parser() -> argparse.ArgumentParser:
    flags = Parser(description=__doc__)
    flags.add_argument(
        "--device", choices=("auto", "cpu", "cuda"), default="cuda", help="device to run on (default: cuda)"
    )
    flags.add_argument("--shape", choices=SHAPES, default="llama-3.1-8b", help="the model's shape")
    flags.add_argument("--model", metavar="FOLDER", help="another model's shape (its config.json)")
    flags.add_argument("--rounds", type=positive_int, help="rounds for each engine (default: 3, quick: 1)")
    flags.add_argument("--quick", action="store_true", help="a few short requests; writes no file")
    flags.add_argument("--json", metavar="FILE", help="write the figures to FILE instead")
    flags.add_argument("--from", dest="source", metavar="FILE", help="show an earlier run instead of measuring")
    flags.add_argument("--page", action="store_true", help="write the tables into PERFORMANCE.md")
    return flags


if __name__ == "__main__":
    run(main, parser())
