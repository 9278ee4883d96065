"""Define lesson 03's three challenges, with the advice shown until each is met."""

from __future__ import annotations

from typing import TYPE_CHECKING

from minivllm_lab.flash_attention.attention_traffic import KIB, register_bytes
from widgets.shell.advice import Rule, at_least, progress, use
from widgets.shell.plot import tokens
from widgets.shell.spec import Challenge, Progress

if TYPE_CHECKING:
    from widgets.flash_attention.state import State


NAIVE = "all scores in HBM"
"""The name of attention that stores T × T scores."""


def _setting(state: State, gpu: str, head_dim: int) -> list[Rule]:
    return [use(f"an {gpu}", state.hardware.name == gpu), use(f"a head dim of {head_dim}", state.head_dim == head_dim)]


def compared(less: float) -> str:
    """Compare bytes with those of another way, which moves `less` times as many."""
    return f"{less:.2f} times fewer bytes than" if less > 1 else f"{1 / less:.2f} times as many bytes as"


def fewer(state: State) -> str:
    """Say how many times fewer bytes the tiles move."""
    if abs(state.less - 1) < 0.01:
        return f"No saving yet: as many bytes as with {NAIVE}"
    return f"{compared(state.less)} with {NAIVE}"


def _moves_less(state: State) -> str:
    return f"{fewer(state)}; {_fits(state)}."


def _three_times_less(state: State) -> Progress:
    return progress(
        _moves_less(state),
        *_setting(state, "H100", 128),
        at_least("T", state.length, 8192, tokens),
        (not state.launches or state.spills, "Lower the queries or the keys: this tile is too large for the chip."),
        (state.less < 3, "Raise the queries: each tile of queries reads all earlier keys again."),
    )


def _wide_heads(state: State) -> Progress:
    room = f"{state.shared['K, V'] / KIB:.0f} of {state.chip.shared_memory / KIB:.0f} KiB"
    return progress(
        _moves_less(state),
        *_setting(state, "RTX 4090", 256),
        at_least("K, V tiles held", state.stages, 2),
        at_least("T", state.length, 8192, tokens),
        (not state.launches, f"Lower the keys: K and V take {room}, but more keys save no bytes."),
        (state.less < 1.9, "Raise the queries and lower the keys: only queries save bytes, keys just take room."),
    )


def _reach_the_ridge(state: State) -> Progress:
    a_row = sum(register_bytes(1, state.block_k, state.head_dim).values())
    return progress(
        f"{state.tiled.intensity:.1f} of {state.ridge:.1f} operations per byte; {_fits(state)}.",
        *_setting(state, "H100", 128),
        (not state.launches, "Lower the keys or the K, V tiles held: shared memory is full."),
        (state.spills, f"Lower the keys: a query takes 4 (d + keys + 2) = {a_row} bytes of registers."),
        (state.block_q < state.ridge, "Raise the queries: each query of a tile adds one operation per byte."),
        (state.tiled.intensity < state.ridge, "Raise T: then the bytes of Q and of the output weigh less."),
    )


def _fits(state: State) -> str:
    if not state.launches:
        return "not launched"
    return "registers spill" if state.spills else "the tile fits"


CHALLENGES = (
    Challenge(
        "On the H100, with a head dim of 128 and at least 8K tokens: move 3 times fewer bytes than with all scores in "
        "HBM, without spilling.",
        _three_times_less,
        "The queries of a tile set the traffic: more queries, fewer bytes.",
    ),
    Challenge(
        "Wide heads on a small chip: on the RTX 4090, with a head dim of 256 and two tiles of K and V at once, find a "
        "tile that launches and moves 1.9 times fewer bytes (it may spill).",
        _wide_heads,
        "The keys of a tile cost room and save nothing, so they are the ones to cut.",
    ),
    Challenge(
        "On the H100, with a head dim of 128: reach the ridge with the tiles alone, without help from L2 and without "
        "spilling.",
        _reach_the_ridge,
        "Operations per byte equal the queries per tile, less the share of Q and O. L2 helps, so 128 are enough.",
    ),
)
