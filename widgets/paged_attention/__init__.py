"""Lesson 02: what a block size costs, in memory and in the kernel, and a block pool that plays step by step.

Both costs are counted over many requests, by `minivllm_simulate`. The pool that plays is the engine's own `BlockPool`,
or the reader's. The times of a CPU come from the results that lesson 02's script left.

The picture in the lesson's text: `uv run python -P -m widgets paged_attention lessons/figures/02_pool.svg`
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from minivllm.config.checks import require
from minivllm.core.block_pool import BlockPool
from minivllm_lab.bounded import bounded
from minivllm_lab.paged_attention.block_size_costs import Moment, fetched_in_vain, held, moments
from minivllm_lab.paged_attention.paged_traffic import LINE, SECTOR
from minivllm_lab.paged_attention.played_pool import Play, play_pool
from minivllm_simulate.workloads import WORKLOADS, RequestLengths, Workload, workload
from widgets.paged_attention.figure import draw, percent, slots, times
from widgets.shell.knobs import choice, entry, steps
from widgets.shell.lesson_widget import LessonWidget
from widgets.shell.spec import Challenge, Guess, Progress, Spec, Verdict

SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
SMALLEST = 16
"""The least that a kernel takes: vLLM's FlashAttention, FlashInfer, Triton and FlexAttention, for keys and values."""
SAMPLES = (1, 2, 4, 8)
LONGEST = 2048
"""Tokens of the longest request that is let in, as in the lesson."""
SEEN, PLAYED, MOST_BLOCKS = 400, 9, 40
"""Requests that are counted, requests that are played, and blocks of the pool that is drawn."""
PATIENCE = 1.0
"""Seconds of the processor that a play with the reader's pool may take; with ours it takes some thousandths."""
RESULTS = Path(__file__).resolve().parents[2] / "benchmarks" / "results"


@dataclass(frozen=True)
class Kernel:
    """How attention looks blocks up."""

    words: str
    piece: int
    """Bytes that are fetched for one entry."""
    per_token: bool = False


KERNELS = {
    "sector": Kernel("once a block, 32 bytes", SECTOR),
    "line": Kernel("once a block, 128 bytes", LINE),
    "token": Kernel("once a token, 32 bytes", SECTOR, per_token=True),
}
ROWS = {256: "128 × bf16", 128: "128 × fp8", 64: "64 × fp8"}
"""Bytes of a token's keys in one KV head -> what they are."""
MODELS = {256: "Qwen/Qwen3-8B", 128: "Qwen/Qwen3-8B --kv-cache-dtype fp8"}
SMALL_HEADS = "meta-llama/Llama-3.2-1B-Instruct --kv-cache-dtype fp8"
EMPTY_ALLOWED = (0.01, 0.02, 0.05, 0.1, 0.2, 0.4)
FACTORS_ALLOWED = (1.01, 1.02, 1.05, 1.1, 1.25, 1.5)


@dataclass(frozen=True)
class Valley:
    """The block size at which the sum of both costs is least, for requests of one kind, where a kernel takes it."""

    title: str
    block_size: int
    cost: float


@dataclass(frozen=True)
class State:
    """Both costs of every block size, and a pool that plays."""

    block_size: int
    title: str
    """Of the requests."""
    samples: int
    kernel: str
    """A key of `KERNELS`."""
    row_bytes: int
    empty_allowed: float
    factor_allowed: float
    tokens: float
    """Tokens of a sequence at an average moment."""
    empty: Mapping[int, float]
    """Block size -> share of the held slots that are empty."""
    extra: Mapping[int, float]
    """Block size -> bytes fetched in vain for each byte needed; modelled."""
    saved: float
    """The share of blocks that sharing saves."""
    valley: Valley
    others: tuple[Valley, ...]
    """Of the other kinds of requests."""
    cpu: str
    """Where attention was measured; "" if nowhere."""
    measured: Mapping[int, float]
    """Block size -> time of attention over that of a contiguous cache."""
    play: Play
    own: bool
    """The pool that plays is the reader's."""

    @property
    def cost(self) -> Mapping[int, float]:
        """Block size -> the sum of both costs."""
        return {size: self.empty[size] + self.extra[size] for size in self.empty}

    @property
    def breaks(self) -> tuple[bool, bool, bool]:
        """At this block size: too much is empty, too much is fetched, no kernel takes it."""
        size = self.block_size
        return self.empty[size] > self.empty_allowed, self.over(size), size < SMALLEST

    def over(self, size: int) -> bool:
        """Whether the kernel fetches more than is allowed at this block size."""
        return 1 + self.extra[size] > self.factor_allowed

    @property
    def balance(self) -> float:
        """Where half an empty block and one look-up a block cost the same: √(2 · tokens · fetch / bytes of a token)."""
        return math.sqrt(2 * self.tokens * KERNELS[self.kernel].piece / (2 * self.row_bytes))


