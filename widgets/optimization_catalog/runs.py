"""Lesson 05's levers: what each buys in the ranking's order and in the reverse, and with few or many requests at once.

The engine's own scheduler and block pool serve a workload under every set of levers; the time of a step is modelled
(`minivllm_simulate.levers`). A run is done once and kept.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from itertools import accumulate, pairwise
from typing import Any, Literal, NamedTuple

from minivllm.config import ModelConfig
from minivllm.config.checks import require
from minivllm.errors import MinivllmError
from minivllm_simulate.hardware import get_hardware
from minivllm_simulate.known_models import known_model
from minivllm_simulate.lever_checks import known_error, published_checks
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
REQUESTS = {"chats": "chats, one prompt", "mixed": "long and short", "code": "code, up to 8K"}
MAX_MODEL_LEN = {"chats": 4096, "mixed": 4096, "code": 8192}
SLOTS: tuple[int, ...] = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64)
FEWER_SLOTS = (1, 2, 4, 8, 16, 32, 64)
"""Where the sets of levers are run that are only compared with."""
LEVELS = (5, 10, 20, 30, 50, 100, 200)
"""Milliseconds between two tokens that may be asked for."""
FEWEST_REQUESTS, WAVES = 16, 2
"""A run serves twice as many requests as run at once, and at least 16."""
SHORTER = 4
"""Factor by which answers are shorter than ShareGPT's, to keep redraws fast; their relative spread is unchanged."""
ACCEPTANCE = 0.6
"""The chance that a draft is right when those before it were."""
FIELDS = tuple(rung.field for rung in LADDER)
TITLES = {rung.field: rung.title for rung in LADDER} | {
    "gqa": "grouped heads", "speculative_tokens": "speculation", "tensor_parallel": "two GPUs",
}  # fmt: skip
"""Of the levers, in the picture and on the switches: those of `LADDER`, some of which have no room there."""
START: dict[str, Any] = {
    "gpu": "L4",
    "requests": "chats",
    "slots": 16,
    "level": 30,
    **{field: field != "tensor_parallel" for field in FIELDS},
}
CHUNK = 0.02
"""Seconds of processor time after which a sweep shows what it has."""
NOTHING_SEEN = 0.01
"""A lever that changes the throughput by less buys nothing."""

Outcome = LeverResult | str | None
"""Of a run: its results; why the server does not start; None where it has not been run yet."""
Effect = Literal["waiting", "refused", "starts", "faster", "slower", "nothing"]


class Step(NamedTuple):
    """One lever in its place in an order: what there was before it, and what there is with it."""

    before: Outcome
    after: Outcome

    @property
    def factor(self) -> float | None:
        """Tokens per second against before; None where one of the two does not run."""
        if isinstance(self.before, LeverResult) and isinstance(self.after, LeverResult):
            return self.after.tokens_per_second / self.before.tokens_per_second
        return None

    @property
    def effect(self) -> Effect:
        """The factor in a word."""
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
    """One lever, with its step in the ranking's order and the one in the reverse; no steps where it is off."""

    field: str
    title: str
    steps: tuple[Step, ...]


@dataclass(frozen=True)
class Curve:
    """A set of levers, served with each number of slots."""

    name: str
    slots: tuple[int, ...]
    outcomes: tuple[Outcome, ...]


@dataclass(frozen=True)
class State:
    """The levers as they stand."""

    gpu: str
    requests: str
    """Key of REQUESTS."""
    slots: int
    level: float
    """Seconds between two tokens of a request that are asked for."""
    levers: Levers
    rows: tuple[Row, ...]
    """All levers, in the ranking's order."""
    nothing: Outcome
    everything: Outcome
    """With all levers that are on."""
    curves: tuple[Curve, ...]
    """All that are on; and to compare, nothing and the biggest levers alone, as soon as it is known which they are."""
    error: str | None
    """Of the lever model, median on published figures; None until it is computed."""

    @property
    def on(self) -> tuple[Row, ...]:
        """The levers that are on."""
        return tuple(row for row in self.rows if row.steps)

    @property
    def complete(self) -> bool:
        """Has everything been run?"""
        rungs = all(step.effect != "waiting" for row in self.on for step in row.steps)
        compared = len(self.on) < 2 or len(self.curves) > 2
        return rungs and compared and all(None not in one.outcomes for one in self.curves) and self.error is not None

    def trouble(self, outcome: Outcome) -> str:
        """What breaks: "refused" (the server does not start), "late" (tokens), "preempts", or nothing."""
        if outcome is None:
            return ""
        if isinstance(outcome, str):
            return "refused"
        if outcome.inter_token_latency > self.level:
            return "late"
        return "preempts" if outcome.preemptions else ""

    def factor(self, field: str, reverse: bool = False) -> float | None:
        """What this lever buys in its place; None where it is off or cannot be told."""
        steps = next(row.steps for row in self.rows if row.field == field)
        return steps[reverse].factor if steps else None


