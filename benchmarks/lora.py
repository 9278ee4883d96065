"""What adapters cost a step, of decodes or of a prompt: none, slots that nobody uses, one adapter, several.

    uv run python benchmarks/lora.py

Engines in this process take steps in turns, one each, so what else the machine does falls on all of them alike. Each
step has the same requests in all engines. The median of a step's ratios to the base's step beside it is what counts.
On one thread, in its processor time. Adapters are random ones of all seven linears
(`minivllm_lab.multi_lora.adapters`).

    base      an engine without `enable_lora`
    none      with slots, and no request that names an adapter
    one       all requests have the same one, of rank 8 (or 16)
    several   each request has one of eight, of rank 8, in one batch

The table is followed by one line of JSON.
"""

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from minivllm.config import EMBEDDED_MODEL
from minivllm.core.engine_messages import EngineCoreRequest
from minivllm.core.lora_request import LoRARequest
from minivllm.engine.arg_utils import EngineArgs
from minivllm.engine.core import EngineCore
from minivllm.sampling_params import SamplingParams
from minivllm_lab.cli import Parser, positive_int, run
from minivllm_lab.multi_lora.adapters import write_random_adapters
from minivllm_lab.results import record, write_json
from minivllm_lab.tables import table

BATCHES = (1, 8, 32)
PROMPT = 512
CONTEXT = 64
SLOTS = 8
CASES = ("base", "none", "one, rank 8", "one, rank 16", "several, rank 8")
WIDER = {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "vocab_size": 4096, "hidden_size": 1024,
    "intermediate_size": 3072, "num_hidden_layers": 2, "num_attention_heads": 16, "num_key_value_heads": 8,
    "head_dim": 128, "max_position_embeddings": 4096, "rms_norm_eps": 1e-6, "rope_theta": 1e6, "hidden_act": "silu",
    "tie_word_embeddings": True, "attention_bias": False, "dtype": "float32",
}  # fmt: skip
"""Two layers of Qwen3-0.6B's shapes, with random weights."""


class Engine:
    """One core, and the adapters that its requests take in turns."""

    def __init__(self, model: Path, case: str, adapters: Sequence[LoRARequest]) -> None:
        lora = {} if case == "base" else {"enable_lora": True, "max_loras": SLOTS, "max_lora_rank": 16}
        common = {"device": "cpu", "max_model_len": 1024, "max_num_seqs": max(BATCHES), "enable_prefix_caching": False}
        dummy = {"load_format": "dummy", "skip_tokenizer_init": True} if model != EMBEDDED_MODEL else {}
        self.core = EngineCore(EngineArgs(model=model, max_num_batched_tokens=8192, **common, **lora, **dummy))
        self.adapters = adapters

    def add(self, number: int, length: int, max_tokens: int) -> None:
        """Queue a request."""
        params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
        request = EngineCoreRequest(str(number), [1 + number] * length, params, (), time.monotonic())
        if self.adapters:
            request.lora_request = self.adapters[number % len(self.adapters)]
        self.core.add_request(request)

    def step(self) -> float:
        """Take a step; return its processor time in seconds."""
        start = time.process_time()
        self.core.step()
        return time.process_time() - start

    def drain(self) -> None:
        """Take steps until nothing is left."""
        while self.core.has_unfinished_requests():
            self.core.step()


def decode_seconds(engines: dict[str, Engine], batch: int, steps: int) -> list[dict[str, float]]:
    """Seconds of each engine in each of so many decode steps of `batch` requests."""
    for engine in engines.values():
        for number in range(batch):
            engine.add(number, CONTEXT, steps + 6)
        for _ in range(4):
            engine.step()
    rounds = [turn(engines, index) for index in range(steps)]
    for engine in engines.values():
        engine.drain()
    return rounds


def prompt_seconds(engines: dict[str, Engine], rounds: int) -> list[dict[str, float]]:
    """Seconds of each engine in a step that computes one prompt, so many times."""
    found = []
    for index in range(rounds + 1):
        for engine in engines.values():
            engine.add(index, PROMPT, 1)
        found.append(turn(engines, index))
        for engine in engines.values():
            engine.drain()
    return found[1:]


def turn(engines: dict[str, Engine], index: int) -> dict[str, float]:
    """A step of each engine; which one begins changes, since a step leaves the caches to the next."""
    order = list(engines)
    order = order[index % len(order) :] + order[: index % len(order)]
    return {case: engines[case].step() for case in order}


def figures_of(rounds: Sequence[dict[str, float]]) -> dict[str, float]:
    """Microseconds of the base's step, and what the others' take more in percent: medians."""
    figures = {"base_us": round(statistics.median(one["base"] for one in rounds) * 1e6, 1)}
    for case in CASES[1:]:
        ratio = statistics.median(one[case] / one["base"] for one in rounds)
        figures[f"{case}, added %"] = round(100 * (ratio - 1), 2)
    return figures


def measure(model: Path, folder: Path, steps: int) -> dict[str, dict[str, float]]:
    """All figures of one model."""
    found = {}
    for rank in (8, 16):
        paths = write_random_adapters(folder / f"{model.name}-{rank}", SLOTS, rank, model=model)
        found[rank] = [LoRARequest(f"{rank}-{path.name}", index + 1, str(path)) for index, path in enumerate(paths)]
    adapters = {
        "base": [], "none": [], "one, rank 8": found[8][:1], "one, rank 16": found[16][:1], "several, rank 8": found[8],
    }  # fmt: skip
    engines = {case: Engine(model, case, adapters[case]) for case in CASES}
    prompt_seconds(engines, 1)
    figures = {f"decode of {batch}": figures_of(decode_seconds(engines, batch, steps)) for batch in BATCHES}
    figures[f"prompt of {PROMPT}"] = figures_of(prompt_seconds(engines, max(5, steps // 10)))
    for engine in engines.values():
        engine.core.shutdown()
    return figures


def main(arguments: argparse.Namespace) -> None:
    """Measures both models."""
    torch.set_num_threads(1)
    figures = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "wider").mkdir()
        (folder / "wider" / "config.json").write_text(json.dumps(WIDER))
        for title, model, steps in (
            ("tiny-python", EMBEDDED_MODEL, arguments.steps),
            ("2 layers of Qwen3-0.6B's shapes", folder / "wider", max(10, arguments.steps // 6)),
        ):
            figures[title] = measure(model, folder, steps)
            columns = ("step", "base, µs", *(f"{case}, %" for case in CASES[1:]))
            rows = [(step, *one.values()) for step, one in figures[title].items()]
            table(f"What adapters add to a step, {title}", columns, rows)
            if arguments.json:
                write_json(arguments.json, "lora", figures)
    print(json.dumps(record("lora", figures)))


def parser() -> argparse.ArgumentParser:
    """The command line."""
    flags = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    flags.add_argument("--steps", type=positive_int, default=160, help="decode steps of each batch (default: 160)")
    flags.add_argument("--json", metavar="FILE", help="also write the figures to FILE")
    return flags


if __name__ == "__main__":
    run(main, parser())
