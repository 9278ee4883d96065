"""Measure chats beside long prompts on a live server, by token budget: gaps between tokens, times
to first token, tokens per second.

    uv run python benchmarks/chunked_prefill.py --json benchmarks/results/chunked_prefill.cpu.json       # 3 minutes
    uv run python benchmarks/chunked_prefill.py --peer --budgets 64 512 2048 16384 --json ...            # 8 minutes
    uv run python benchmarks/chunked_prefill.py --quick

The embedded model runs in fp32, greedily, without a prefix cache. Each budget has a server of its
own, with real sockets and the client in another process. Eight chats run all the time. Then eight
prompts of 1,900 tokens arrive at once: 15,200 tokens, so that a budget of 16,384 takes all of them
in one step, although the model's limit is 2,048. When all are answered and the chats have gone on
alone for a while, the next eight arrive.

- Budgets: `minivllm serve` with each `--max-num-batched-tokens`.
- Prefill first: the policy of vLLM V0 plugged into the same server, whole prompts, up to 2,048 tokens
  per step; and beside it the engine's own policy, plugged in as well, since the core is a thread of
  the server then.
- With `--peer`: vLLM's CPU server alone, in its own environment (`make peers`), with `--budgets`. Its
  figures are added to those already in the file.

The table is followed by one line of JSON.
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import vllm_cli
from serving import Serving

from minivllm.errors import MinivllmError
from minivllm_lab.cli import benchmark_parser, positive_int, run
from minivllm_lab.disturbance import Control
from minivllm_lab.engines.disturbed_chats import random_prompt
from minivllm_lab.engines.http_load import Answer, Ask, load_beside
from minivllm_lab.marks import put_between_marks
from minivllm_lab.progress import track
from minivllm_lab.results import record, report
from minivllm_lab.tables import console, markdown_table, table
from minivllm_simulate.virtual_clock import percentile

NAME, MAX_MODEL_LEN = "tiny-python", 2048
BUDGETS = (64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
CHATS, CHAT_PROMPT, FIRST_EVENTS = 8, 32, 8
LONG, LONG_PROMPT, ANSWER = 8, 1900, 8
"""Long prompts at once, the tokens of each, and of its answer. A chat's first events do not
count.
"""
SIZES = ("--max-model-len", str(MAX_MODEL_LEN), "--max-num-seqs", "16", "--served-model-name", NAME)
BLOCKS = ("--num-gpu-blocks-override", "2200")
MORE = ("--host", "127.0.0.1", "--dtype", "float32", "--no-enable-prefix-caching")
NOTES = Path(__file__).resolve().parents[1] / "lessons" / "notes" / "10_chunked_prefill.md"
SERVERS = {
    "minivllm": "minivllm serve",
    "part: first": "prefill first",
    "part: own": "the same, mixed",
    "vllm": "vLLM's CPU server",
}
COLUMNS = {
    "itl_p50_ms": "ITL p50, ms",
    "itl_p99_ms": "ITL p99",
    "itl_max_ms": "longest ITL",
    "ttft_p50_ms": "TTFT p50",
    "ttft_max_ms": "last TTFT",
    "tokens_per_second": "tokens/s",
}
WITH_SCHEDULER = Path(__file__).parent / "peer_engines" / "serve_with_scheduler.py"
V0_BUDGET = 2048


def ask(length: int, seed: int, max_tokens: int) -> Ask:
    """Return a streamed request with a random prompt that generates exactly `max_tokens` tokens."""
    greedy = {"temperature": 0, "ignore_eos": True, "stream": True}
    return Ask({"model": NAME, "prompt": random_prompt(length, seed), "max_tokens": max_tokens, **greedy})


def loaded(server: Serving, bursts: int) -> dict[str, float]:
    """Load one server and return its figures."""
    chats = [ask(CHAT_PROMPT, one, MAX_MODEL_LEN - CHAT_PROMPT) for one in range(CHATS)]
    longs = [ask(LONG_PROMPT, 100 + one, ANSWER) for one in range(bursts * LONG)]
    load_beside(server.port, chats, longs[:1], "/v1/completions", quiet=4)  # to warm up
    return figures_of(*load_beside(server.port, chats, longs, "/v1/completions", burst=LONG))


def figures_of(chats: Sequence[Answer], longs: Sequence[Answer]) -> dict[str, float]:
    """Return the chats' gaps between tokens, the long prompts' times to first token, and all tokens
    per second while the long prompts were running.
    """
    gaps = [gap for chat in chats for gap in chat.itls[FIRST_EVENTS:]]
    firsts = [long.ttft for long in longs]
    seconds, tokens = 0.0, 0
    for start in range(0, len(longs), LONG):
        some = longs[start : start + LONG]
        begin, end = min(one.sent for one in some), max(one.events[-1] for one in some)
        seconds += end - begin
        tokens += sum(LONG_PROMPT + len(one.events) for one in some)
        tokens += sum(begin < at <= end for chat in chats for at in chat.events)
    return {
        "itl_p50_ms": 1e3 * statistics.median(gaps),
        "itl_p99_ms": 1e3 * percentile(gaps, 0.99),
        "itl_max_ms": 1e3 * max(gaps),
        "ttft_p50_ms": 1e3 * statistics.median(firsts),
        "ttft_max_ms": 1e3 * max(firsts),
        "tokens_per_second": tokens / seconds,
    }


def budget_flags(budget: int) -> tuple[str, ...]:
    """Return the server's flag that sets this budget."""
    return "--max-num-batched-tokens", str(budget)


