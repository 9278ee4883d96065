"""Predict a workload's figures on a server, its knee, and the knob to turn first; and find the
assumption that a measurement contradicts.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

from minivllm.errors import MinivllmError
from minivllm_lab.workload.load import Load
from minivllm_lab.workload.measured import Measured, measure
from minivllm_lab.workload.published import known_error
from minivllm_lab.workload.server import Server, capacity
from minivllm_simulate.cost_model import StepShape

METRICS = {
    "output tokens/s": ("output_tokens_s", "output_throughput", ""),
    "requests/s": ("requests_s", "request_throughput", ""),
    "TTFT p50, ms": ("ttft_p50_ms", "median_ttft_ms", "prefill"),
    "TTFT p99, ms": ("ttft_p99_ms", "p99_ttft_ms", "tail"),
    "gap p50, ms": ("itl_p50_ms", "median_itl_ms", "decode"),
    "gap p99, ms": ("itl_p99_ms", "p99_itl_ms", "tail"),
}
"""Ours, the benchmark's, and the kind of published rows that tells its error ("": throughput, of the load's kind)."""
ENOUGH = 1.05
"""A knob that moves the knee by less is not worth turning."""


class Knob(NamedTuple):
    """A changed flag, and what it does to the knee and to the gap between tokens, as factors."""

    flag: str
    knee: float
    gap: float
    gpus: float = 1.0
    """GPUs, against now."""


@dataclass(frozen=True)
class Prediction:
    """A server under a load."""

    server: Server
    load: Load

    @cached_property
    def measured(self) -> Measured:
        """The figures that its clients would measure."""
        return measure(self.server, self.load)

    @cached_property
    def knee(self) -> float:
        """Requests a second from which the queue grows without end."""
        return capacity(self.server, self.load.prompt, self.load.output)

    @property
    def at_once(self) -> int:
        """Requests of the load's mean length that fit at once."""
        return min(self.server.seats, int(self.server.kv_tokens / (self.load.prompt + self.load.output)))

    def kind(self, name: str) -> str:
        """Return the kind of published rows that tells the error of a metric."""
        of_throughput = "clients" if self.load.clients and self.load.clients < self.at_once else "throughput"
        return METRICS[name][2] or of_throughput

    def figures(self) -> dict[str, float]:
        """Return the predicted metrics by name."""
        return {name: self.measured.metric(ours) for name, (ours, *_) in METRICS.items()}

    def mean_step(self) -> StepShape:
        """Return a decode of the mean batch."""
        context = round(self.load.prompt + self.load.output / 2)
        return StepShape.of([(1, context)] * max(1, round(self.measured.batch)))

    def knobs(self) -> list[Knob]:
        """Return what each knob would do, those first that move the knee most for the GPUs that they take."""
        server, step, changed = self.server, self.mean_step(), []
        for flag, fields, gpus in (
            (f"--max-num-seqs {2 * server.seats}", {"max_num_seqs": 2 * server.seats}, 1),
            (f"--max-num-batched-tokens {2 * server.budget}", {"max_num_batched_tokens": 2 * server.budget}, 1),
            ("--gpu-memory-utilization 0.95", {"gpu_memory_utilization": 0.95}, 1),
            ("--kv-cache-dtype fp8", {"kv_dtype": "fp8"}, 1),
            (f"--tensor-parallel-size {2 * server.tp}", {"tp": 2 * server.tp}, 2),
        ):
            if any(getattr(server, name) == value for name, value in fields.items()):
                continue
            try:
                other = replace(server, **fields)
                knee = capacity(other, self.load.prompt, self.load.output) / self.knee
                changed.append(Knob(flag, knee, other.cost.seconds(step) / server.cost.seconds(step), gpus))
            except MinivllmError:  # heads that cannot be divided, or a cache of this kind that there is not
                continue
        return sorted(changed, key=lambda knob: -knob.knee / knob.gpus)

    def advice(self) -> str:
        """Say which knob to turn first."""
        best, load = self.knobs()[0], self.load.rate
        over = load is None or load > self.knee
        if not over and load is not None and load < 0.7 * self.knee:
            return f"Turn nothing: {load:.3g} requests/s are {load / self.knee:.0%} of the knee."
        if best.knee / best.gpus >= ENOUGH:
            return (
                f"Turn {best.flag} first: it moves the knee to {best.knee:.2f} times, and gaps to {best.gap:.2f} times."
            )
        return "Add a replica: no single flag moves the knee by 5 %, so the GPU itself is the limit."


