"""Measure the parts of an engine's step: schedule, prepare, forward (attention separately), head,
sample, update, text.

    uv run python benchmarks/steps.py
    uv run python benchmarks/steps.py --dtype bfloat16 --requests 16
    uv run python benchmarks/steps.py --ledger    # what each optimisation gained, into PERFORMANCE.md
    uv run python benchmarks/steps.py --switch    # the small ones, switched off and on from step to step
    uv run python benchmarks/steps.py --switch --requests 1    # of one request: what its recording gains

The work is that of `benchmarks/peers.py`: prompts and outputs of 16 to 256 tokens, greedy, all
requests at once. Every part is timed by the wall clock in every step; the table shows the mean step
of the fastest of several runs. It is followed by one line of JSON. The ledger runs the engine as it
is beside variants of it, each in a process of its own, in turns: without one optimisation, or with
one that was tried and rejected. `--switch` compares what can be switched while the engine runs:
each decode step of one engine runs with another variant, so that even a busy machine shows
differences of a few per cent. There, a variant's figure is the median of its step's time divided by
that of the engine as it is, a few steps before or after; processor time does not count the
machine's other work.
"""

import argparse
import importlib
import json
import os
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from peer_models import requests_of
from processors import with_others

from minivllm.config import EMBEDDED_MODEL
from minivllm.engine.arg_utils import EngineArgs
from minivllm.engine.llm_engine import LLMEngine
from minivllm.errors import MinivllmError
from minivllm.models.decoder import Decoder
from minivllm.models.linear import Linear, UnquantizedLinearMethod
from minivllm.sampling_params import RequestOutputKind, SamplingParams
from minivllm.worker.paged_attention import PagedAttention
from minivllm_lab.cli import benchmark_parser, positive_int, run
from minivllm_lab.engines.inside import core_of, runner_of
from minivllm_lab.marks import put_between_marks
from minivllm_lab.progress import track
from minivllm_lab.results import machine, record, report
from minivllm_lab.tables import markdown_table, table

PERFORMANCE = Path(__file__).resolve().parent / "PERFORMANCE.md"
PARTS = ("schedule", "prepare", "attention", "rest of forward", "head", "sample", "update", "text", "between")


@dataclass(frozen=True)
class Variant:
    """A variant of the engine with one thing replaced: a `patch` (module, name, value), or an
    environment variable.
    """

    title: str
    patch: tuple[str, str, Any] | None = None
    environment: tuple[str, str] | None = None


class OneDNNLinearMethod(UnquantizedLinearMethod):
    """A linear method whose weight oneDNN packed once; it computes what `F.linear` does."""

    def __init__(self, linear: Linear) -> None:
        self.packed = torch.ops.mkldnn._reorder_linear_weight(linear.weight.detach(), None)
        self.bias = linear.bias

    def apply(self, linear: Linear, x: torch.Tensor) -> torch.Tensor:
        """Map [rows, in] to [rows, out]."""
        return torch.ops.mkldnn._linear_pointwise(x, self.packed, self.bias, "none", [], "")


def pack_for_onednn(model: Decoder) -> None:
    """Pack all linears for oneDNN, in place of `process_weights_after_loading`."""
    for module in model.modules():
        if isinstance(module, Linear):
            module.method = OneDNNLinearMethod(module)


