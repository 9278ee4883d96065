"""Show what a block size costs, in memory and in the kernel, and animate a block pool step by step.

`minivllm_simulate` counts both costs over many requests. The animated pool is the engine's own
`BlockPool`, or the reader's.

Draw the lesson's figure with `uv run python -P -m widgets paged_attention
lessons/figures/02_pool.svg`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from minivllm.config.checks import require
from minivllm.core.block_pool import BlockPool
from minivllm_lab.checks.bounded import bounded
from minivllm_lab.paged_attention.block_size_costs import LINE, SECTOR, Moment, fetched_in_vain, held, moments
from minivllm_lab.paged_attention.played_pool import Play, play_pool
from minivllm_simulate.workloads import WORKLOADS, RequestLengths, Workload, workload
from widgets.paged_attention.figure import SMALLEST, figure, percent
from widgets.shell.advice import progress
from widgets.shell.knobs import choice, entry, steps
from widgets.shell.live import Live
from widgets.shell.notebook import notebook_widget
from widgets.shell.spec import Challenge, Guess, Progress, Spec, Verdict

SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
SAMPLES = (1, 2, 4, 8)
LONGEST = 2048
"""The longest request that is admitted, in tokens, as in the lesson."""
SEEN, PLAYED, MOST_BLOCKS = 400, 7, 40
"""Requests that count, requests that are played, and blocks of the pool that is drawn."""
PATIENCE = 1.0
"""CPU seconds that a play with the reader's pool may take; ours takes milliseconds."""


@dataclass(frozen=True)
class Kernel:
    """A way for attention to look blocks up."""

    words: str
    piece: int
    """Bytes fetched for one entry."""
    per_token: bool = False


KERNELS = {
    "sector": Kernel("once a block, 32 bytes", SECTOR),
    "line": Kernel("once a block, 128 bytes", LINE),
    "token": Kernel("once a token, 32 bytes", SECTOR, per_token=True),
}
ROWS = {256: "128 numbers, bf16", 128: "128 numbers, fp8", 64: "64 numbers, fp8"}
"""What a token's keys in one KV head are, by their bytes."""
MODELS = {256: "Qwen/Qwen3-8B", 128: "Qwen/Qwen3-8B --kv-cache-dtype fp8"}
SMALL_HEADS = "meta-llama/Llama-3.2-1B-Instruct --kv-cache-dtype fp8"
ALLOWED = (0.01, 0.02, 0.05, 0.1, 0.2, 0.4)


@dataclass(frozen=True)
class State:
    """Both costs of every block size, and an animated pool."""

    block_size: int
    samples: int
    kernel: str
    """A key of `KERNELS`."""
    row_bytes: int
    allowed: float
    """The share that may be wasted, of the slots and of the bytes."""
    tokens: float
    """Mean tokens of a sequence at an average moment."""
    empty: Mapping[int, float]
    """The empty share of the held slots by block size."""
    extra: Mapping[int, float]
    """Bytes fetched in vain per byte needed, by block size; modelled."""
    saved: float
    """The share of blocks that sharing saves."""
    play: Play
    own: bool
    """Whether the pool that plays is the reader's."""

    @property
    def cost(self) -> Mapping[int, float]:
        """Return what is held in vain and fetched in vain by block size, per byte needed."""
        return {size: empty / (1 - empty) + self.extra[size] for size, empty in self.empty.items()}

    @property
    def valley(self) -> int:
        """Return the block size with the lowest total cost, among sizes that a kernel takes."""
        return min((size for size in self.empty if size >= SMALLEST), key=lambda size: self.cost[size])

    @property
    def breaks(self) -> tuple[bool, bool, bool]:
        """Return three flags: too much is empty, too much is fetched, no kernel takes this block
        size.
        """
        size = self.block_size
        return self.empty[size] > self.allowed, self.extra[size] > self.allowed, size < SMALLEST


def sweep(
    block_size: int = 32,
    requests: str = "alpaca",
    file: str = "",
    samples: int = 2,
    kernel: str = "sector",
    row_bytes: int = 256,
    allowed: float = 0.1,
    block_pool: Callable[[int], Any] | None = None,
) -> State:
    """Count both costs of every block size, and run a small pool with this one.

    Args:
        block_size: Token slots in a block.
        requests: A workload of `minivllm_simulate.workloads`.
        file: A file of request lengths, in place of the workload.
        samples: Answers to each request, which share the full blocks of its prompt.
        kernel: A key of `KERNELS`.
        row_bytes: Bytes of a token's keys in one KV head.
        allowed: The share of held slots that may be empty, and of bytes that may be fetched in vain per
            byte needed.
        block_pool: The reader's class, with the methods of exercise 02's `BlockPool`.

    Raises:
        MinivllmError: A knob does not take a value, or all requests are too long.
    """
    SPEC.accept({name: value for name, value in locals().items() if name != "block_pool"})
    kind = workload(file.strip() or requests)
    seen = _seen(kind)
    return State(
        block_size=block_size,
        samples=samples,
        kernel=kernel,
        row_bytes=row_bytes,
        allowed=allowed,
        tokens=sum(moment.weight * moment.tokens for moment in seen) / sum(moment.weight for moment in seen),
        empty={size: _empty(kind, size, samples) for size in SIZES},
        extra={size: _extra(kind, size, row_bytes, kernel) for size in SIZES},
        saved=held(seen, block_size, samples).saved,
        play=_played(_few(kind), block_size, samples, block_pool),
        own=block_pool is not None,
    )


