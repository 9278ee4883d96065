"""The load on a server: which request arrives when, with how many tokens.

Clients of a closed loop send their next request when the last one has ended, so each request waits for an
earlier one.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from minivllm.config.checks import is_number, require
from minivllm.errors import MinivllmError
from minivllm_simulate import workloads
from minivllm_simulate.virtual_clock import SimulatedRequest
from minivllm_simulate.workloads import Lengths, RequestLengths, gamma_arrivals

MOST_REQUESTS = 1000
"""Requests of a file that are simulated."""
BENCH_KEYS = ("model_id", "completed", "duration", "total_input_tokens", "total_output_tokens", "request_rate")


class Load(NamedTuple):
    """Requests, and how they arrive: at a rate, from a number of clients, or all at once."""

    name: str
    requests: tuple[SimulatedRequest, ...]
    rate: float | None = None
    """Requests a second."""
    clients: int | None = None

    @property
    def prompt(self) -> float:
        """Mean prompt tokens."""
        return sum(request.prompt_tokens for request in self.requests) / len(self.requests)

    @property
    def output(self) -> float:
        """Mean output tokens."""
        return sum(request.output_tokens for request in self.requests) / len(self.requests)

    @property
    def longest(self) -> int:
        """Tokens of the longest request."""
        return max(request.prompt_tokens + request.output_tokens for request in self.requests)

    def __str__(self) -> str:
        if self.clients:
            arriving = f"from {self.clients:,} clients, each with one at a time"
        else:
            arriving = f"at {self.rate:.3g} a second" if self.rate else "all at once"
        lengths = f"{self.prompt:,.0f} tokens in and {self.output:,.0f} out"
        return f"{self.name}: {len(self.requests):,} requests {arriving}; {lengths}"


def make_load(
    name: str, lengths: Sequence[RequestLengths], rate: float | None = None, clients: int | None = None,
    burstiness: float = 1.0,
) -> Load:  # fmt: skip
    """Return a load of requests that arrive at `rate`, from `clients` in a closed loop, or all at once.

    Raises:
        MinivllmError: a rate or a number of clients that is not above 0.
    """
    require(rate is None or (is_number(rate) and rate > 0), f"a rate must be above 0 requests/s, not {rate}")
    require(clients is None or clients > 0, f"there must be at least one client, not {clients}")
    arrivals = gamma_arrivals(rate, len(lengths), burstiness) if rate else [0.0] * len(lengths)
    return _load(name, lengths, arrivals, rate, clients)


def drawn_lengths(prompt: int | str, output: int | str, count: int) -> list[RequestLengths]:
    """Draw requests of these lengths; "~218" is an exponential shape with that mean, 218 a constant."""

    def shape(tokens: int | str) -> Lengths:
        mean = int(str(tokens).removeprefix("~"))
        return Lengths(mean) if str(tokens).startswith("~") else workloads.CountedLengths(mean, counts=(mean,))

    return workloads.Workload(f"{prompt}-{output}", "", shape(prompt), shape(output), "").sample(count)


def of_kind(name: str, count: int, rate: float | None, clients: int | None) -> Load:
    """Return a load with the lengths of a well-known kind, or of a CSV file, which may also say when they arrive.

    Raises:
        MinivllmError: there is no such kind or file, or the file is not such a table; the message names the line.
    """
    kind, title = workloads.workload(name), Path(name).name
    arrivals = kind.table.arrivals[:MOST_REQUESTS] if isinstance(kind, workloads.FileWorkload) and kind.table else ()
    if len(arrivals) > 1 and arrivals[-1] and not rate and not clients:
        return _load(title, kind.sample(len(arrivals)), arrivals, (len(arrivals) - 1) / arrivals[-1], None)
    return make_load(title, kind.sample(count), rate or (None if clients else kind.rate), clients)


def read_bench(name: str) -> dict[str, Any]:
    """Return the result that `vllm bench serve --save-result` wrote.

    Raises:
        MinivllmError: there is no such file, or it is something else.
    """
    path = Path(name).expanduser()
    require(path.is_file(), f"there is no file {name!r}")
    try:
        result = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise MinivllmError(f"{path.name} is not a JSON file: {error}") from None
    missing = [key for key in BENCH_KEYS if not isinstance(result, dict) or key not in result]
    words = (
        f"{path.name} is not a result of `vllm bench serve --save-result` (0.6 to 0.33): it has no {', '.join(missing)}"
    )
    require(not missing, words)
    counts = [result[key] for key in ("completed", "total_input_tokens", "total_output_tokens")]
    require(
        all(is_number(each) and each > 0 for each in counts),
        f"{path.name}: no request was completed, or none had tokens",
    )
    return result


def of_bench(name: str, rate: float | None = None, clients: int | None = None) -> Load:
    """Return the load of a benchmark's result: its own lengths if it has them (--save-detailed), or else the
    means; it arrives as it did there, unless a rate or a number of clients is given.
    """
    result = read_bench(name)
    completed = int(result["completed"])
    pairs = zip(result.get("input_lens") or (), result.get("output_lens") or (), strict=False)
    lengths = [pair for pair in pairs if all(pair)]
    if not lengths:
        means = (max(1, round(result[key] / completed)) for key in ("total_input_tokens", "total_output_tokens"))
        lengths = [tuple(means)] * completed
    words = f"{Path(name).name}: every length must be a number of tokens, at least 1"
    require(all(isinstance(each, int) and each > 0 for pair in lengths for each in pair), words)
    if rate is None and clients is None:
        own = result["request_rate"]
        require(
            own == "inf" or is_number(own), f"{Path(name).name}: request_rate is {own!r}, neither a number nor 'inf'"
        )
        rate = None if own == "inf" or own == math.inf else own
        clients = None if rate else result.get("max_concurrency")
    requests = [RequestLengths(*pair) for pair in lengths[:MOST_REQUESTS]]
    return make_load(Path(name).name, requests, rate, clients, result.get("burstiness") or 1.0)


def _load(
    name: str, lengths: Sequence[RequestLengths], arrivals: Sequence[float], rate: float | None, clients: int | None
) -> Load:
    requests = (
        SimulatedRequest(
            each.prompt_tokens, each.output_tokens, at, after=index - clients if clients and index >= clients else None
        )
        for index, (each, at) in enumerate(zip(lengths, arrivals, strict=True))
    )
    return Load(name, tuple(requests), rate, clients)