RUNNER = "minivllm.worker.model_runner"
AS_IT_IS = Variant("as it is")
SWITCHED = [
    Variant("without recordings", ("minivllm.worker.cuda_graphs", "padded_size", lambda num_rows, sizes: None)),
    Variant("torch's norms, gates and rotations", ("minivllm.kernels.elementwise", "has_numba", lambda: False)),
    Variant("norms and rotations on one thread", ("minivllm.kernels.cpu.elementwise_calls", "TOKENS", 1 << 30)),
    Variant("torch's writes of caches", ("minivllm.kernels.cpu.cache_calls", "has_numba", lambda: False)),
]
KEPT = [
    Variant("without packed linears", (RUNNER, "process_weights_after_loading", lambda model: None)),
    Variant("without compiled attention", ("minivllm.kernels.cpu.attention_calls", "has_numba", lambda: False)),
    Variant("without one-pass norms and rotations", ("minivllm.kernels.elementwise", "has_numba", lambda: False)),
    Variant("without threads for them", ("minivllm.kernels.cpu.elementwise_calls", "TOKENS", 1 << 30)),
    Variant("without keeping freed memory", ("minivllm.worker.worker", "keep_freed_memory", lambda: None)),
]
REJECTED = [
    Variant("linears that oneDNN packs", (RUNNER, "process_weights_after_loading", pack_for_onednn)),
    Variant("threads that sleep between operators", environment=("OMP_WAIT_POLICY", "passive")),
    Variant("one thread", environment=("OMP_NUM_THREADS", "1")),
]
LEDGER = (AS_IT_IS, *KEPT, *REJECTED)
VARIANTS = {variant.title: variant for variant in (*LEDGER, *SWITCHED)}


def check_environment(variant: Variant) -> None:
    """Raise a `MinivllmError` unless this process was started with the variant's variable set."""
    if variant.environment and os.environ.get(variant.environment[0]) != variant.environment[1]:
        raise MinivllmError(f"start this with {'='.join(variant.environment)}: the variant {variant.title!r} needs it")


def watched_methods(engine: LLMEngine) -> list[tuple[str, object, str]]:
    """List (part, object, method) for everything that a step consists of, including methods that
    call others on the list.
    """
    scheduler, runner = core_of(engine).scheduler, runner_of(engine)
    return [
        ("schedule", scheduler, "schedule"),
        ("prepare", runner.batch, "update"),
        ("prepare", runner, "prepare_inputs"),
        ("attention", PagedAttention, "attend"),
        ("rest of forward", runner, "forward"),
        ("head", runner.model, "compute_logits"),
        ("sample", runner, "sample"),
        ("update", scheduler, "update_from_output"),
        ("text", engine.output_processor, "process_outputs"),
    ]


class Stopwatch:
    """A stopwatch that counts seconds by part. Time in a nested part is not counted in the outer
    one.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self.clock = clock
        self.seconds: dict[str, float] = defaultdict(float)
        self._inside: list[float] = []

    def watch(self, part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap the function so that its time is counted as `part`."""

        def timed(*arguments: Any, **named: Any) -> Any:
            self._inside.append(0.0)
            start = self.clock()
            result = function(*arguments, **named)
            passed = self.clock() - start
            self.seconds[part] += passed - self._inside.pop()
            if self._inside:
                self._inside[-1] += passed
            return result

        return timed


def make_engine(arguments: argparse.Namespace) -> LLMEngine:
    """Return the engine that all variants change."""
    dtypes: Any = {"dtype": arguments.dtype, "kv_cache_dtype": arguments.kv_cache_dtype}
    limits: Any = {"max_model_len": 1024, "max_num_seqs": 256, "max_num_batched_tokens": 2048}
    return LLMEngine(EngineArgs(model=EMBEDDED_MODEL, device="cpu", enable_prefix_caching=False, **dtypes, **limits))


def add_requests(engine: LLMEngine, requests: list[dict]) -> None:
    """Add each request, greedy, with its prompt and number of output tokens; text is made at the
    end, as in `LLM.generate`.
    """
    for index, one in enumerate(requests):
        params = SamplingParams(
            temperature=0.0, max_tokens=one["output"], ignore_eos=True, output_kind=RequestOutputKind.FINAL_ONLY
        )
        engine.add_request(str(index), {"prompt_token_ids": one["prompt"]}, params)


def run_once(engine: LLMEngine, requests: list[dict]) -> tuple[dict[str, float], int]:
    """Serve these requests; return the seconds by part, and the number of steps."""
    watch, steps = Stopwatch(), 0
    add_requests(engine, requests)
    with ExitStack() as patches:
        for part, owner, name in watched_methods(engine):
            patches.enter_context(mock.patch.object(owner, name, watch.watch(part, getattr(owner, name))))
        step = watch.watch("between", engine.step)
        while engine.has_unfinished_requests():
            step()
            steps += 1
    return dict(watch.seconds), steps


