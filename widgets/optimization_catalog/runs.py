"""Run lesson 05's levers to find what each buys in both orders, and with few or many requests at
once.

The engine's own scheduler and block pool serve a workload with every set of levers;
`minivllm_simulate.levers` models the time of a step. Each run is done once and kept.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from itertools import accumulate, pairwise
from typing import Any, Literal, NamedTuple

from minivllm.config import ModelConfig
from minivllm.errors import MinivllmError
from minivllm_simulate.hardware import get_hardware
from minivllm_simulate.known_models import known_model
from minivllm_simulate.levers import (
    LADDER,
    LeverResult,
    Levers,
    LeverWorkload,
    lever_model,
    lever_weight_bytes,
    long_and_short,
    shared_chat,
    throughput,
)
from minivllm_simulate.virtual_clock import SimulatedRequest
from minivllm_simulate.workloads import WORKLOADS

MODEL = "Llama-3.1-8B"
GPUS = ("L4", "A100", "H100")
REQUESTS = {"chats": "chats with a shared system prompt", "mixed": "long and short", "code": "code, up to 8K"}
MAX_MODEL_LEN = {"chats": 4096, "mixed": 4096, "code": 8192}
SLOTS: tuple[int, ...] = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64)
LEVELS = (5, 10, 20, 30, 50, 100, 200)
"""Limits of the time between two tokens, in milliseconds."""
FEWEST_REQUESTS, WAVES = 16, 2
"""A run serves at least 16 requests, and twice as many as run at once."""
SHORTER = 4
"""How many times shorter answers are than ShareGPT's, to keep redraws fast; their relative
spread is the same.
"""
ACCEPTANCE = 0.6
"""The chance that a draft is accepted if all before it were."""
FIELDS = tuple(rung.field for rung in LADDER)
TITLES = {rung.field: rung.title for rung in LADDER} | {
    "gqa": "grouped heads", "speculative_tokens": "speculation", "tensor_parallel": "two GPUs",
}  # fmt: skip
"""The levers' titles in picture and switches: those of `LADDER`, with shorter ones where space
is short.
"""
START: dict[str, Any] = {
    "gpu": "L4",
    "requests": "chats",
    "slots": 16,
    "level": 20,
    **{field: field != "tensor_parallel" for field in FIELDS},
}
CHUNK = 0.02
"""CPU seconds after which a sweep shows what it has."""
NOTHING_SEEN = 0.01
"""The relative change of throughput below which a lever buys nothing."""

Outcome = LeverResult | str | None
"""A run's result, the reason why the server does not start, or None before the run."""
Effect = Literal["waiting", "refused", "starts", "faster", "slower", "nothing"]


class Step(NamedTuple):
    """One lever's place in an order: the outcome before it, and the outcome with it."""

    before: Outcome
    after: Outcome

    @property
    def factor(self) -> float | None:
        """Return the ratio of throughputs, or None if either does not run."""
        if isinstance(self.before, LeverResult) and isinstance(self.after, LeverResult):
            return self.after.tokens_per_second / self.before.tokens_per_second
        return None

    @property
    def effect(self) -> Effect:
        """Return what the lever does to the throughput, in one word."""
        if self.before is None or self.after is None:
            return "waiting"
        if isinstance(self.after, str):
            return "refused"
        if self.factor is None:
            return "starts"
        if abs(self.factor - 1) < NOTHING_SEEN:
            return "nothing"
        return "faster" if self.factor > 1 else "slower"


@dataclass(frozen=True)
class Row:
    """One lever with its step in each order; it has no steps if it is off."""

    field: str
    title: str
    steps: tuple[Step, ...]


@dataclass(frozen=True)
class State:
    """The levers and their results."""

    gpu: str
    requests: str
    """A key of REQUESTS."""
    slots: int
    level: float
    """The limit of the time between two tokens, in seconds."""
    levers: Levers
    rows: tuple[Row, ...]
    """All levers, in the ranking's order."""
    nothing: Outcome
    everything: Outcome
    """The outcome with all levers that are on."""
    by_slots: tuple[Outcome, ...]
    """The outcomes with all levers that are on, for each of SLOTS."""

    @property
    def on(self) -> tuple[Row, ...]:
        """Return the levers that are on."""
        return tuple(row for row in self.rows if row.steps)

    @property
    def complete(self) -> bool:
        """Return whether everything has been run."""
        rungs = all(step.effect != "waiting" for row in self.on for step in row.steps)
        return rungs and None not in (self.nothing, *self.by_slots)

    def trouble(self, outcome: Outcome) -> str:
        """Return what goes wrong: "refused" (the server does not start), "late" (tokens arrive too
        late), "preempts" (requests are preempted), or "" if nothing does.
        """
        if outcome is None:
            return ""
        if isinstance(outcome, str):
            return "refused"
        if outcome.inter_token_latency > self.level:
            return "late"
        return "preempts" if outcome.preemptions else ""

    def factor(self, field: str, reverse: bool = False) -> float | None:
        """Return the factor that this lever buys in its place, or None if it is off or not known
        yet.
        """
        steps = next(row.steps for row in self.rows if row.field == field)
        return steps[reverse].factor if steps else None


