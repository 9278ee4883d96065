"""Request lengths and arrivals as observed in practice, for replays that need neither a trace file
nor a GPU.

Each distribution matches the quantiles and the mean published by its source. Between two quantiles
the curve is a power of the rank, with one exponent for all intervals, chosen so that the mean
agrees. If a source publishes only a mean, the shape is exponential: the weakest assumption about a
positive number. Prompt and output lengths are drawn independently, although they are not
independent in the traces themselves; the user's own file is drawn row by row, so there they stay
together.

Sources: Kwon et al. 2023 (arXiv 2309.06180, figure 11) for ShareGPT and Alpaca; the traces of Patel
et al. 2024 (Splitwise, github.com/Azure/AzurePublicDataset, AzureLLMInferenceTrace_conv.csv and
_code.csv) for Azure.
"""

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from itertools import cycle, islice

from minivllm.config.checks import is_number, require
from minivllm.errors import MinivllmError
from minivllm_simulate.length_files import LengthTable, is_path, read_lengths


@dataclass(frozen=True)
class Lengths:
    """A distribution of token counts.

    `knots` are (share of requests, tokens) pairs from share 0 to share 1, both rising; they are
    empty for an exponential shape.
    """

    mean: float
    knots: tuple[tuple[float, float], ...] = ()

    @cached_property
    def bend(self) -> float:
        """The exponent that gives the curve its mean: 1 is a straight line between knots, and a
        larger one stays low for longer.
        """
        pairs = list(zip(self.knots, self.knots[1:], strict=False))
        floor = sum((right - left) * low for (left, low), (right, _) in pairs)
        rise = sum((right - left) * (high - low) for (left, low), (right, high) in pairs)
        return rise / (self.mean - floor) - 1

    def quantile(self, share: float) -> int:
        """Return the number of tokens, at least 1, that this share of the requests does not exceed.
        `share` is in [0, 1).
        """
        _require_share(share)
        if not self.knots:
            return max(1, round(-self.mean * math.log(1 - share)))
        (left, low), (right, high) = next(
            pair for pair in zip(self.knots, self.knots[1:], strict=False) if share < pair[1][0]
        )
        return max(1, round(low + (high - low) * ((share - left) / (right - left)) ** self.bend))


@dataclass(frozen=True)
class CountedLengths(Lengths):
    """The token counts of a file, in ascending order."""

    counts: Sequence[int] = field(default=(), compare=False)

    def quantile(self, share: float) -> int:
        """Return the number of tokens that this share of the requests does not exceed. `share` is
        in [0, 1).
        """
        _require_share(share)
        return self.counts[max(0, math.ceil(share * len(self.counts)) - 1)]


def _require_share(share: float) -> None:
    if not 0 <= share < 1:
        raise MinivllmError(f"a share of requests must be at least 0 and less than 1, not {share}")


@dataclass(frozen=True)
class RequestLengths:
    """The lengths of one request's prompt and output, in tokens."""

    prompt_tokens: int
    output_tokens: int

    @property
    def total(self) -> int:
        """Prompt and output tokens of the request together."""
        return self.prompt_tokens + self.output_tokens


@dataclass(frozen=True)
class Workload:
    """Requests of one kind, with the source of their figures. `rate` is the trace's own rate, in
    requests per second.
    """

    name: str
    title: str
    prompt: Lengths
    output: Lengths
    source: str
    rate: float | None = None

    def sample(self, count: int, seed: int = 0) -> list[RequestLengths]:
        """Draw `count` requests; the same seed draws the same requests."""
        _require_requests(count)
        draw = random.Random(f"{self.name}-{seed}").random
        return [RequestLengths(self.prompt.quantile(draw()), self.output.quantile(draw())) for _ in range(count)]


@dataclass(frozen=True)
class FileWorkload(Workload):
    """The requests of a file."""

    table: LengthTable | None = None

    def sample(self, count: int, seed: int = 0) -> list[RequestLengths]:
        """Return the file's first `count` requests in order, starting over after the last; no
        randomness is involved.
        """
        _require_requests(count)
        assert self.table is not None
        rows = zip(cycle(self.table.prompts), cycle(self.table.outputs), strict=False)
        return [RequestLengths(prompt, output) for prompt, output in islice(rows, count)]