def figures_of(variant: Variant, arguments: argparse.Namespace) -> dict[str, Any]:
    """Run the variant a few times; return the fastest run's milliseconds by part of a mean step,
    and its tokens per second.
    """
    with ExitStack() as patches:
        if variant.patch:
            module, name, value = variant.patch
            patches.enter_context(mock.patch.object(importlib.import_module(module), name, value))
        engine = make_engine(arguments)
        requests = requests_of(arguments.requests, 16, 256, engine.model_config.vocab_size, arguments.seed)
        run_once(engine, requests[:8])
        runs = [run_once(engine, requests) for _ in track(range(arguments.rounds), "rounds")]
    parts, steps = min(runs, key=lambda one: sum(one[0].values()))
    tokens = sum(one["output"] for one in requests)
    return {
        "milliseconds": {part: parts[part] / steps * 1e3 for part in PARTS},
        "steps": steps,
        "tokens_per_second": tokens / sum(parts.values()),
    }


def show(figures: dict[str, Any], title: str) -> None:
    """Print the parts of a step as a table."""
    parts = figures["milliseconds"]
    total = sum(parts.values())
    rows = [(part, f"{value:.3f}", f"{value / total:.0%}") for part, value in parts.items()]
    rows.append(("all", f"{total:.3f}", f"{figures['tokens_per_second']:,.0f} tokens/s"))
    table(title, ("part", "ms", "share"), rows)


