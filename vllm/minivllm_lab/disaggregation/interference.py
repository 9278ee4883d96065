"""Lesson 08's measurements of chats that long prompts interrupt: in one engine, and over HTTP with one
server and with two.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

from minivllm_lab.disaggregation.server_pair import NAME as SERVED_NAME
from minivllm_lab.disaggregation.server_pair import missing_package, server_pair
from minivllm_lab.engines.disturbed_chats import CHAT_PROMPT, CHATS, MAX_MODEL_LEN, disturb, latencies, random_prompt
from minivllm_lab.engines.http_load import Answer, Ask, load_beside
from minivllm_lab.progress import track
from minivllm_lab.tables import console, heading, record_table

BUDGETS = (2048, 512, 128)
"""Tokens of a step, of the engine whose chats are disturbed; of the servers, the first."""
INTERFERENCE = (
    "{name} | chats' ITL p50, ms {itl_p50_ms:.1f} | p99 {itl_p99_ms:.1f} | longest gap {itl_max_ms:.1f} | "
    "the prompts' TTFT, ms {ttft_ms:.1f}"
)
SERVERS = {"one": "one server", "two": "two and a proxy"}
SERVED_PROMPTS, ANSWER = 4, 8
"""Long prompts that are served, and tokens of the answer of each."""


def measure_interference(arguments: argparse.Namespace) -> dict:
    """Measure the token gaps of a few chats while long prompts arrive, for each token budget."""
    heading("1. A long prompt among running chats")
    results, prompts = {}, 1 if arguments.quick else 4
    for budget in track((None, *BUDGETS), "disturbing"):
        run = disturb(arguments, prompts if budget else 0, max_num_batched_tokens=budget or BUDGETS[0])
        results[str(budget or "alone")] = latencies(run.gaps, run.firsts)
    record_table(
        f"{CHATS} running chats, and {prompts} prompts of {arguments.prompt:,} tokens, one after another",
        {"nobody else" if key == "alone" else f"{key} tokens a step": each for key, each in results.items()},
        f"one engine {INTERFERENCE}",
    )
    return results


def measure_two_servers(arguments: argparse.Namespace) -> dict:
    """Send the same chats and prompts over HTTP, to one server and through a proxy to two; or print
    why not.

    Each server gets a core of its own where possible.
    """
    lacking = missing_package()
    if arguments.quick or lacking:
        why = f"they need {lacking}" if lacking else "--quick does not start them"
        console.print(f"Two servers and a proxy: left out, {why}.")
        return {}
    with server_pair(arguments.model, BUDGETS[0], MAX_MODEL_LEN) as pair:
        ports, loads = {"one": pair.prefill, "two": pair.proxy}, {}
        for port in ports.values():
            _served(port, arguments.prompt, 1, 200)  # to warm up
        before = pair.received_tokens()
        for name, port in track(ports.items(), "serving"):
            loads[name] = _served(port, arguments.prompt, SERVED_PROMPTS, 100)
        figures: dict[str, Any] = {"pinned": pair.pinned, "tokens_received": pair.received_tokens() - before}
    for name, (chats, longs) in loads.items():
        # As in the engine, a chat's first eight gaps do not count.
        figures[name] = latencies([gap for chat in chats for gap in chat.itls[8:]], [long.ttft for long in longs])
    figures |= _same_answers(*([*chats, *longs] for chats, longs in loads.values()))
    cores = (
        "Each server has one core; proxy and client run on both."
        if figures["pinned"]
        else "The servers share all cores, so the decoder also waits while the prefiller computes."
    )
    record_table(
        f"\nThe same over HTTP, {SERVED_PROMPTS} prompts of {arguments.prompt:,} tokens",
        {name: figures[key] for key, name in SERVERS.items()},
        f"over HTTP {INTERFERENCE}",
        f"{BUDGETS[0]} tokens a step. {cores} {figures['same_answers']} of {figures['answers']} answers are the same, "
        f"{figures['compared_tokens']:,} tokens; the keys and values of {figures['tokens_received']:,} tokens moved.",
    )
    return figures


def _served(port: int, prompt: int, prompts: int, seed: int) -> tuple[list[Answer], list[Answer]]:
    """Return the answers to the chats and to the long prompts."""
    greedy = {"model": SERVED_NAME, "temperature": 0, "ignore_eos": True, "stream": True, "return_token_ids": True}

    def ask(length: int, seed: int, max_tokens: int) -> Ask:
        return Ask({**greedy, "prompt": random_prompt(length, seed), "max_tokens": max_tokens})

    chats = [ask(CHAT_PROMPT, seed + 50 + index, MAX_MODEL_LEN - CHAT_PROMPT) for index in range(CHATS)]
    longs = [ask(prompt, seed + index, ANSWER) for index in range(prompts)]
    return load_beside(port, chats, longs, "/v1/completions")


def _same_answers(left: Sequence[Answer], right: Sequence[Answer]) -> dict[str, int]:
    """Count the answers that agree over their common length, and the tokens compared."""
    pairs = [
        (answer.token_ids[: len(other.token_ids)], other.token_ids[: len(answer.token_ids)])
        for answer, other in zip(left, right, strict=True)
    ]
    same = sum(answer == other for answer, other in pairs)
    return {"answers": len(pairs), "same_answers": same, "compared_tokens": sum(len(answer) for answer, _ in pairs)}
