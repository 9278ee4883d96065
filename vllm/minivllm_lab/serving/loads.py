"""Lesson 06's loads: the amount of work that is measured, the requests, and closed and open load."""

from __future__ import annotations

import argparse
import random
import statistics
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

from minivllm_lab.engines.http_load import Answer, Ask, load
from minivllm_lab.progress import track
from minivllm_lab.tables import heading, record_table
from minivllm_simulate.deployments import find_knee
from minivllm_simulate.virtual_clock import percentile

PROMPT_TOKENS = 32


class Sizes(NamedTuple):
    """The amount of work that the lesson measures; modelled requests arrive for `simulated` seconds."""

    output_tokens: int = 64
    traced: int = 7
    seconds_unread: float = 1.5
    rounds_of_clients: int = 6
    closed: Sequence[int] = (1, 16, 64, 96)
    simulated: float = 10.0


FULL = Sizes()
QUICK = Sizes(16, 1, 0.6, 1, (1, 4), 0.5)


def sizes(arguments: argparse.Namespace) -> Sizes:
    """Return the amount of work to measure."""
    return QUICK if arguments.quick else FULL


def prompts(count: int, seed: int) -> list[list[int]]:
    """Return the token ids of prompts that share no prefix."""
    draw = random.Random(seed)
    return [[draw.randrange(300, 4000) for _ in range(PROMPT_TOKENS)] for _ in range(count)]


def to_lesson(token_ids: Sequence[int], max_tokens: int) -> dict[str, Any]:
    """Make the body of a request to one of the lesson's servers."""
    return {"prompt": {"prompt_token_ids": list(token_ids)}, "max_tokens": max_tokens}


def to_real(token_ids: Sequence[int], max_tokens: int) -> dict[str, Any]:
    """Make the body of a request to the real server."""
    return {"prompt": list(token_ids), "max_tokens": max_tokens, "stream": True, "temperature": 0, "ignore_eos": True}


load_completions = partial(load, path="/v1/completions")


def load_real(port: int, rate: float, seconds: float, output_tokens: int, seed: int) -> list[Answer]:
    """Offer requests to the real server at this rate, at random times, for this many seconds; wait
    until all are answered.
    """
    draw, at, asks = random.Random(seed), 0.0, []
    for token_ids in prompts(max(8, round(rate * seconds)), seed):
        at += draw.expovariate(rate)
        asks.append(Ask(to_real(token_ids, output_tokens), at))
    return load_completions(port, asks)


def measure_places(ports: Mapping[str, int], arguments: argparse.Namespace) -> dict:
    """Measure the lesson's server under the same closed load, by where its core runs."""
    heading("2. Where the core runs")
    size = sizes(arguments)
    clients = min(4, arguments.clients) if arguments.quick else arguments.clients
    count, results = size.rounds_of_clients * clients, {}
    asks = [Ask(to_lesson(token_ids, size.output_tokens)) for token_ids in prompts(count + 1, arguments.seed)]
    for place, port in track(ports.items(), "loading"):
        load(port, asks[:1], clients=1)  # to warm up
        results[place] = summary(load(port, asks[1:], clients=clients), size.output_tokens)
    columns = "the core runs in {name} | tokens a second {tokens_per_second:,.0f} | TTFT p50, ms {ttft_p50_ms:.1f}"
    columns += " | ITL p50 {itl_p50_ms:.1f} | ITL p99 {itl_p99_ms:.1f} | longest gap {itl_max_ms:.1f}"
    record_table(f"{count} requests of {size.output_tokens} tokens from {clients} clients", results, columns)
    return results


def summary(answers: Sequence[Answer], output_tokens: int) -> dict[str, float]:
    """Summarize the clients' measurements, from the first request sent to the last token."""
    gaps = [gap for answer in answers for gap in answer.itls]
    ttfts = [answer.ttft for answer in answers]
    seconds = max(answer.events[-1] for answer in answers) - min(answer.due for answer in answers)
    return {
        "requests_per_second": len(answers) / seconds,
        "tokens_per_second": len(answers) * output_tokens / seconds,
        "ttft_p50_ms": 1e3 * statistics.median(ttfts),
        "itl_p50_ms": 1e3 * statistics.median(gaps),
        "itl_p99_ms": 1e3 * percentile(gaps, 0.99),
        "itl_max_ms": 1e3 * max(gaps),
        "latency_mean_ms": 1e3 * statistics.mean(answer.latency for answer in answers),
    }