def measure_ledger(arguments: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """Measure every variant in a process of its own, in turns; the fastest turn of each counts."""
    best: dict[str, dict[str, Any]] = {}
    turns = [variant for _ in range(arguments.rounds) for variant in LEDGER]
    for variant in track(turns, "variants"):
        environment = os.environ | dict([variant.environment] if variant.environment else [])
        command = [sys.executable, __file__, "--variant", variant.title, "--rounds", "1"]
        command += ["--requests", str(arguments.requests), "--dtype", arguments.dtype, "--seed", str(arguments.seed)]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        if done.returncode:
            said = done.stderr.strip() or f"exited with {done.returncode}"
            raise MinivllmError(f"{variant.title}: {said.splitlines()[-1]}")
        figures = json.loads(done.stdout.splitlines()[-1])["figures"]
        before = best.get(variant.title)
        if before is None or figures["tokens_per_second"] > before["tokens_per_second"]:
            best[variant.title] = figures
    return best


def measure_switched(arguments: argparse.Namespace) -> dict[str, dict[str, float]]:
    """Measure decode steps of one engine that the variants take in turns; return milliseconds, and
    ratios to the engine as it is.
    """
    engine = make_engine(arguments)
    names = [AS_IT_IS.title, *(variant.title for variant in SWITCHED)]
    prompts = [one["prompt"] for one in requests_of(arguments.requests, 16, 256, engine.model_config.vocab_size, 0)]
    prefills = sum(map(len, prompts)) // 2048 + 2
    add_requests(engine, [{"prompt": prompts[0], "output": len(names)}])
    step_of_all(engine, names)  # compiles
    cycles = []
    for _ in track(range(arguments.rounds), "rounds"):
        add_requests(engine, [{"prompt": prompt, "output": 250} for prompt in prompts])
        for _ in range(prefills):
            engine.step()
        for turn in range(200 // len(names)):
            order = names[turn % len(names) :] + names[: turn % len(names)]
            cycles.append(step_of_all(engine, order))
        while engine.has_unfinished_requests():
            engine.step()
    found = {}
    for name in names:
        wall, processor = ([cycle[name][clock] for cycle in cycles] for clock in (0, 1))
        quotients = ([one[name][clock] / one[AS_IT_IS.title][clock] for one in cycles] for clock in (0, 1))
        found[name] = {
            "fastest_ms": min(wall) * 1e3,
            "median_ms": statistics.median(wall) * 1e3,
            "median_processor_ms": statistics.median(processor) * 1e3,
            **dict(zip(("of_the_engine", "of_its_processor_time"), map(statistics.median, quotients), strict=True)),
        }
    return found


def step_of_all(engine: LLMEngine, names: list[str]) -> dict[str, tuple[float, float]]:
    """Run one step with each variant; return the wall and processor seconds of each."""
    seconds = {}
    for name in names:
        with ExitStack() as patches:
            if patch := VARIANTS[name].patch:
                patches.enter_context(mock.patch.object(importlib.import_module(patch[0]), *patch[1:]))
            wall, processor = time.perf_counter(), time.process_time()
            engine.step()
            seconds[name] = time.perf_counter() - wall, time.process_time() - processor
    return seconds


def show_switched(found: dict[str, dict[str, float]], title: str) -> None:
    """Print a row for each variant."""
    rows = [(name, *(f"{value:.3f}" for value in one.values())) for name, one in found.items()]
    columns = ("variant", "fastest ms", "median ms", "processor ms", "÷ the engine", "÷ its processor time")
    table(title, columns, rows)


def ledger_text(ledger: dict[str, dict[str, Any]], where: dict[str, Any]) -> str:
    """Return the ledger as a table in Markdown."""
    whole = ledger[AS_IT_IS.title]["tokens_per_second"]
    rows = []
    for title, figures in ledger.items():
        parts, rate = figures["milliseconds"], figures["tokens_per_second"]
        times = [f"{one:.2f}" for one in (*(parts[part] for part in PARTS), sum(parts.values()))]
        rows.append((title, *times, f"{rate:,.0f}", f"{rate / whole:.2f} ×"))
    return (
        f"Measured by `benchmarks/steps.py --ledger` on {where['cpu']}, {where['cores']} cores, torch "
        f"{where['versions']['torch']}; milliseconds of a mean step.\n\n"
        + markdown_table(("variant", *PARTS, "a step", "tokens/s", "of the engine"), rows)
    )


def write_ledger(text: str) -> None:
    """Put the table between its marks in PERFORMANCE.md."""
    PERFORMANCE.write_text(put_between_marks(PERFORMANCE.read_text(), "ledger", text))


def main(arguments: argparse.Namespace) -> None:
    """Measure the parts of one variant, the ledger of all variants, or those that can be switched
    while the engine runs.
    """
    figures: dict[str, Any]
    if arguments.switch:
        figures = measure_switched(arguments)
        show_switched(figures, f"A decode of {arguments.requests} requests, {arguments.dtype}")
    elif arguments.ledger:
        figures = measure_ledger(arguments)
        for title, one in figures.items():
            show(one, f"A step of {arguments.requests} requests, {arguments.dtype}, {title}")
        write_ledger(ledger_text(figures, machine()))
    else:
        variant = VARIANTS[arguments.variant]
        check_environment(variant)
        figures = figures_of(variant, arguments)
        show(figures, f"A step of {arguments.requests} requests, {arguments.dtype}, mean of {figures['steps']}")
    context = {"dtype": arguments.dtype, "requests": arguments.requests}
    found = record("steps", figures, **context)
    report(with_others(arguments.json, found), arguments.json)


def parser() -> argparse.ArgumentParser:
    flags = benchmark_parser(__doc__)
    flags.add_argument(
        "--dtype",
        choices=("float32", "float16", "bfloat16"),
        default="float32",
        help="dtype of weights, cache and computation",
    )
    flags.add_argument("--requests", type=positive_int, default=128, help="number of requests (default: 128)")
    flags.add_argument("--rounds", type=positive_int, default=5, help="runs, of which the fastest counts (default: 5)")
    flags.add_argument("--variant", choices=VARIANTS, default=AS_IT_IS.title, help="the variant of the engine")
    flags.add_argument("--ledger", action="store_true", help="all variants side by side, into PERFORMANCE.md")
    flags.add_argument("--switch", action="store_true", help="switch variants from step to step of one engine")
    flags.add_argument("--kv-cache-dtype", choices=("auto", "int8"), default="auto", help="dtype of keys and values")
    flags.add_argument("--seed", type=int, default=0, help="seed for lengths and prompts (default: 0)")
    return flags


if __name__ == "__main__":
    run(main, parser())
