"""The capstone: servers made of what a learner has written in the exercises, and clients that send
them requests.

    uv run python -m minivllm_lab.capstone            # which parts are yours, and what the servers do with them
    uv run python -m minivllm_lab.capstone --serve    # and then `minivllm serve` with them, on port 8000

An exercise whose checks pass supplies its parts; the engine's own replace the others. Not all parts
fit into one engine: there are four attentions and three schedules, and a pool without hashes cannot
find prefixes. So there are five servers, and the front end of exercise 06 is in each of them. Only
exercise 08 is in none: its check runs two engines already.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

from minivllm.config import EMBEDDED_MODEL, NO_PARTS, Parts
from minivllm.core.policy import SchedulingPolicy
from minivllm_lab.cli import Parser, run
from minivllm_lab.engines.over_http import Client, Load, serve_load
from minivllm_lab.exercise import checks_of, exercise_path, load, plug_of, run_checks, unready_parts
from minivllm_lab.progress import working
from minivllm_lab.tables import console, table

NUMBERS = ("01", "02", "03", "04", "05", "06", "07", "09", "10", "11", "12")
PORT = 8000


class Server(NamedTuple):
    """One of the servers: its exercises, the engine arguments that they need, and its adapters."""

    name: str
    exercises: tuple[str, ...]
    engine_args: Mapping[str, Any]
    adapters: tuple[str, ...] = ()


DRAFTS = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1, "prompt_lookup_max": 3}
SMALL_STEPS = {
    "max_num_batched_tokens": 16, "long_prefill_token_threshold": 3, "long_prefill_token_threshold_adaptive": True,
}  # fmt: skip
FEW_BLOCKS = {"block_size": 4, "num_gpu_blocks_override": 25, "max_model_len": 64}
SERVERS = (
    Server("paged", ("02", "03", "04", "06"), {"enable_prefix_caching": False, "max_num_batched_tokens": 64}),
    Server("a block for each request", ("01", "06"), {"block_size": 64, "max_model_len": 64}),
    Server(
        "prefix cache, int8, drafts",
        ("05", "06", "07", "10"),
        {"block_size": 4, "kv_cache_dtype": "int8", "speculative_config": DRAFTS, **SMALL_STEPS},
    ),
    Server(
        "heads in groups, drafts, few blocks", ("06", "07", "09", "11"), {"speculative_config": DRAFTS, **FEW_BLOCKS}
    ),
)
ADAPTERS = ("braces", "doctest", "stubs")
ADAPTERS_FOLDER = Path(EMBEDDED_MODEL).parent / "adapters"
SERVERS += (
    Server(
        "three adapters, two slots",
        ("06", "12"),
        {"enable_lora": True, "max_loras": 2, "max_lora_rank": 16, "max_cpu_loras": 3, "max_num_seqs": 3},
        ADAPTERS,
    ),
)
ADD = "def add(a, b):\n    return"
CLIENTS = (
    Client(prompt=ADD, max_tokens=16),
    Client(prompt=ADD, max_tokens=16, stop=("b\n\ndef _",)),
    Client(prompt=ADD, max_tokens=12, stream=False),
    Client(prompt="class Stack:\n", max_tokens=12),
    Client(prompt="import os\n", max_tokens=12),
    Client(prompt="for i in range(3):\n", max_tokens=40, leaves_after=2),
)


def solved(number: str) -> ModuleType | str:
    """Return a learner's module, or a message that says how much is missing in it."""
    module = load(exercise_path(number))
    results = run_checks(module, checks_of(number))
    missing = sum(not result.passed for result in results)
    return f"{missing} of {len(results)} checks to go" if unready_parts(number, module, results) else module


def parts_of(server: Server, modules: Mapping[str, ModuleType]) -> Parts:
    """Return the parts that the solved exercises contribute to this server."""
    replaced: dict[str, Callable[..., Any]] = {}
    rules: dict[str, Callable[..., Any]] = {}
    for number in server.exercises:
        plug = plug_of(number) if number in modules else None
        if plug is not None:
            parts = plug(modules[number]).parts
            replaced |= parts.replaced
            rules |= parts.policy.replaced if parts.policy else {}
    return Parts(policy=SchedulingPolicy(**rules), **replaced)


