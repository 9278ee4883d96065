"""Show how many bytes attention in tiles moves, where tiles no longer fit, and how one row is
summed tile by tile.

Draw the lesson's figure with `uv run python -P -m widgets flash_attention
lessons/figures/03_tiles.svg`.
"""

from __future__ import annotations

from typing import Any

from minivllm_lab.flash_attention.attention_traffic import CHIPS, KIB, REGISTER_FILE
from widgets.flash_attention.challenges import CHALLENGES, fewer
from widgets.flash_attention.figure import detail, figure
from widgets.flash_attention.row import Step
from widgets.flash_attention.state import KEYS, LENGTHS, QUERIES, State, sweep
from widgets.shell.knobs import choice, steps
from widgets.shell.live import Live
from widgets.shell.notebook import notebook_widget
from widgets.shell.plot import tokens
from widgets.shell.spec import Guess, Spec, Verdict

MODELS = {64: "meta-llama/Llama-3.2-1B", 128: "meta-llama/Llama-3.1-8B", 256: "google/gemma-3-4b-it"}
"""A model with heads of each width."""


def verdict(state: State) -> Verdict:
    """Say in one or two sentences how many bytes the tiles save, and whether they fit."""
    if state.wrong:
        return Verdict(_what_is_wrong(state, state.wrong), "broken")
    done = "Your softmax_step gives the right row. " if state.own else ""
    if not state.launches:
        needed = sum(state.shared.values()) / KIB
        limit = state.chip.shared_memory / KIB
        words = f"The kernel does not launch: it needs {needed:.0f} KiB of shared memory, but the limit is {limit:.0f}."
        return Verdict(done + words, "broken")
    if state.less < 1:
        return Verdict(f"{done}{fewer(state)}. Take more than {state.few:.0f} queries per tile.", "broken")
    if state.spills:
        spilled = f"it needs {sum(state.registers.values()) / KIB:.0f} KiB of {REGISTER_FILE / KIB:.0f}"
        return Verdict(f"{done}{fewer(state)}, were it not that registers spill: {spilled}.", "tight")
    words = f"{done}{fewer(state)}, {state.tiled.intensity:.0f} operations per byte (ridge: {state.ridge:.0f})."
    return Verdict(words, "fine" if state.less >= 2 else "tight")


def _what_is_wrong(state: State, step: Step) -> str:
    name = step.wrong[0]
    tile = state.steps.index(step) + 1
    pairs = {"m": (step.got.m, step.right.m), "l": (step.got.l, step.right.l)}
    got, right = pairs.get(name, (step.got.o[0], step.right.o[0]))
    words = f"Your softmax_step goes wrong at tile {tile}: {name} is {got:.3f} instead of {right:.3f}."
    factor = {"l": step.factor, "O": step.factor_o}.get(name)
    if factor is None or abs(factor - step.right_factor) < 1e-3 or tile == 1:
        return words
    return f"{words} It multiplied the old {name} by {factor:.3f}, but exp(old m − new m) is {step.right_factor:.3f}."


def command(state: State) -> str:
    """Write the `vllm serve` line of a model with this head dim."""
    fast = f"vllm serve {MODELS.get(state.head_dim, MODELS[128])} --max-model-len {state.length}"
    return (
        f"# No flag sets the tile: the backend picks it by GPU and head dim (here {state.head_dim}).\n"
        f"{fast} --attention-backend FLASH_ATTN"
    )


GUESS = Guess(
    "With tiles of 16 queries, no score goes to HBM. How many bytes move, next to a kernel that stores all scores?",
    ("16 times fewer", "Half as many", "As many", "Twice as many"),
    3,
    "K and V, 4 MiB, are read again for each 16 queries: 512 times, on average half of them.",
)
KNOBS = {
    "The attention": {
        "length": steps("Tokens T", [(tokens(long), long) for long in LENGTHS], 8192, "length of the sequence"),
        "head_dim": steps("Head dim", [64, 128, 256], 128, "width of a head"),
        "gpu": choice(
            "GPU",
            [(f"{name}: {chip.shared_memory // KIB} KiB", name) for name, chip in CHIPS.items()],
            "H100",
            "with the shared memory of one program",
        ),
    },
    "The tiles": {
        "block_q": steps("Queries a tile", QUERIES, 16, "rows of Q that a program keeps"),
        "block_k": steps("Keys a tile", KEYS, 64, "rows of K and V that it loads at a time"),
        "stages": steps("K, V tiles held", [1, 2, 3, 4], 2, "in shared memory at a time; num_stages in Triton"),
    },
    "Only for “Tile by tile”": {
        "keys_a_tile": steps("Keys at a time", [2, 3, 4, 6, 8, 12], 4, "of the row's 24 keys"),
        "times": steps(
            "Scores ×",
            [("1/16", 1 / 16), ("1/4", 1 / 4), ("1", 1), ("4", 4), ("16", 16)],
            1,
            "larger scores give sharper weights",
        ),
    },
}
SPEC = Spec(
    name="flash_attention",
    title="Attention in tiles",
    lead="Drag the size of the tile through the plot; then watch one row being summed, tile by tile.",
    knobs=KNOBS,
    presets={
        "Spilled": {"block_q": 256},
        "Not launched": {"block_q": 768},
        "FlashAttention-3": {"block_q": 128, "block_k": 128},
    },
    sweep=sweep,
    figure=figure,
    detail=detail,
    tabs=("Bytes by tile", "Tile by tile"),
    verdict=verdict,
    command=command,
    challenges=CHALLENGES,
    starts=lambda state: state.launches,
    mends=("block_q", "stages", "block_k"),
    guess=GUESS,
    own={"softmax_step": "adds one tile of scores and values to m, l and O"},
)


def show(**knobs: Any) -> Live:
    """Show the widget: `show(block_q=128)` sets a knob, `show(softmax_step=mine.softmax_step)`
    runs your function.
    """
    return notebook_widget(SPEC, **knobs)
