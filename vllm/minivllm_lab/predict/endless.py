"""Rounds without end, from random workloads of small numbers and our own scheduler."""

from __future__ import annotations

from collections.abc import Iterator
from random import Random
from typing import Any

from minivllm_lab.predict.levels import is_rich, level_of
from minivllm_lab.predict.rounds import Round, rounds


def endless(level: int, seed: int) -> Iterator[Round]:
    """Yield rounds of a level for ever."""
    draw = Random(seed)
    number = 0
    while True:
        number += 1
        source = f"random workload {number} of seed {seed}"
        offered = rounds(
            workload(draw, level), source, keep=lambda puzzle: level_of(puzzle) == level and is_rich(puzzle)
        )
        best = max(offered, key=lambda puzzle: len(puzzle.mistakes), default=None)
        if best is not None and best.mistakes:
            yield best


def workload(draw: Random, level: int) -> dict[str, Any]:
    """Return a random workload in which rounds of the level are likely."""
    block_size = draw.choice([2, 4])
    prompts = [draw.randint(3, 20) for _ in range(draw.randint(3, 7))]
    shared = [draw.randint(1, 4000) for _ in range(12)]
    requests = [
        {
            "id": f"r{order}",
            "order": order,
            "arrival_step": draw.randint(0, 5),
            "prompt": _prompt(draw, length, shared if level == 5 else []),
            "max_tokens": draw.randint(2, 9),
            "priority": draw.randrange(3),
        }
        for order, length in enumerate(prompts)
    ]
    requests.sort(key=lambda request: request["arrival_step"])
    longest = max(len(request["prompt"]) + request["max_tokens"] for request in requests)
    tight = level in (2, 3, 4)
    blocks = -(-longest // block_size) + (draw.randint(1, 6) if tight else 40)
    config = {
        "block_size": block_size,
        "num_blocks": 1 + blocks,
        "max_num_seqs": draw.choice([2, 3, 4, 8]) if not tight else 8,
        "max_num_batched_tokens": draw.choice([8, 12, 16]) if not tight else 24,
        "max_model_len": 64,
        "long_prefill_token_threshold": draw.choice([4, 6]) if level == 1 else 0,
        "policy": "priority" if level == 4 else "fcfs",
        "enable_prefix_caching": level == 5,
        "enable_chunked_prefill": True,
        "num_speculative_tokens": 3 if level == 6 else 0,
    }
    return {"config": config, "requests": requests, "aborts": {}}


def _prompt(draw: Random, length: int, shared: list[int]) -> list[int]:
    own = [draw.randint(1, 4000) for _ in range(length)]
    prefix = shared[: draw.choice([0, 8, 12])][: length - 1]
    return prefix + own[len(prefix) :]