def _require_requests(count: int) -> None:
    require(count > 0, f"a workload needs at least one request, not {count}")


def poisson_arrivals(rate: float, count: int, seed: int = 0) -> list[float]:
    """Return the seconds at which `count` requests arrive, independently of one another, at `rate`
    requests per second.
    """
    return gamma_arrivals(rate, count, seed=seed)


def gamma_arrivals(rate: float, count: int, burstiness: float = 1.0, seed: int = 0) -> list[float]:
    """Return the seconds at which `count` requests arrive, at `rate` requests per second, in bursts
    or evenly.

    The gaps are drawn from a gamma distribution of shape `burstiness`, as `vllm bench serve
    --burstiness` does: 1 is a Poisson process, a smaller value gives bursts (the gaps' standard
    deviation is mean / sqrt(burstiness)), a larger one more even arrivals.

    Raises:
        MinivllmError: a rate or burstiness that is not above 0.
    """
    if not is_number(rate) or rate <= 0:
        raise MinivllmError(f"an arrival rate must be above 0 requests per second, not {rate}")
    if not is_number(burstiness) or burstiness <= 0:
        raise MinivllmError(f"burstiness must be above 0 (1 is a Poisson process), not {burstiness}")
    draw = random.Random(f"arrivals-{seed}")
    now, times = 0.0, []
    for _ in range(count):
        now += draw.gammavariate(burstiness, 1 / (rate * burstiness))
        times.append(now)
    return times


_PAPER = "arXiv 2309.06180, figure 11: means; the shape is assumed exponential"
_AZURE = "Azure/AzurePublicDataset, LLM inference trace 2023: quantiles and means of the released file"

# The traces' longest outputs are not known here: their last percent is cut at the 99th percentile.
WORKLOADS = {
    workload.name: workload
    for workload in (
        Workload("sharegpt", "ShareGPT (paper)", Lengths(161.31), Lengths(337.99), _PAPER),
        Workload("alpaca", "Alpaca (paper)", Lengths(19.31), Lengths(58.45), _PAPER),
        Workload(
            "azure-conversation",
            "Azure conversation",
            Lengths(1154.7, ((0, 1), (0.1, 207), (0.5, 1020), (0.9, 2734), (0.99, 4142), (1, 14050))),
            Lengths(211.1, ((0, 1), (0.5, 129), (0.9, 424), (0.99, 601), (1, 601))),
            _AZURE,
            rate=5.53,
        ),
        Workload(
            "azure-code",
            "Azure code",
            Lengths(2047.8, ((0, 1), (0.1, 147), (0.5, 1469), (0.9, 5188), (0.99, 7436), (1, 7436))),
            Lengths(27.9, ((0, 1), (0.5, 13), (0.9, 55), (0.99, 251), (1, 251))),
            _AZURE,
            rate=2.57,
        ),
    )
}


def workload(name: str) -> Workload:
    """Return the workload with this name, or that of the user's own CSV file, given by its
    path (see `length_files`).

    Raises:
        MinivllmError: there is no such workload; the message lists the known ones, or says what is wrong with
            the file.
    """
    name = str(name)
    if name in WORKLOADS:
        return WORKLOADS[name]
    if not is_path(name):
        raise MinivllmError(f"unknown workload {name!r}: use one of {', '.join(WORKLOADS)}, or the path of a CSV file")
    return _of_file(read_lengths(name))


@lru_cache(maxsize=8)
def _of_file(table: LengthTable) -> FileWorkload:
    lengths = (
        CountedLengths(sum(counts) / len(counts), counts=sorted(counts)) for counts in (table.prompts, table.outputs)
    )
    left_out = f"; {table.left_out:,} without a prompt or an output are left out" if table.left_out else ""
    source = f"{table.path}: {len(table.prompts):,} requests{left_out}"
    return FileWorkload(str(table.path), table.path.name, *lengths, source, table=table)
