"""Lesson 10's measurements of what the pieces of a prompt cost, and of how many tokens are free."""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from minivllm.config import CacheConfig, ModelConfig
from minivllm.kernels.unified_attention import unified_attention
from minivllm_lab.chunked_prefill.kernel_cases import BLOCK_SIZE, mixed_case
from minivllm_lab.engines.inside import runner_of
from minivllm_lab.engines.recording import bare_engine, own_clock, record_run
from minivllm_lab.lesson import LessonCode
from minivllm_lab.tables import console, record_table
from minivllm_lab.timing import in_turns
from minivllm_simulate.memory import num_parameters


@contextmanager
def one_thread() -> Iterator[None]:
    """Run torch on one thread inside the block, where other work on the machine disturbs timings
    less.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def measure_keys_read_again(keys_read_again: LessonCode, arguments: argparse.Namespace) -> dict[str, Any]:
    """Measure a prompt for several chunk sizes: the keys that are read again, the time of
    attention, and the time of all steps.

    Raises:
        AssertionError: the engine's steps read a different number of keys than the formula says.
    """
    prompt, rounds = (512, 1) if arguments.quick else (1920, 3)
    chunks = [chunk for chunk in (prompt, 512, 256, 128, 64, 32) if chunk <= prompt]
    blocks = CacheConfig(block_size=BLOCK_SIZE, num_gpu_blocks=200, enable_prefix_caching=False)
    engines = {
        chunk: bare_engine(
            arguments.model, arguments.device, blocks, dtype="float32", max_model_len=2048, max_num_seqs=1,
            max_num_batched_tokens=chunk,
        )
        for chunk in chunks
    }  # fmt: skip
    cases = {chunk: _chunks(prompt, chunk, arguments.device) for chunk in chunks}
    calls = {str(chunk): lambda case=cases[chunk]: [_attend(each) for each in case] for chunk in chunks}
    steps: dict[int, list[float]] = {chunk: [] for chunk in chunks}
    with one_thread():
        attention = in_turns(calls, rounds, arguments.device, own_clock(engines[prompt]))
        for turn in range(rounds):
            for chunk, core in engines.items():
                run = record_run(core, [(prompt, 1)], warm_up=turn == 0)
                counted = sum(step.shape.num_keys - step.shape.num_tokens for step in run.steps)
                assert counted == keys_read_again(prompt, chunk), f"chunks of {chunk}: {counted:,} keys are re-read"
                steps[chunk].append(run.seconds)
    seconds = {chunk: (statistics.median(attention[str(chunk)]), statistics.median(steps[chunk])) for chunk in chunks}
    records = {}
    for chunk, (attending, whole) in seconds.items():
        records[str(chunk)] = {
            "chunks": -(-prompt // chunk),
            "again": keys_read_again(prompt, chunk),
            "attention_ms": 1e3 * attending,
            "steps_ms": 1e3 * whole,
            "attention": attending / seconds[prompt][0],
            "steps": whole / seconds[prompt][1],
        }
    shown = {
        name: {**each, "share": each["again"] / prompt, "seconds": seconds[int(name)]} for name, each in records.items()
    }
    record_table(
        f"A prompt of {prompt:,} tokens in pieces",
        shown,
        "chunk {name} | chunks {chunks} | again {again:,} | / prompt {share:.1f} | attention {seconds[0]:ms} | "
        "{attention:.2f} × | steps {seconds[1]:ms} | {steps:.2f} ×",
        "Again: keys that a layer re-reads. ms of one layer's attention alone, and of all steps; one thread.",
    )
    return {"prompt": prompt, "chunks": records}


def _attend(case: Mapping[str, Tensor]) -> Tensor:
    """Run the engine's attention on a `mixed_case`."""
    layout = case["starts"], case["seq_lens"], case["block_table"]
    return unified_attention(case["q"], *case["caches"], *layout, case["q"].shape[2] ** -0.5, out=case["out"])


def _chunks(prompt: int, chunk: int, device: torch.device) -> list[dict[str, Tensor]]:
    """Return the attention arguments for each chunk of a prompt, all on one cache."""
    whole = mixed_case([prompt], [prompt], 8, 2, 32, torch.float32)
    cases = []
    for start in range(0, prompt, chunk):
        end = min(start + chunk, prompt)
        case = whole | {
            "q": whole["q"][start:end],
            "out": whole["out"][start:end],
            "starts": torch.tensor([0, end - start], dtype=torch.int32),
            "seq_lens": torch.tensor([end], dtype=torch.int32),
        }
        cases.append({name: tensor.to(device) for name, tensor in case.items()})
    return cases


# ---- how many tokens are free ---------------------------------------------------------------------

LARGE = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 256, "hidden_size": 2048,
    "intermediate_size": 8192, "num_hidden_layers": 2, "num_attention_heads": 16, "num_key_value_heads": 4,
    "max_position_embeddings": 1024, "rms_norm_eps": 1e-5, "tie_word_embeddings": True, "dtype": "float32",
}  # fmt: skip
"""A model whose weights, 487 MB, fit into no cache, so that each step reads them from memory."""
QUICK = {"hidden_size": 512, "intermediate_size": 2048}
"""A smaller model for `--quick`: the steps are the same, but its knee is another."""
SIZES = (1, 2, 4, 8, 16, 32, 64, 128)
FEW, MANY, ROWS = 4, 32, 256