def sweep(
    block_size: int = 16,
    requests: str = "alpaca",
    file: str = "",
    samples: int = 2,
    kernel: str = "sector",
    row_bytes: int = 256,
    empty_allowed: float = 0.1,
    factor_allowed: float = 1.02,
    block_pool: Callable[[int], Any] | None = None,
) -> State:
    """Count both costs of every block size, and play a small pool at this one.

    Args:
        block_size: token slots in a block.
        requests: a workload of `minivllm_simulate.workloads`.
        file: a file with lengths of one's own, in their place.
        samples: answers to each request, which share the full blocks of its prompt.
        kernel: a key of `KERNELS`.
        row_bytes: bytes of a token's keys in one KV head.
        empty_allowed: the share of held slots that may be empty.
        factor_allowed: bytes that may be fetched for each byte needed.
        block_pool: the reader's class, with the methods of exercise 02's `BlockPool`.

    Raises:
        MinivllmError: a value that no knob has, or requests that are all too long.
    """
    SPEC.accept({name: value for name, value in locals().items() if name != "block_pool"})
    kind = workload(file.strip() or requests)
    seen = _seen(kind)
    extra = {size: _extra(kind, size, row_bytes, kernel) for size in SIZES}
    others = [other for other in WORKLOADS.values() if other is not kind]
    cpu, measured = _measured()
    return State(
        block_size=block_size,
        title=kind.title,
        samples=samples,
        kernel=kernel,
        row_bytes=row_bytes,
        empty_allowed=empty_allowed,
        factor_allowed=factor_allowed,
        tokens=sum(one.weight * one.tokens for one in seen) / sum(one.weight for one in seen),
        empty={size: _empty(kind, size, samples) for size in SIZES},
        extra=extra,
        saved=held(seen, block_size, samples).saved,
        valley=_valley(kind, samples, row_bytes, kernel),
        others=tuple(_valley(other, samples, row_bytes, kernel) for other in others),
        cpu=cpu,
        measured=measured,
        play=_played(_few(kind), block_size, samples, block_pool),
        own=block_pool is not None,
    )


@lru_cache(maxsize=16)
def _lengths(kind: Workload) -> tuple[RequestLengths, ...]:
    found = tuple(one for one in kind.sample(2000) if one.total <= LONGEST)[:SEEN]
    require(bool(found), f"{kind.title}: no request has at most {LONGEST:,} tokens, prompt and output together")
    return found


@lru_cache(maxsize=16)
def _seen(kind: Workload) -> tuple[Moment, ...]:
    return moments(_lengths(kind))


