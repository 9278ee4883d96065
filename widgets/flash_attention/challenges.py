"""The three challenges of lesson 03's widget: what is asked, and which knob is wrong while it is not met."""

from __future__ import annotations

from typing import TYPE_CHECKING

from minivllm_lab.flash_attention.attention_traffic import KIB, register_bytes
from widgets.shell.spec import Challenge, Progress

if TYPE_CHECKING:
    from widgets.flash_attention.state import State


def _amount(less: float) -> str:
    return f"{less:.3f} times fewer bytes"


def _three_times_less(state: State) -> Progress:
    same = state.length >= 8192 and state.head_dim == 128 and state.hardware.name == "H100"
    met = same and state.launches and not state.spills and state.less >= 3
    words = f"{_amount(state.less)}; {_fits(state)}."
    if not same:
        advice = "It is asked of the H100, a head dim of 128, and 8K tokens or more."
    elif not state.launches or state.spills:
        advice = "This tile is too large for the chip: take fewer queries, or fewer keys."
    else:
        advice = "Each tile of queries reads all keys before it again. More queries a tile read less."
    return Progress(met, words, advice)


def _wide_heads(state: State) -> Progress:
    same = state.length >= 8192 and state.head_dim == 256 and state.hardware.name == "RTX 4090" and state.stages >= 2
    met = same and state.launches and state.less >= 1.9
    words = f"{_amount(state.less)}; {_fits(state)}."
    if not same:
        advice = "It is asked of the RTX 4090, a head dim of 256, two tiles of K and V at once, and 8K tokens or more."
    elif not state.launches:
        room, keys = state.shared["K, V"] / KIB, state.block_k
        advice = f"K and V take {room:.0f} KiB of {state.chip.shared_memory / KIB:.0f}, and {keys} keys save no byte."
    else:
        advice = "Keys only take room, queries save bytes: give the room to the queries."
    return Progress(met, words, advice)


def _reach_the_ridge(state: State) -> Progress:
    same = state.head_dim == 128 and state.hardware.name == "H100"
    met = same and state.launches and not state.spills and state.tiled.intensity >= state.ridge
    words = f"{state.tiled.intensity:.1f} operations a byte of {state.ridge:.1f}; {_fits(state)}."
    if not same:
        advice = "It is asked of the H100 and a head dim of 128."
    elif not state.launches:
        advice = "Shared memory is the limit: fewer keys a tile, or fewer of their tiles at once."
    elif state.spills:
        a_row = sum(register_bytes(1, state.block_k, state.head_dim).values())
        advice = f"A query takes 4 (d + keys + 2) = {a_row} bytes of registers: only the keys can give way."
    elif state.block_q < state.ridge:
        advice = "Queries in a tile are operations a byte: there are fewer of them than the ridge asks for."
    else:
        advice = "Q and the output travel too. Their share falls as the sequence grows: take more tokens."
    return Progress(met, words, advice)


def _fits(state: State) -> str:
    if not state.launches:
        return "not launched"
    return "registers spill" if state.spills else "it fits"


CHALLENGES = (
    Challenge(
        "On the H100, with a head dim of 128 and 8K tokens or more: move 3 times fewer bytes than T × T stored, with "
        "nothing spilled.",
        _three_times_less,
        "Queries in a tile set the traffic: it falls as they grow.",
    ),
    Challenge(
        "Wide heads on a small chip: RTX 4090, head dim 256, two tiles of K and V at once. Find a tile that is "
        "launched and moves 1.9 times fewer bytes (it may spill).",
        _wide_heads,
        "Keys of a tile cost room and save nothing, so they are what gives way.",
    ),
    Challenge(
        "On the H100, with a head dim of 128: tiles that reach the ridge on their own, without help from L2, with "
        "nothing spilled.",
        _reach_the_ridge,
        "Operations a byte are the queries of a tile, less the share of Q and O. In practice L2 helps, and 128 do.",
    ),
)
