"""What the clients of a load have seen, as figures, a table and JSON with vLLM's keys.

    TTFT   time to first token: until the first event with output
    ITL    inter-token latency: between two such events of a request; all gaps of all requests are one sample
    TPOT   time per output token: (latency − TTFT) / (tokens − 1); one value a request
    E2EL   end-to-end latency: until the last such event

ITL and TPOT differ where an event has several tokens: its gap counts once in ITL, and a fast burst hides a long gap in
TPOT. In vLLM v0.33.0: `calculate_metrics` in `vllm/benchmarks/serve.py`.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from minivllm.benchmarks.client import RequestFuncOutput
from minivllm.benchmarks.load import LoadResult
from minivllm.core.stats import SpecDecodingStats
from minivllm.errors import MinivllmError

METRICS = {
    "ttft": ("TTFT", "Time to First Token"),
    "tpot": ("TPOT", "Time per Output Token (excl. 1st token)"),
    "itl": ("ITL", "Inter-token Latency"),
    "e2el": ("E2EL", "End-to-end Latency"),
}
GOODPUT_METRICS = ("ttft", "tpot", "e2el")
DETAILS = ("input_lens", "output_lens", "start_times", "ttfts", "itls", "generated_texts", "errors")
"""One entry a request: left out of a saved result unless asked for."""


def tpot(output: RequestFuncOutput) -> float:
    """Return the seconds per token after the first one; 0 for a single token."""
    return (output.latency - output.ttft) / (output.output_tokens - 1) if output.output_tokens > 1 else 0.0


def samples_of(outputs: Sequence[RequestFuncOutput]) -> dict[str, list[float]]:
    """Return what the successful requests add to each of `METRICS`, in seconds."""
    served = [output for output in outputs if output.success]
    return {
        "ttft": [output.ttft for output in served],
        "tpot": [tpot(output) for output in served if output.output_tokens > 1],
        "itl": [gap for output in served for gap in output.itl],
        "e2el": [output.latency for output in served],
    }


def num_good(outputs: Sequence[RequestFuncOutput], goodput: Mapping[str, float]) -> int:
    """Return how many requests met all of these limits, in milliseconds, by metric."""
    found = [
        {"ttft": output.ttft, "tpot": tpot(output), "e2el": output.latency} for output in outputs if output.success
    ]
    return sum(all(1000 * one[name] <= limit for name, limit in goodput.items()) for one in found)


def calculate_metrics(
    result: LoadResult,
    *,
    percentile_metrics: Sequence[str] = ("ttft", "tpot", "itl"),
    metric_percentiles: Sequence[float] = (99.0,),
    goodput: Mapping[str, float] | None = None,
    drafts: SpecDecodingStats | None = None,
) -> dict[str, Any]:
    """Return the figures by vLLM's keys: latencies in ms, rates per second, `DETAILS` in seconds.

    `drafts`: what became of the drafts during the load, if the server drafts.

    Raises:
        MinivllmError: a metric is unknown.
    """
    _known(percentile_metrics, tuple(METRICS))
    _known(goodput or (), GOODPUT_METRICS)
    outputs, duration = result.outputs, result.duration
    served = [output for output in outputs if output.success]
    generated = sum(output.output_tokens for output in served)
    read = sum(output.prompt_len for output in served)
    tokens, requests = per_second(served)
    figures: dict[str, Any] = {
        "duration": duration,
        "completed": len(served),
        "failed": len(outputs) - len(served),
        "total_input_tokens": read,
        "total_output_tokens": generated,
        "request_throughput": len(served) / duration,
        "request_goodput": num_good(outputs, goodput) / duration if goodput else None,
        "output_throughput": generated / duration,
        "total_token_throughput": (read + generated) / duration,
        "input_lens": [output.prompt_len for output in outputs],
        "output_lens": [output.output_tokens if output.success else 0 for output in outputs],
        "ttfts": [output.ttft for output in outputs],
        "itls": [output.itl for output in outputs],
        "latencies": [output.latency for output in outputs],
        "start_times": [output.start_time for output in outputs],
        "queue_times": [output.queue_time for output in outputs],
        "generated_texts": [output.generated_text for output in outputs],
        "errors": [output.error for output in outputs],
        "max_output_tokens_per_s": float(max(tokens, default=0)),
        "max_concurrent_requests": max(requests, default=0),
    }
    samples = samples_of(outputs)
    for name in percentile_metrics:
        figures |= statistics_of(name, samples[name], metric_percentiles)
    return figures if drafts is None else figures | figures_of_drafts(drafts)


def figures_of_drafts(drafts: SpecDecodingStats) -> dict[str, Any]:
    """Return what became of drafts, by vLLM's keys; the acceptance rate in percent, those by position as shares."""
    return {
        "spec_decode_acceptance_rate": 100 * drafts.acceptance_rate,
        "spec_decode_acceptance_length": drafts.mean_acceptance_length,
        "spec_decode_num_drafts": drafts.num_drafts,
        "spec_decode_draft_tokens": drafts.num_draft_tokens,
        "spec_decode_accepted_tokens": drafts.num_accepted_tokens,
        "spec_decode_per_position_acceptance_rates": drafts.acceptance_rates_per_pos,
    }