@lru_cache(maxsize=16)
def _few(kind: Workload) -> tuple[RequestLengths, ...]:
    """Some that stand for all: evenly from the shortest to the longest, in an order without order."""
    ordered = sorted(_lengths(kind), key=lambda one: one.total)
    places = [place * 4 % PLAYED for place in range(PLAYED)]
    return tuple(ordered[len(ordered) * (2 * place + 1) // (2 * PLAYED)] for place in places)


@lru_cache(maxsize=1024)
def _empty(kind: Workload, size: int, samples: int) -> float:
    return held(_seen(kind), size, samples).empty


@lru_cache(maxsize=1024)
def _extra(kind: Workload, size: int, row_bytes: int, kernel: str) -> float:
    how = KERNELS[kernel]
    return fetched_in_vain(_seen(kind), size, row_bytes, how.piece, per_token=how.per_token)


def _valley(kind: Workload, samples: int, row_bytes: int, kernel: str) -> Valley:
    taken = [size for size in SIZES if size >= SMALLEST]
    cost = {size: _empty(kind, size, samples) + _extra(kind, size, row_bytes, kernel) for size in taken}
    least = min(taken, key=lambda size: cost[size])
    return Valley(kind.title, least, cost[least])


@lru_cache(maxsize=64)
def _played(lengths: tuple[RequestLengths, ...], size: int, samples: int, own: Callable[[int], Any] | None) -> Play:
    if own is None:
        return play_pool(lengths, size, samples, MOST_BLOCKS, BlockPool)
    with bounded(PATIENCE, "your block pool"):
        return play_pool(lengths, size, samples, MOST_BLOCKS, own)


@lru_cache(maxsize=1)
def _measured() -> tuple[str, Mapping[int, float]]:
    """The CPU on which lesson 02 was measured, and attention's time there by block size; ("", {}) without one."""
    for path in sorted(RESULTS.glob("02_paged_attention.*.json")):
        record = json.loads(path.read_text())
        if record["machine"]["gpu"] is None:
            ratio = record["figures"]["blocks"]["price"]["ratio"]
            return record["machine"]["cpu"], {int(size): value for size, value in ratio.items()}
    return "", {}


def figure(state: State, width: float = 640, pinned: State | None = None) -> str:
    """Both costs over the block size with where they break, and below it the pool as it plays."""
    return draw(state, width, pinned, verdict(state).words)


def verdict(state: State) -> Verdict:
    """What this block size means, in one line."""
    size, (empty, extra) = state.block_size, (state.empty[state.block_size], state.extra[state.block_size])
    if state.play.fault:
        whose = "Your pool" if state.own else "The pool"
        return Verdict(f"{whose} is wrong: {state.play.fault}. The player shows where.", "broken")
    is_ = f"{slots(size)}: {percent(empty, state.empty_allowed)} of the held slots are empty"
    fetched = f"the kernel fetches {times(1 + extra, state.factor_allowed)} the bytes it needs"
    best = f"Cheapest for these requests: {state.valley.block_size}."
    if size < SMALLEST:
        return Verdict(f"{slots(size)}: no kernel of vLLM's takes fewer than {SMALLEST}. {best}", "broken")
    limits = [f"{percent(state.empty_allowed)} may be empty"] * state.breaks[0]
    limits += [f"{times(state.factor_allowed)} may be fetched"] * state.breaks[1]
    if limits:
        return Verdict(f"{is_}, and {fetched} (modelled). Too much: {' and '.join(limits)}. {best}", "broken")
    tight = state.cost[size] > 1.5 * state.valley.cost
    return Verdict(f"{is_}, and {fetched} (modelled). {best}", "tight" if tight else "fine")


def command(state: State) -> str:
    """The `vllm serve` line of this block size."""
    lines = [f"vllm serve {MODELS.get(state.row_bytes, SMALL_HEADS)} --block-size {state.block_size}"]
    if state.block_size < SMALLEST:
        lines.append(f"# refused: no attention backend takes blocks of fewer than {SMALLEST}")
    if state.samples > 1:
        lines.append(f'# the client asks for the samples: "n": {state.samples} in the request')
    lines.append("# no flag says how the kernel looks blocks up")
    return "\n".join(lines)


_LIMITS = (0.1, 1.02)
"""Of the first two challenges, and at the start."""
SAVED = 0.75
"""The share of blocks that sharing must save in the second."""


def _figures(state: State) -> str:
    empty, extra = state.empty[state.block_size], state.extra[state.block_size]
    return f"{percent(empty, state.empty_allowed)} are empty, {times(1 + extra, state.factor_allowed)} fetched."


def _limits_moved(state: State) -> bool:
    return (state.empty_allowed, state.factor_allowed) != _LIMITS


def _keep_64(state: State) -> Progress:
    words = f"{slots(state.block_size)}: {_figures(state)}"
    if _limits_moved(state):
        return Progress(False, words, "The limits have moved: 10 % may be empty, and 1.02 × fetched.")
    if state.block_size != 64:
        return Progress(False, words, "Set the block size to 64.")
    advice = "The requests, and the samples: half of each last block is empty, so each must have many."
    return Progress(not any(state.breaks), words, advice)


def _sharing_pays(state: State) -> Progress:
    words = f"Sharing saves {percent(state.saved, SAVED)} of the blocks; {_figures(state)}"
    enough = state.saved >= SAVED
    if _limits_moved(state):
        advice = "The limits have moved: 10 % may be empty, and 1.02 × fetched."
    elif not enough and state.samples < 8:
        advice = "The samples: what two share is saved once, what eight share seven times."
    elif not enough:
        advice = "The requests: samples share the prompt, never what they write. Who asks much and wants little?"
    elif state.breaks[2]:
        advice = f"Enough is saved. The block size: no kernel takes fewer than {SMALLEST}."
    elif state.breaks[0] and state.block_size > SMALLEST:
        advice = "Enough is saved. The block size: each sample has a last block of its own, half empty."
    elif state.breaks[0]:
        advice = "More than enough is saved. Fewer samples: each has a last block of its own, half empty."
    else:
        advice = "Enough is saved. The kernel fetches too much: its look-ups, or too small blocks."
    return Progress(enough and not any(state.breaks) and not _limits_moved(state), words, advice)


def _valley_moves(state: State) -> Progress:
    valley, size = state.valley, state.block_size
    met = valley.block_size >= 64 and size == valley.block_size
    words = f"The valley is at {valley.block_size}; you stand at {size}. "
    words += f"√(2 × {state.tokens:.0f} × {KERNELS[state.kernel].piece} / {2 * state.row_bytes}) = {state.balance:.3g}."
    if valley.block_size >= 64:
        advice = "The valley is there. Stand in it."
    elif KERNELS[state.kernel].per_token:
        advice = "The kernel: it looks up every token, so larger blocks save it nothing."
    elif state.row_bytes > 64:
        advice = "The bytes of a token: the fewer a block brings, the dearer is its look-up."
    elif state.kernel != "line":
        advice = "The kernel: with 128 bytes to a look-up, each must serve more tokens."
    elif state.samples > 1:
        advice = "The samples: each has an end of its own. Ask for one answer."
    else:
        advice = "The requests: the longer they are, the less half a block weighs."
    return Progress(met, words, advice)


CHALLENGES = (
    Challenge(
        "A kernel that takes blocks of 64 only, as FlashMLA does: find requests that keep both limits with it.",
        _keep_64,
        "Half of 64 slots is little for long texts. Requests like Alpaca's would leave more than a quarter empty.",
    ),
    Challenge(
        f"Let sharing save {SAVED:.0%} of the blocks, within both limits as they are at the start.",
        _sharing_pays,
        "Only the common beginning is shared; today vLLM shares it between any two requests (lesson 05).",
    ),
    Challenge(
        "Move the valley to blocks of 64 or more, and stand in it.",
        _valley_moves,
        "Half an empty block against a look-up a block: the valley is near √(2 · tokens · fetch / bytes of a token).",
    ),
)
_KINDS = [(kind.title, name) for name, kind in WORKLOADS.items()]
_KNOBS = {
    "The cache": {
        "block_size": steps("Block size", SIZES, 16, "token slots in a block; vLLM's default is 16"),
        "row_bytes": choice("Keys of a token", [(words, size) for size, words in ROWS.items()], 256,
                            "numbers of one KV head, and their type; its values have as many"),
        "kernel": choice("Kernel looks up", [(how.words, name) for name, how in KERNELS.items()], "sector",
                         "when it reads the block table, and what a read of 4 bytes fetches"),
    },
    "The requests": {
        "requests": choice("Lengths as in", _KINDS, "alpaca", "how long prompts and answers are"),
        "file": entry("… or a file", "", "lengths.csv", "CSV with prompt and output tokens, or JSON of vllm bench"),
        "samples": steps("Samples", SAMPLES, 2, "answers to each request; they share the prompt's full blocks"),
    },
    "What is allowed": {
        "empty_allowed": steps("Empty slots", [(f"{share:.0%}", share) for share in EMPTY_ALLOWED], 0.1,
                               "share of the held slots without a token"),
        "factor_allowed": steps("Bytes fetched", [(f"{factor:g} ×", factor) for factor in FACTORS_ALLOWED], 1.02,
                                "for each byte of keys and values that is needed"),
    },
}  # fmt: skip
SPEC = Spec(
    name="paged_attention",
    title="What a block size costs, and who holds which block",
    lead="Drag the block size along the valley; then play the pool, and point at a request.",
    knobs=_KNOBS,
    presets={
        "Too large": {"block_size": 512},
        "Too small": {"block_size": 1, "kernel": "line"},
        "Long prompts, 8 samples": {"requests": "azure-code", "samples": 8},
    },
    sweep=sweep,
    figure=figure,
    verdict=verdict,
    command=command,
    challenges=CHALLENGES,
    guess=Guess(
        "Blocks of 16, and requests of some 80 tokens, as Alpaca's. What share of the held slots is empty?",
        ("1 %", "10 %", "20 %", "50 %"),
        1,
        "The last block of each request is half empty: about 8 slots beside 80 tokens.",
    ),
    own={"block_pool": "the pool of exercise 02: get_num_free_blocks, get_new_blocks, touch, free_blocks"},
)  # fmt: skip


def show(**knobs: Any) -> LessonWidget:
    """The widget; `show(block_size=64)` sets a knob, `show(block_pool=BlockPool)` plays the reader's own pool."""
    return LessonWidget(SPEC, **knobs)