class Asked(NamedTuple):
    """A setting of the knobs."""

    gpu: str
    requests: str
    slots: int
    level: int
    fields: tuple[str, ...]
    """The levers that are on, in the ranking's order."""

    def known(self, slots: int, levers: Levers) -> Outcome:
        """The run with these levers, if it has been done."""
        return _RUNS.get((self.gpu, self.requests, slots, levers))

    def ladder(self, reverse: bool = False) -> tuple[Levers, ...]:
        """From nothing on to all that are on, one lever after another."""
        return tuple(accumulate(reversed(self.fields) if reverse else self.fields, _pull, initial=Levers()))

    def alone(self) -> dict[str, Levers]:
        """Each lever that is on, with no other; none where no other is on."""
        return {field: _pull(Levers(), field) for field in self.fields} if len(self.fields) > 1 else {}

    def biggest(self) -> list[str]:
        """The two levers that buy most alone; none as long as one of them has not been run."""
        runs = {field: self.known(self.slots, levers) for field, levers in self.alone().items()}
        rates = {field: run.tokens_per_second for field, run in runs.items() if isinstance(run, LeverResult)}
        return [] if None in runs.values() else sorted(rates, key=lambda field: -rates[field])[:2]


_RUNS: dict[tuple[str, str, int, Levers], Outcome] = {}
"""Runs that were done. A reader who turns knobs for an hour does some ten thousand; a result is a few hundred bytes."""


def sweep(
    gpu: str = START["gpu"],
    requests: str = START["requests"],
    slots: int = START["slots"],
    level: int = START["level"],
    **levers: bool,
) -> State | Iterator[State]:
    """Serve a workload with no lever on, then with one after another, in both orders; and at other numbers of slots.

    Args:
        gpu: one of GPUS.
        requests: "chats" (ShareGPT's lengths behind one system prompt), "mixed" (chats and completions of code, nothing
            shared) or "code" (completions of code, prompts of up to 7,436 tokens).
        slots: requests that may run at once, one of SLOTS.
        level: milliseconds between two tokens of a request that are asked for, one of LEVELS.
        levers: fields of `minivllm_simulate.levers.Levers`, on or off; those that are not named are as in START.

    Returns:
        The state, if all its runs have been done before; else states that are more and more complete.

    Raises:
        MinivllmError: a value makes no sense.
    """
    given = {"gpu": gpu, "requests": requests, "slots": slots, "level": level}
    for (name, value), allowed in zip(given.items(), (GPUS, REQUESTS, SLOTS, LEVELS), strict=True):
        require(value in allowed, f"{name} is one of {', '.join(map(str, allowed))}, not {value!r}")
    for field, is_on in levers.items():
        require(field in FIELDS, f"there is no lever {field!r}; there are {', '.join(FIELDS)}")
        require(isinstance(is_on, bool), f"{field} is on (True) or off (False), not {is_on!r}")
    asked = Asked(gpu, requests, slots, level, tuple(field for field in FIELDS if levers.get(field, START[field])))
    state = _state(asked)
    return state if state.complete else _states(asked)


def _states(asked: Asked) -> Iterator[State]:
    """A state as soon as nothing and everything have been run, then each time that some more is known."""
    started = time.process_time()
    for index, (slots, levers) in enumerate(_wanted(asked)):
        _run(asked, slots, levers)
        if index == 1 or (index and time.process_time() - started > CHUNK):
            yield _state(asked)
            started = time.process_time()
    published_checks()
    yield _state(asked)