@lru_cache(maxsize=16)
def _lengths(kind: Workload) -> tuple[RequestLengths, ...]:
    fitting = tuple(lengths for lengths in kind.sample(2000) if lengths.total <= LONGEST)[:SEEN]
    require(bool(fitting), f"{kind.title}: no request has at most {LONGEST:,} tokens, prompt and output together")
    return fitting


@lru_cache(maxsize=16)
def _seen(kind: Workload) -> tuple[Moment, ...]:
    return moments(_lengths(kind))


@lru_cache(maxsize=16)
def _few(kind: Workload) -> tuple[RequestLengths, ...]:
    """Choose a few requests that represent all of them: evenly from the shortest to the longest,
    shuffled so that Alpaca's leave as much empty at the end of the play as on average.
    """
    ordered = sorted(_lengths(kind), key=lambda lengths: lengths.total)
    places = [place * 5 % PLAYED for place in range(1, PLAYED + 1)]
    return tuple(ordered[len(ordered) * (2 * place + 1) // (2 * PLAYED)] for place in places)


@lru_cache(maxsize=1024)
def _empty(kind: Workload, size: int, samples: int) -> float:
    return held(_seen(kind), size, samples).empty


@lru_cache(maxsize=1024)
def _extra(kind: Workload, size: int, row_bytes: int, kernel: str) -> float:
    how = KERNELS[kernel]
    return fetched_in_vain(_seen(kind), size, row_bytes, how.piece, per_token=how.per_token)


@lru_cache(maxsize=64)
def _played(lengths: tuple[RequestLengths, ...], size: int, samples: int, own: Callable[[int], Any] | None) -> Play:
    with bounded(PATIENCE, "your block pool"):
        return play_pool(lengths, size, samples, MOST_BLOCKS, own or BlockPool)


def verdict(state: State) -> Verdict:
    """Say in one or two sentences what this block size costs."""
    size = state.block_size
    empty, extra = state.empty[size], state.extra[size]
    if state.play.fault:
        whose = "Your pool" if state.own else "The pool"
        return Verdict(f"{whose} is wrong: {state.play.fault}. Play the pool to see where.", "broken")
    emptiness = f"{percent(empty, state.allowed)} of the held slots empty on average"
    fetched = f"the kernel fetches {percent(extra, state.allowed)} more bytes than it needs"
    best = f"Of the sizes that a kernel takes, {state.valley} is the cheapest."
    if size < SMALLEST:
        return Verdict(f"Blocks of {size}: no kernel in vLLM takes fewer than {SMALLEST} slots. {best}", "broken")
    too_empty, too_much_fetched, _ = state.breaks
    limits = [f"leave {emptiness} ({percent(state.allowed)} allowed)"] * too_empty
    limits += [f"are too many to look up: {fetched} ({percent(state.allowed)} allowed)"] * too_much_fetched
    if limits:
        return Verdict(f"Blocks of {size} {' and '.join(limits)}. {best}", "broken")
    tight = state.cost[size] > 1.5 * state.cost[state.valley]
    return Verdict(
        f"Blocks of {size} leave {emptiness}, and {fetched} (modelled). {best}", "tight" if tight else "fine"
    )


def command(state: State) -> str:
    """Write the `vllm serve` line for this block size."""
    lines = [f"vllm serve {MODELS.get(state.row_bytes, SMALL_HEADS)} --block-size {state.block_size}"]
    if state.block_size < SMALLEST:
        lines.append(f"# refused: no attention backend takes blocks of fewer than {SMALLEST}")
    if state.samples > 1:
        lines.append(f'# the client requests the samples: "n": {state.samples} in the request')
    lines.append("# no flag sets how the kernel looks blocks up")
    return "\n".join(lines)


LIMIT = 0.1
"""The limit of the first two challenges, which its knob starts with."""
LIMIT_FIRST = f"Set the limit back to {percent(LIMIT)}."
SAVED = 0.75
"""The share of blocks that sharing must save in the second challenge."""


def _figures(state: State) -> str:
    empty, extra = state.empty[state.block_size], state.extra[state.block_size]
    return f"{percent(empty, state.allowed)} are empty, {percent(extra, state.allowed)} of bytes in vain."


def _keep_64(state: State) -> Progress:
    return progress(
        f"Blocks of {state.block_size}: {_figures(state)}",
        (state.allowed != LIMIT, LIMIT_FIRST),
        (state.block_size != 64, "Set the block size to 64."),
        (any(state.breaks), "Choose longer requests, or fewer samples: half of each last block is empty."),
    )


def _sharing_pays(state: State) -> Progress:
    enough = state.saved >= SAVED
    too_empty, too_much_fetched, too_small = state.breaks
    return progress(
        f"Sharing saves {percent(state.saved, SAVED)} of the blocks; {_figures(state)}",
        (state.allowed != LIMIT, LIMIT_FIRST),
        (not enough and state.samples < 8, "Raise the samples: two share the prompt once, eight share it seven times."),
        (not enough, "Choose requests with long prompts and short answers: samples share only the prompt."),
        (too_small, f"Raise the block size to {SMALLEST}: no kernel takes fewer slots."),
        (too_empty and state.block_size > SMALLEST, "Lower the block size: each sample's last block is half empty."),
        (too_empty, "Lower the samples: more than enough is saved, and each one's last block is half empty."),
        (too_much_fetched, "Raise the block size or change how the kernel looks blocks up: it fetches too much."),
    )


def _valley_moves(state: State) -> Progress:
    valley = state.valley
    too_low = valley < 32
    return progress(
        f"Cheapest from {SMALLEST} up: {valley}; your block size: {state.block_size}.",
        (not too_low and state.block_size != valley, f"Set the block size to {valley}."),
        (too_low and KERNELS[state.kernel].per_token, "Look up once a block: then larger blocks save look-ups."),
        (too_low and state.row_bytes > 64, "Choose a smaller KV head: look-ups cost more beside fewer bytes."),
        (too_low and state.kernel != "line", "Fetch 128 bytes a look-up: then each must serve more tokens."),
        (too_low and state.samples > 1, "Lower the samples to 1: each has a last block of its own."),
        (too_low, "Choose longer requests: half a block weighs less for them."),
    )


CHALLENGES = (
    Challenge(
        "FlashMLA only takes blocks of 64. Find requests that stay within the limit with such a kernel.",
        _keep_64,
        "Half of 64 slots is little for long requests. But Alpaca's would leave more than a quarter empty.",
    ),
    Challenge(
        f"Make sharing save {percent(SAVED)} of the blocks, within a limit of {percent(LIMIT)}.",
        _sharing_pays,
        "Samples share only their prompt. Today vLLM shares it between any two requests (lesson 05).",
    ),
    Challenge(
        "Make blocks of at least 32 the cheapest, and set that block size.",
        _valley_moves,
        "Half a block against one look-up per block: the cheapest is near √(2 · tokens · fetch / bytes per token).",
    ),
)
_KINDS = [(kind.title, name) for name, kind in WORKLOADS.items()]
_KNOBS = {
    "The cache": {
        "block_size": steps("Block size", SIZES, 32, "token slots in a block; vLLM's default is 16"),
        "row_bytes": choice("A KV head", [(words, size) for size, words in ROWS.items()], 256,
                            "a token's keys in it; values take as much"),
        "kernel": choice("Table look-up", [(how.words, name) for name, how in KERNELS.items()], "sector",
                         "how often it reads the table, and what a read of 4 bytes fetches"),
    },
    "The requests": {
        "requests": choice("Lengths as in", _KINDS, "alpaca", "how long prompts and answers are"),
        "file": entry("… or a file", "", "lengths.csv", "CSV with columns prompt_tokens and output_tokens"),
        "samples": steps("Samples", SAMPLES, 2, "answers to each request, which share the prompt's full blocks"),
    },
    "The limit": {
        "allowed": steps("Wasted", [(percent(share), share) for share in ALLOWED], LIMIT,
                         "share of the held slots that may be empty, and of bytes fetched in vain"),
    },
}  # fmt: skip
SPEC = Spec(
    name="paged_attention",
    title="Who holds which block, and what a block size wastes",
    lead="Drag the block size; then play the pool, and point at a request.",
    knobs=_KNOBS,
    presets={
        "Too large": {"block_size": 512},
        "Too small": {"block_size": 1, "kernel": "line"},
        "Long prompts, 8 samples": {"requests": "azure-code", "samples": 8, "block_size": 16},
    },
    sweep=sweep,
    figure=figure,
    verdict=verdict,
    command=command,
    challenges=CHALLENGES,
    starts=lambda state: state.block_size >= SMALLEST,
    mends=("block_size",),
    guess=Guess(
        "With blocks of 32 and requests of some 80 tokens, like Alpaca's: what share of the held slots is empty?",
        ("3 %", "8 %", "17 %", "50 %"),
        2,
        "On average, a request's last block is half empty: about 16 slots beside 80 tokens.",
    ),
    own={"block_pool": "has get_num_free_blocks, get_new_blocks, touch and free_blocks"},
)  # fmt: skip


def show(**knobs: Any) -> Live:
    """Show the widget: `show(block_size=64)` sets a knob, `show(block_pool=BlockPool)` runs your
    pool.
    """
    return notebook_widget(SPEC, **knobs)