def serve_all(modules: Mapping[str, ModuleType]) -> bool:
    """Serve the clients with the learner's parts and with ours, server by server; return whether
    all answers are the same.
    """
    rows, differences = [], []
    for server in SERVERS:
        parts = parts_of(server, modules)
        if not parts.names:
            continue
        yours, ours = (_load_on(server, which) for which in (parts, NO_PARTS))
        differences.append(difference_of(yours, ours))
        answers = str(len(yours.answers))
        rows.append((server.name, _named(parts), answers, differences[-1] or "the same"))
    heads = ["server", "your parts", "requests", "tokens"]
    table("Servers with your parts, on real sockets", heads, rows, words=True)
    return not any(differences)


def _load_on(server: Server, parts: Parts) -> Load:
    """Serve the clients on this server, with each adapter requested by some of them."""
    wanted = [None, *server.adapters]
    clients = [replace(client, model=wanted[number % len(wanted)]) for number, client in enumerate(CLIENTS)]
    modules = [f"{name}={ADAPTERS_FOLDER / name}" for name in server.adapters]
    return serve_load(clients, parts, modules, **server.engine_args)


def difference_of(yours: Load, ours: Load) -> str | None:
    """Describe the first difference between two loads in a few words, or return None."""
    for number, (mine, other) in enumerate(zip(yours.answers, ours.answers, strict=True)):
        if (mine.token_ids, mine.text) != (other.token_ids, other.text):
            return f"request {number}: {mine.text!r}, but ours {other.text!r}"
    if yours.num_aborted != ours.num_aborted:
        return f"{yours.num_aborted} requests aborted, but {ours.num_aborted} by ours"
    held = yours.num_blocks - yours.num_free_blocks
    return f"{held} blocks are still held" if held else None


def _named(parts: Parts) -> str:
    return ", ".join(name.replace("_", " ") for name in parts.names)


def main(arguments: argparse.Namespace) -> None:
    """Check all exercises, and serve with those that are solved; exit with 1 if answers differ or
    nothing is solved.
    """
    solutions = {number: solved(number) for number in NUMBERS}
    modules = {number: solution for number, solution in solutions.items() if isinstance(solution, ModuleType)}
    rows = [
        (number, _parts(number), "yours" if number in modules else f"ours: {solutions[number]}") for number in NUMBERS
    ]
    table("Whose parts serve", ["exercise", "parts", "whose"], rows, words=True)
    if not modules:
        console.print("none of your parts can serve yet; begin with: make check N=01")
        raise SystemExit(1)
    with working("servers, each with your parts and without"):
        same = serve_all(modules)
    if arguments.serve:
        serve_here(modules, arguments.port)
    if not same:
        raise SystemExit(1)


def serve_here(modules: Mapping[str, ModuleType], port: int) -> None:
    """Run `minivllm serve` on the embedded model, with the parts of the first server, until
    Ctrl-C.
    """
    from minivllm.engine.arg_utils import EngineArgs
    from minivllm.entrypoints.openai.api_server import serve
    from minivllm.entrypoints.openai.chat_template import PLAIN
    from minivllm.entrypoints.openai.settings import FrontendArgs

    server = SERVERS[0]
    args = EngineArgs(model=EMBEDDED_MODEL, device="cpu", parts=parts_of(server, modules), **server.engine_args)
    console.print(f"http://127.0.0.1:{port}/v1/completions, until Ctrl-C")
    raise SystemExit(serve(args, FrontendArgs(host="127.0.0.1", port=port), PLAIN))


def _parts(number: str) -> str:
    return {
        "01": "attention over contiguous caches", "02": "block pool", "03": "attention in tiles", "04": "scheduler",
        "05": "block hashes, int8 cache", "06": "collector, stop strings, disconnects", "07": "drafts, accepted tokens",
        "09": "attention in groups", "10": "chunks", "11": "who runs, who is preempted",
        "12": "adapters' slots, their gate",
    }[number]  # fmt: skip


def parser() -> argparse.ArgumentParser:
    """Return the command line of `python -m minivllm_lab.capstone`."""
    flags = Parser(prog="capstone", description=__doc__)
    flags.add_argument("--serve", action="store_true", help="then serve with the parts of the first server")
    flags.add_argument("--port", type=int, default=PORT, help="where to serve (default: 8000)")
    return flags


if __name__ == "__main__":
    os.environ["TRITON_INTERPRET"] = "1"  # the checks count what kernels read and write
    run(main, parser())