def measure_load(port: int, arguments: argparse.Namespace) -> dict:
    """Put closed and open load on the real server: Little's law, the knee, and what happens beyond
    it.

    Each rate is offered for three times as long as an answer takes with the largest number of
    clients: in less time, no queue builds up.
    """
    heading("4. What a server can handle")
    size, closed = sizes(arguments), _closed_load(port, arguments)
    capacity = max(record["requests_per_second"] for record in closed.values())
    latency = max(record["latency_mean_ms"] for record in closed.values()) / 1e3
    seconds, rounds = (0.5, 1) if arguments.quick else (max(2.0, 3 * latency), 2)
    least, most = 0.75 * capacity, 1.25 * capacity
    tried: dict[float, dict] = {}

    def attainment(rate: float) -> float:
        answers = load_real(port, rate, seconds, size.output_tokens, arguments.seed)
        tried[rate] = _open_load(answers, size.output_tokens, arguments)
        return tried[rate]["met"]

    knee = find_knee(attainment, least, most, rounds)
    if most not in tried:
        attainment(most)
    by_rate = {f"{rate:.1f}": record for rate, record in sorted(tried.items())}
    shown = {rate: record | dict(zip("abcd", record["ttft_ms"], strict=True)) for rate, record in by_rate.items()}
    columns = "requests/s {name} | requests {requests} | met {met:.0%}"
    columns += " | TTFT p50, 1st quarter, ms {a:,.0f} | 2nd {b:,.0f} | 3rd {c:,.0f} | 4th {d:,.0f}"
    title = "\nOpen load: share that met the service level, and each quarter's wait"
    caption = f"Each rate was offered for {seconds:.1f} s. Knee {describe_knee(knee, least, most)} requests a second."
    record_table(title, shown, columns, caption)
    ends = {"least": least, "most": most, "above": tried[most]}
    asked = {"slo_ttft": arguments.slo_ttft}
    return {"closed": closed, "capacity": capacity, "seconds": seconds, "knee": knee, "tried": by_rate} | ends | asked


def describe_knee(knee: float, least: float, most: float) -> str:
    """Describe a knee in words; it may be beyond all rates that were offered."""
    if not knee:
        return f"below {least:.1f}"
    return f"above {most:.1f}" if knee == most else f"at {knee:.1f}"


def _open_load(answers: list[Answer], output_tokens: int, arguments: argparse.Namespace) -> dict:
    """Return the share of requests that met the service level, and each quarter's median time to
    first token, in order.
    """
    ttft, tpot = arguments.slo_ttft, arguments.slo_tpot
    met = [answer.ttft <= ttft and answer.tpot(output_tokens) <= tpot for answer in answers]
    ttfts = [answer.ttft for answer in sorted(answers, key=lambda answer: answer.due)]
    size = max(1, len(ttfts) // 4)
    quarters = [1e3 * statistics.median(ttfts[at : at + size]) for at in range(0, 4 * size, size)]
    record = {"requests": len(ttfts), "met": statistics.mean(met), "ttft_ms": quarters}
    return record | {"ttft_first_ms": quarters[0], "ttft_last_ms": quarters[-1]}


def _closed_load(port: int, arguments: argparse.Namespace) -> dict:
    """Let each client send its next request once it is answered; show the mean number inside, by
    Little's law.
    """
    size, results = sizes(arguments), {}
    for clients in track(size.closed, "closed load"):
        drawn = prompts(3 * clients, arguments.seed + clients)
        asks = [Ask(to_real(token_ids, size.output_tokens)) for token_ids in drawn]
        record = summary(load_completions(port, asks, clients=clients), size.output_tokens)
        record["little"] = record["requests_per_second"] * record["latency_mean_ms"] / 1e3
        results[str(clients)] = record
    columns = "clients {name} | requests/s {requests_per_second:.1f} | TTFT p50, ms {ttft_p50_ms:,.1f}"
    columns += " | latency, ms {latency_mean_ms:,.0f} | rate × latency {little:.1f}"
    record_table("Closed load on the real server", results, columns)
    return results