def statistics_of(name: str, seconds: Sequence[float], percentiles: Sequence[float]) -> dict[str, float]:
    """Return mean, median, standard deviation and percentiles in ms; 0 where there is no sample."""
    values = 1000 * np.array(seconds or [0.0])
    found = {f"mean_{name}_ms": values.mean(), f"median_{name}_ms": np.median(values), f"std_{name}_ms": values.std()}
    found |= {f"p{which:g}_{name}_ms": np.percentile(values, which) for which in percentiles}
    return {key: float(value) for key, value in found.items()}


def per_second(served: Sequence[RequestFuncOutput]) -> tuple[list[int], list[int]]:
    """Return the events with output in each second since the first request, and the requests under way in it."""
    if not served:
        return [], []
    start = min(output.start_time for output in served)
    seconds = int(max(output.start_time + output.latency for output in served) - start) + 1
    tokens, requests = [0] * seconds, [0] * seconds
    for output in served:
        began = output.start_time - start
        came = began + output.ttft
        for gap in (0.0, *output.itl):
            came += gap
            tokens[min(int(came), seconds - 1)] += 1
        for second in range(int(began), min(int(began + output.latency), seconds - 1) + 1):
            requests[second] += 1
    return tokens, requests


def table_of(
    figures: Mapping[str, Any], *, max_concurrency: int | None = None, request_rate: float = float("inf")
) -> str:
    """Return the figures as `vllm bench serve` prints them."""
    lines = [f"{' Serving Benchmark Result ':=^50}", _row("Successful requests:", figures["completed"])]
    lines.append(_row("Failed requests:", figures["failed"]))
    if max_concurrency is not None:
        lines.append(_row("Maximum request concurrency:", max_concurrency))
    if request_rate != float("inf"):
        lines.append(_row("Request rate configured (RPS):", float(request_rate)))
    for title, key in (
        ("Benchmark duration (s):", "duration"),
        ("Total input tokens:", "total_input_tokens"),
        ("Total generated tokens:", "total_output_tokens"),
        ("Request throughput (req/s):", "request_throughput"),
        ("Request goodput (req/s):", "request_goodput"),
        ("Output token throughput (tok/s):", "output_throughput"),
        ("Peak output token throughput (tok/s):", "max_output_tokens_per_s"),
        ("Peak concurrent requests:", "max_concurrent_requests"),
        ("Total token throughput (tok/s):", "total_token_throughput"),
    ):
        if figures[key] is not None:
            lines.append(_row(title, figures[key]))
    for name, (short, long) in METRICS.items():
        if f"mean_{name}_ms" not in figures:
            continue
        lines.append(f"{long:-^50}")
        lines += [_row(f"{kind.title()} {short} (ms):", figures[f"{kind}_{name}_ms"]) for kind in ("mean", "median")]
        percentiles = [key for key in figures if key.startswith("p") and key.endswith(f"_{name}_ms")]
        lines += [_row(f"P{key[1 : key.index('_')]} {short} (ms):", figures[key]) for key in percentiles]
    if "spec_decode_num_drafts" in figures:
        lines += _rows_of_drafts(figures)
    return "\n".join([*lines, "=" * 50])


def _rows_of_drafts(figures: Mapping[str, Any]) -> list[str]:
    lines = [f"{'Speculative Decoding':-^50}"]
    for title, key in (
        ("Acceptance rate (%):", "spec_decode_acceptance_rate"),
        ("Acceptance length:", "spec_decode_acceptance_length"),
        ("Drafts:", "spec_decode_num_drafts"),
        ("Draft tokens:", "spec_decode_draft_tokens"),
        ("Accepted tokens:", "spec_decode_accepted_tokens"),
    ):
        lines.append(_row(title, figures[key]))
    rates = figures["spec_decode_per_position_acceptance_rates"]
    lines += ["Per-position acceptance (%):"] if rates else []
    return lines + [_row(f"  Position {position}:", 100 * rate) for position, rate in enumerate(rates)]


def _row(title: str, value: float) -> str:
    return f"{title:<40} {value:<10.2f}" if isinstance(value, float) else f"{title:<40} {value:<10}"


def _known(names: Sequence[str] | Mapping[str, float], known: tuple[str, ...]) -> None:
    unknown = [name for name in names if name not in known]
    if unknown:
        raise MinivllmError(f"unknown metric {unknown[0]!r}; known are {', '.join(known)}")