def _wanted(asked: Asked) -> Iterator[tuple[int, Levers]]:
    """What is to be run: both ends, both orders, two curves, each lever alone, and the curves of the biggest."""
    everything = asked.ladder()[-1]
    yield from ((asked.slots, levers) for levers in (everything, Levers()))
    for reverse in (False, True):
        yield from ((asked.slots, levers) for levers in asked.ladder(reverse))
    yield from ((slots, everything) for slots in SLOTS)
    yield from ((slots, Levers()) for slots in FEWER_SLOTS)
    yield from ((asked.slots, levers) for levers in asked.alone().values())
    for field in asked.biggest():
        yield from ((slots, _pull(Levers(), field)) for slots in FEWER_SLOTS)


def _run(asked: Asked, slots: int, levers: Levers) -> None:
    """Run what has not been run yet."""
    if asked.known(slots, levers) is not None:
        return
    try:
        found = throughput(levers, _model(), get_hardware(asked.gpu), _workload(asked.requests, slots))
    except MinivllmError as error:
        found = str(error)
    _RUNS[asked.gpu, asked.requests, slots, levers] = found


def _state(asked: Asked) -> State:
    """What is known."""
    orders = [[asked.known(asked.slots, levers) for levers in asked.ladder(reverse)] for reverse in (False, True)]
    forth, back = ([Step(*pair) for pair in pairwise(order)] for order in orders)
    found = dict(zip(asked.fields, zip(forth, reversed(back), strict=True), strict=True))
    everything = asked.ladder()[-1]
    compared = {"nothing on": Levers()}
    compared |= {f"{TITLES[field]} alone": _pull(Levers(), field) for field in asked.biggest()}
    curves = [_curve(asked, _together(len(asked.fields)), everything, SLOTS)]
    curves += [_curve(asked, name, levers, FEWER_SLOTS) for name, levers in compared.items()]
    return State(
        gpu=asked.gpu,
        requests=asked.requests,
        slots=asked.slots,
        level=asked.level / 1000,
        levers=everything,
        rows=tuple(Row(field, TITLES[field], found.get(field, ())) for field in FIELDS),
        nothing=orders[0][0],
        everything=orders[0][-1],
        curves=tuple(curves if found else curves[:1]),
        error=known_error("decode", "prefill") if published_checks.cache_info().currsize else None,
    )


def _curve(asked: Asked, name: str, levers: Levers, slots: tuple[int, ...]) -> Curve:
    return Curve(name, slots, tuple(asked.known(one, levers) for one in slots))


def _together(count: int) -> str:
    return f"all {count} on" if count > 1 else "the one on" if count else "nothing on"


def _pull(levers: Levers, field: str) -> Levers:
    return LADDER[FIELDS.index(field)].pull(levers)


@cache
def _model() -> ModelConfig:
    return known_model(MODEL)


@cache
def _workload(requests: str, slots: int) -> LeverWorkload:
    make = {"chats": shared_chat, "mixed": long_and_short, "code": _code}[requests]
    work, longest = make(max(FEWEST_REQUESTS, WAVES * slots), shorter=SHORTER), MAX_MODEL_LEN[requests]
    fitting = tuple(one for one in work.requests if one.prompt_tokens + one.output_tokens <= longest)
    return replace(work, requests=fitting, max_model_len=longest, max_num_seqs=slots, acceptance=ACCEPTANCE)


def _code(count: int, shorter: int) -> LeverWorkload:
    """Completions of code: the Azure trace's lengths, spread evenly by multiples of two irrational numbers.

    Few random draws have another mean from one number of slots to the next. Answers are short as they are.
    """
    del shorter
    code = WORKLOADS["azure-code"]
    ranks = [((0.5 + 0.7548776662 * index) % 1, (0.5 + 0.5698402910 * index) % 1) for index in range(count)]
    lengths = [(code.prompt.quantile(one), code.output.quantile(other)) for one, other in ranks]
    return LeverWorkload("code", "", tuple(SimulatedRequest(*pair) for pair in lengths))


def weight_bytes(levers: Levers) -> int:
    """Bytes of the weights on one GPU."""
    return lever_weight_bytes(levers, lever_model(levers, _model()))