def measure_knee(knee: LessonCode, arguments: argparse.Namespace) -> dict[str, Any]:
    """Time steps of several sizes on a model larger than any cache, and compare the measured knee
    with the predicted one.

    The prediction uses two matmul rates only: operations per second with many rows, and bytes per
    second with one row. The medians over all rounds count; the spread comes from repeating the
    calculation for each round.
    """
    settings = LARGE | QUICK if arguments.quick else LARGE
    config, turns = ModelConfig.from_dict(settings), _turns_of_steps(settings, arguments)
    numbers = config.intermediate_size * config.hidden_size
    parameters = num_parameters(config) - config.vocab_size * config.hidden_size

    def knees(seconds: Mapping[str, float]) -> dict[str, float]:
        flops, bandwidth = 2 * ROWS * numbers / seconds["rows"], 4 * parameters / seconds["row"]
        foretold, measured = knee(flops, bandwidth, 4), sweep_knee({size: seconds[str(size)] for size in SIZES})
        off = foretold / measured - 1
        return {"flops": flops, "bandwidth": bandwidth, "foretold": foretold, "found": measured, "off": off}

    seconds = {name: statistics.median(times) for name, times in turns.items()}
    result = knees(seconds)
    offs = [knees(dict(zip(turns, times, strict=True)))["off"] for times in zip(*turns.values(), strict=True)]
    times = {size: seconds[str(size)] for size in SIZES}
    record_table(
        "A step by its tokens",
        {size: {"step": time, "token": time / size, "of": time / times[1]} for size, time in times.items()},
        "tokens {name} | ms {step:ms} | ms a token {token:ms} | of one token {of:.2f} ×",
        f"{parameters / 1e6:.0f} million parameters, {4 * parameters / 1e6:.0f} MB, one thread. Matmuls alone: "
        f"{result['flops'] / 1e9:.0f} billion operations a second with {ROWS} rows, "
        f"{result['bandwidth'] / 1e9:.1f} GB/s with one.",
    )
    console.print(
        f"The knee: {result['foretold']:.1f} tokens predicted, {result['found']:.1f} measured ({result['off']:+.0%}; "
        f"from turn to turn {min(offs):+.0%} to {max(offs):+.0%})."
    )
    steps = {str(size): 1e3 * time for size, time in times.items()}
    return {"steps_ms": steps, "megabytes": 4 * parameters / 1e6, **result, "least": min(offs), "most": max(offs)}


def _turns_of_steps(settings: Mapping[str, Any], arguments: argparse.Namespace) -> dict[str, list[float]]:
    """Time steps of several sizes, all layers' matmuls with one row, and one matmul with many rows,
    in alternating rounds.

    Because they alternate, a shared machine's changing memory speed affects all of them equally.
    Each token is a request of its own, because only a prompt's last token goes through all of the
    last layer.
    """
    device = arguments.device
    with tempfile.TemporaryDirectory() as folder, one_thread():
        (Path(folder) / "config.json").write_text(json.dumps(settings))
        blocks = CacheConfig(block_size=BLOCK_SIZE, num_gpu_blocks=2 * SIZES[-1], enable_prefix_caching=False)
        sizes = {"max_model_len": 256, "max_num_seqs": SIZES[-1], "max_num_batched_tokens": SIZES[-1]}
        core = bare_engine(folder, device, blocks, load_format="dummy", dtype="float32", **sizes)
        model: Any = runner_of(core).model
        x = torch.randn(ROWS, settings["intermediate_size"], device=device)

        def one_row() -> None:
            for layer in model.layers:
                for matmul in (layer.self_attn.qkv_proj, layer.self_attn.o_proj, layer.mlp.gate_up_proj):
                    matmul(x[:1, : settings["hidden_size"]].contiguous())
                layer.mlp.down_proj(x[:1])

        calls: dict[str, Callable[[], object]] = {"row": one_row, "rows": lambda: model.layers[0].mlp.down_proj(x)}
        calls |= {str(size): partial(record_run, core, [(1, 1)] * size, warm_up=False) for size in SIZES}
        return in_turns(calls, 1 if arguments.quick else 7, device, own_clock(core))


def sweep_knee(seconds: Mapping[int, float]) -> float:
    """Return the knee of a sweep over step sizes: the time of a small step divided by the time that
    each token adds to a large one.

    The former is the median over the steps of up to `FEW` tokens. The latter is the slope of a line
    through the steps of at least `MANY` tokens, fitted by least squares on relative errors; its
    intercept does not matter.
    """
    few = statistics.median(time for size, time in seconds.items() if size <= FEW)
    large = [size for size in seconds if size >= MANY]
    relative = torch.tensor([[1 / seconds[size], size / seconds[size]] for size in large], dtype=torch.float64)
    _, slope = torch.linalg.lstsq(relative, torch.ones(len(large), 1, dtype=torch.float64)).solution.flatten().tolist()
    return few / slope
