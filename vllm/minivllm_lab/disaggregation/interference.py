"""Lesson 08's measurement of chats that long prompts interrupt, in one engine."""

from __future__ import annotations

import argparse

from minivllm_lab.disturbed_chats import CHATS, disturb, latencies
from minivllm_lab.progress import track
from minivllm_lab.tables import heading, record_table

BUDGETS = (2048, 512, 128)
"""Tokens of a step."""


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
        "one engine {name} | chats' ITL p50, ms {itl_p50_ms:.1f} | p99 {itl_p99_ms:.1f} | "
        "longest gap {itl_max_ms:.1f} | the prompts' TTFT, ms {ttft_ms:.1f}",
    )
    return results