class Setting(NamedTuple):
    """One setting of the knobs."""

    gpu: str
    requests: str
    slots: int
    level: int
    fields: tuple[str, ...]
    """The levers that are on, in the ranking's order."""

    def known(self, slots: int, levers: Levers) -> Outcome:
        """Return the outcome with these levers, or None if it has not been run."""
        return _RUNS.get((self.gpu, self.requests, slots, levers))

    def ladder(self, reverse: bool = False) -> tuple[Levers, ...]:
        """List the sets of levers from none to all that are on, one lever at a time."""
        return tuple(accumulate(reversed(self.fields) if reverse else self.fields, _pull, initial=Levers()))


_RUNS: dict[tuple[str, str, int, Levers], Outcome] = {}
"""All outcomes so far. Ten thousand, an hour of turning knobs, take a few hundred bytes each."""


def sweep(
    gpu: str = START["gpu"],
    requests: str = START["requests"],
    slots: int = START["slots"],
    level: int = START["level"],
    **levers: bool,
) -> State | Iterator[State]:
    """Serve a workload with no lever and then with one more at a time, in both orders, and with
    other numbers of requests at once.

    Args:
        gpu: One of GPUS.
        requests: "chats" (ShareGPT's lengths behind one system prompt), "mixed" (chats and
            completions of code, nothing shared) or "code" (completions of code, prompts of up to
            7,436 tokens).
        slots: Requests that may run at once, one of SLOTS.
        level: The limit of the time between two tokens in milliseconds, one of LEVELS.
        levers: Fields of `minivllm_simulate.levers.Levers`, on or off; others are as in START.

    Returns:
        The state if all its runs have been done before, else a generator of states.
    """
    fields = tuple(field for field in FIELDS if levers.get(field, START[field]))
    setting = Setting(gpu, requests, slots, level, fields)
    state = _state(setting)
    return state if state.complete else _states(setting)


def _states(setting: Setting) -> Iterator[State]:
    """Yield a state once both ends have been run, and then whenever more results are known."""
    started = time.process_time()
    for index, (slots, levers) in enumerate(_runs_of(setting)):
        _run(setting, slots, levers)
        if index == 1 or (index and time.process_time() - started > CHUNK):
            yield _state(setting)
            started = time.process_time()
    yield _state(setting)


def _runs_of(setting: Setting) -> Iterator[tuple[int, Levers]]:
    """Yield all runs: both ends, both orders, and other numbers of requests at once."""
    everything = setting.ladder()[-1]
    yield from ((setting.slots, levers) for levers in (everything, Levers()))
    for reverse in (False, True):
        yield from ((setting.slots, levers) for levers in setting.ladder(reverse))
    yield from ((slots, everything) for slots in SLOTS)


def _run(setting: Setting, slots: int, levers: Levers) -> None:
    """Run this setting unless it has been run already."""
    if setting.known(slots, levers) is not None:
        return
    try:
        outcome: Outcome = throughput(levers, _model(), get_hardware(setting.gpu), _workload(setting.requests, slots))
    except MinivllmError as error:
        outcome = str(error)
    _RUNS[setting.gpu, setting.requests, slots, levers] = outcome


def _state(setting: Setting) -> State:
    """Build a state from the results so far."""
    orders = [[setting.known(setting.slots, levers) for levers in setting.ladder(reverse)] for reverse in (False, True)]
    forth, back = ([Step(*pair) for pair in pairwise(order)] for order in orders)
    steps = dict(zip(setting.fields, zip(forth, reversed(back), strict=True), strict=True))
    everything = setting.ladder()[-1]
    return State(
        gpu=setting.gpu,
        requests=setting.requests,
        slots=setting.slots,
        level=setting.level / 1000,
        levers=everything,
        rows=tuple(Row(field, TITLES[field], steps.get(field, ())) for field in FIELDS),
        nothing=orders[0][0],
        everything=orders[0][-1],
        by_slots=tuple(setting.known(slots, everything) for slots in SLOTS),
    )


def _pull(levers: Levers, field: str) -> Levers:
    return LADDER[FIELDS.index(field)].pull(levers)


@cache
def _model() -> ModelConfig:
    return known_model(MODEL)


@cache
def _workload(requests: str, slots: int) -> LeverWorkload:
    make = {"chats": shared_chat, "mixed": long_and_short, "code": _code}[requests]
    work = make(max(FEWEST_REQUESTS, WAVES * slots), shorter=SHORTER)
    longest = MAX_MODEL_LEN[requests]
    fitting = tuple(request for request in work.requests if request.prompt_tokens + request.output_tokens <= longest)
    return replace(work, requests=fitting, max_model_len=longest, max_num_seqs=slots, acceptance=ACCEPTANCE)


def _code(count: int, shorter: int) -> LeverWorkload:
    """Create code completions with the Azure trace's lengths, spread evenly by multiples of two
    irrational numbers.

    With random draws, the mean of so few requests would vary with the number of requests at once.
    The answers are short already.
    """
    del shorter
    code = WORKLOADS["azure-code"]
    ranks = [((0.5 + 0.7548776662 * index) % 1, (0.5 + 0.5698402910 * index) % 1) for index in range(count)]
    lengths = [(code.prompt.quantile(rank), code.output.quantile(other)) for rank, other in ranks]
    return LeverWorkload("code", "", tuple(SimulatedRequest(*pair) for pair in lengths))


def weight_bytes(levers: Levers) -> int:
    """Return the bytes of the weights on one GPU."""
    return lever_weight_bytes(levers, lever_model(levers, _model()))