def measure(budgets: Sequence[int], bursts: int, peer: bool) -> dict[str, dict[str, dict[str, float]]]:
    """Measure every kind of server with every budget."""
    found: dict[str, dict[str, dict[str, float]]] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        own = [sys.executable, "-P", "-m", "minivllm"]
        if peer:
            vllm = [str(vllm_cli.ENVIRONMENT / "bin" / "vllm")], vllm_cli.variables(folder)
            servers: list[tuple[Any, ...]] = [("vllm", budget, *vllm, (*MORE, *SIZES)) for budget in budgets]
        else:
            servers = [("minivllm", budget, own, os.environ, (*MORE, *SIZES, *BLOCKS)) for budget in budgets]
            for kind in ("first", "own"):
                command = [sys.executable, "-P", str(WITH_SCHEDULER), kind]
                servers.append((f"part: {kind}", V0_BUDGET, command, os.environ, (*SIZES, *BLOCKS)))
        for kind, budget, command, environment, flags in track(servers, "serving"):
            title = f"{kind.replace(': ', '_')}_{budget}"
            with ExitStack() as stack:
                all_flags = (*flags, *budget_flags(budget))
                server = stack.enter_context(Serving(title, command, environment, folder, all_flags))
                found.setdefault(kind, {})[str(budget)] = loaded(server, bursts)
    return found


def cells(figures: Mapping[str, Any]) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """Return the columns and rows of the table, a row for each server and budget."""
    rows = [
        (SERVERS[kind], budget, *(f"{row[key]:,.{int(row[key] < 100)}f}" for key in COLUMNS))
        for kind, budgets in figures["servers"].items()
        for budget, row in budgets.items()
    ]
    return ("server", "budget", *COLUMNS.values()), rows


def page_table(figures: Mapping[str, Any]) -> str:
    """Return the Markdown table for lesson 10's notes."""
    return markdown_table(*cells(figures))


def show(figures: Mapping[str, Any]) -> None:
    """Print the table."""
    work = figures["work"]
    longs = f"{work['long']} prompts of {work['prompt']:,} tokens"
    title = f"{work['chats']} chats, and {longs} at once, {work['bursts']} times"
    caption = "ITL is the chats', TTFT the long prompts'; tokens/s counts all requests while the long prompts run."
    table(title, *cells(figures), caption)


def main(arguments: argparse.Namespace) -> None:
    if arguments.peer and not vllm_cli.ENVIRONMENT.exists():
        raise MinivllmError(f"vLLM has no environment at {vllm_cli.ENVIRONMENT}: run make peers")
    bursts = 1 if arguments.quick else 2
    budgets = arguments.budgets or ((256, 2048) if arguments.quick else BUDGETS)
    control = Control(loads_cores=True)
    with control.watch():
        servers = measure(budgets, bursts, arguments.peer)
    which = "disturbance_vllm" if arguments.peer else "disturbance"
    work = {"chats": CHATS, "long": LONG, "prompt": LONG_PROMPT, "bursts": bursts}
    figures: dict[str, Any] = {"work": work, "servers": servers, which: control.record()}
    show(figures)
    if arguments.peer:
        figures["vllm"] = vllm_cli.vllm_version()
    if words := control.disturbance():
        console.print(f"This machine was disturbed ({words}).")
    found = joined(arguments.json, record("chunked_prefill", figures))
    report(found, arguments.json)
    if arguments.page:
        NOTES.write_text(put_between_marks(NOTES.read_text(), "servers", page_table(found["figures"])))


def joined(path: str | None, found: dict[str, Any]) -> dict[str, Any]:
    """Return the record, merged with the file's figures for servers that were not measured this
    time.
    """
    try:
        earlier = json.loads(Path(path or "").read_text())["figures"]
    except (OSError, ValueError, KeyError):
        return found
    figures = earlier | found["figures"]
    figures["servers"] = {kind: dict(one) for kind, one in earlier["servers"].items()}
    for kind, one in found["figures"]["servers"].items():
        figures["servers"][kind] = one
    return found | {"figures": figures}


def parser() -> argparse.ArgumentParser:
    flags = benchmark_parser(__doc__)
    flags.add_argument("--budgets", type=positive_int, nargs="+", help="tokens per step (default: 64 to 16384)")
    flags.add_argument("--peer", action="store_true", help="measure only vLLM's CPU server")
    flags.add_argument("--quick", action="store_true", help="two budgets, the long prompts only once")
    flags.add_argument("--page", action="store_true", help="also write the table into lesson 10's notes")
    return flags


if __name__ == "__main__":
    run(main, parser())