def compare(prediction: Prediction, result: Mapping[str, Any]) -> Iterator[tuple[str, float, float, str]]:
    """Yield (metric, predicted, measured, kind) for each metric that a benchmark's result has."""
    for name, predicted in prediction.figures().items():
        if isinstance(measured := result.get(METRICS[name][1]), int | float) and measured > 0:
            yield name, predicted, float(measured), prediction.kind(name)


def off(predicted: float, measured: float, kind: str) -> bool:
    """Return whether a measurement is further away than twice the usual error, and than 10 %."""
    return abs(predicted / measured - 1) > max(0.1, 2 * known_error(kind).median)


def explain(prediction: Prediction, result: Mapping[str, Any]) -> list[str]:
    """Say which assumption a measurement contradicts, and what value it would take instead."""
    rows = {name: (predicted, measured, kind) for name, predicted, measured, kind in compare(prediction, result)}
    wrong = {name for name, row in rows.items() if off(*row)}
    said = []
    if "gap p50, ms" in wrong:
        said.append(_of_steps(prediction, *rows["gap p50, ms"][:2]))
    if "TTFT p50, ms" in wrong:
        said.append(_of_prefill(prediction, *rows["TTFT p50, ms"][:2]))
    if wrong & {"output tokens/s", "requests/s"} and not said:
        said.append(_of_batch(prediction, result))
    return said or ["Every metric is within twice its usual error: no assumption is contradicted."]


def _of_steps(prediction: Prediction, predicted: float, measured: float) -> str:
    server, shape = prediction.server, prediction.mean_step()
    device, share = server.cost.device, server.cost.device.roofline.memory_efficiency
    reading, missing = device.linear_seconds(shape) + device.attention_seconds(shape), (measured - predicted) / 1e3
    implied = share * reading / max(reading + missing, 1e-9)
    return (
        f"Steps: the gap is {measured:.1f} ms, not {predicted:.1f}. Either the host takes {abs(1e3 * missing):.1f} ms "
        f"{'more' if missing > 0 else 'less'} a step than assumed, or decodes read at {implied:.0%} of the bandwidth, "
        f"not at {share:.0%}. Compare two batch sizes: the host's part stays, and reading grows."
    )


def _of_prefill(prediction: Prediction, predicted: float, measured: float) -> str:
    server, load = prediction.server, prediction.load
    if (load.rate or 0) > prediction.knee or not (load.rate or load.clients):
        return f"Queue: first tokens wait {measured:,.0f} ms, not {predicted:,.0f}: this load is above the knee."
    host, share = 1e3 * server.host.first, server.cost.device.roofline.arithmetic_efficiency
    alone = 1e3 * server.cost.seconds(StepShape.of([(round(load.prompt), 0)]))
    if alone > host:
        implied = share * alone / max(measured - predicted + alone, 1e-9)
        return f"Prefill: prompts are computed at {implied:.0%} of the GPU's arithmetic, not at {share:.0%}."
    implied = host + measured - predicted
    return f"Front end: HTTP, the tokenizer and queues take {implied:.0f} ms of a first token, not {host:.0f}."


def _of_batch(prediction: Prediction, result: Mapping[str, Any]) -> str:
    at_once = result["output_throughput"] * result.get("mean_tpot_ms", 0) / 1e3
    return (
        f"Batch: by Little's law {at_once:.0f} requests ran at once, not {prediction.measured.batch:.0f}. Compare the "
        f'log\'s "GPU KV cache size" with {prediction.server.kv_tokens:,} tokens; look for prefix hits, and for a slow '
        "client."
    )
