"""Random workloads, extremes included: blocks of one token, pools that one request just fills,
tiny budgets.
"""

from random import Random
from typing import Any


def random_workload(rng: Random) -> dict[str, Any]:
    """Return a workload in the form that README.md describes. Every request can finish, so every
    workload ends.
    """
    config = _random_config(rng)
    requests = _random_requests(rng, config)
    longest = max(min(len(r["prompt"]) + r["max_tokens"], config["max_model_len"]) - 1 for r in requests)
    config["num_blocks"] = 1 + -(-longest // config["block_size"]) + rng.choice([0, 0, 1, 2, 5, 10, 30, 100])
    return {"config": config, "requests": requests, "aborts": _random_aborts(rng, requests)}


def _random_config(rng: Random) -> dict[str, Any]:
    max_model_len = rng.choice([2, 3, 8, 17, 32, 64, 100])
    max_num_seqs = rng.choice([1, 2, 3, 5, 8, 16])
    enable_chunked_prefill = rng.random() < 0.75
    least_budget = max_num_seqs if enable_chunked_prefill else max(max_num_seqs, max_model_len)
    return {
        "block_size": rng.choice([1, 2, 3, 4, 8, 16]), "num_blocks": 0, "max_num_seqs": max_num_seqs,
        "max_num_batched_tokens": least_budget + rng.choice([0, 0, 1, 3, 10, 50, 500]),
        "max_model_len": max_model_len,
        "long_prefill_token_threshold": min(rng.choice([0, 0, 1, 2, 5, 13]), max_model_len),
        "policy": rng.choice(["fcfs", "priority"]), "enable_prefix_caching": rng.random() < 0.7,
        "enable_chunked_prefill": enable_chunked_prefill,
    }  # fmt: skip


def _random_requests(rng: Random, config: dict[str, Any]) -> list[dict[str, Any]]:
    longest_prompt = config["max_model_len"] - 1
    vocabulary = rng.choice([1, 2, 4000])
    arrivals_per_step = rng.choice([0.1, 0.5, 3.0, 20.0])
    num_priorities = rng.choice([1, 2, 5])
    shared = [rng.randint(1, vocabulary) for _ in range(longest_prompt)]
    requests: list[dict[str, Any]] = []
    arrival = 0.0
    for order in range(rng.randint(1, 20)):
        arrival += rng.expovariate(arrivals_per_step)
        num_shared = rng.choice([0, 0, rng.randint(0, longest_prompt), longest_prompt])
        length = rng.choice([1, longest_prompt, rng.randint(1, longest_prompt), rng.randint(1, longest_prompt)])
        own = [rng.randint(1, vocabulary) for _ in range(length)]
        requests.append(
            {
                "id": f"r{order:03d}",
                "order": order,
                "arrival_step": int(arrival),
                "prompt": (shared[:num_shared] + own)[:length],
                "max_tokens": rng.choice([1, 2, rng.randint(1, 40), config["max_model_len"] + 5]),
                "priority": rng.randrange(num_priorities) - 1,
            }
        )
    return requests


def _random_aborts(rng: Random, requests: list[dict[str, Any]]) -> dict[str, list[str]]:
    aborts: dict[str, list[str]] = {}
    for _ in range(rng.choice([0, 0, 1, 3, 8])):
        victim = rng.choice(requests)
        step = victim["arrival_step"] + rng.choice([-1, 0, 0, 1, 2, 5, 20, 60])
        aborts.setdefault(str(max(step, 0)), []).append(victim["id"])
    return aborts
