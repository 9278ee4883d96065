"""Lesson 09's serving plan: what it made of a `config.json`, and what it should have made."""

from __future__ import annotations

from minivllm.config import ModelConfig
from minivllm.config.units import GIB
from minivllm_lab.pictures.drawing import BLANK, QUIET, RULE, arrow, rect, svg, text, tint
from minivllm_lab.pictures.palette import BLUE, ORANGE
from minivllm_simulate.known_models import known_model

WIDTH, HEIGHT = 700, 330
MODEL, NUMBER_BYTES = "Meta-Llama-3-70B", 2
CHAT, MEMORY, CHATS, ORDERED = 4096, 40 * GIB, 32, 8
SHOWN = ("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "vocab_size")
OVERLOOKED = "num_key_value_heads"
MACHINES_Y, MACHINE, DOTS_A_ROW = 232, 82, 8


def bet() -> str:
    """Draw the plan that counts keys and values for the whole hidden vector."""
    config = known_model(MODEL)
    return _picture("The plan", config, f"{config.hidden_size:,} numbers", config.hidden_size)


def reveal() -> str:
    """Draw the plan that reads `num_key_value_heads`."""
    config = known_model(MODEL)
    numbers = config.num_key_value_heads * config.head_dim
    factors = f"{config.num_key_value_heads} × {config.head_dim} numbers"
    return _picture("The plan, corrected", config, factors, numbers, mark=OVERLOOKED)


def _picture(title: str, config: ModelConfig, factors: str, numbers: int, mark: str = "") -> str:
    """Draw a config beside a plan that keeps `numbers` numbers a layer for each of K and V."""
    token = 2 * config.num_hidden_layers * numbers * NUMBER_BYTES
    fit = MEMORY // (token * CHAT)
    lines = [
        f"keys and values: 2 × {config.num_hidden_layers} layers × {factors}",
        f"in {8 * NUMBER_BYTES} bits: {token // 1024:,} KiB a token",
        f"{CHAT:,} tokens: {token * CHAT / GIB:g} GiB a chat",
        f"{MEMORY // GIB} GiB: {fit} chats on a machine",
    ]
    parts = [rect(16, 16, 270, 172, "#FFFFFF", stroke=RULE, radius=6)]
    parts.append(text(28, 40, "config.json", bold=True))
    for row, name in enumerate(SHOWN):
        y = 68 + row * 25
        if name == mark:
            parts.append(rect(22, y - 17, 258, 24, tint(ORANGE, 0.45), radius=3))
        parts.append(text(28, y, f'"{name}": {getattr(config, name)},', size=12, mono=True))
    parts += [arrow((290, 102), (316, 102)), text(326, 40, title, bold=True)]
    parts += [text(326, 72 + row * 28, words) for row, words in enumerate(lines)]
    needed = -(-CHATS // fit)
    machines = "1 machine" if needed == 1 else f"{needed} machines"
    parts.append(text(16, MACHINES_Y - 12, f"{CHATS} chats need {machines}", size=14, bold=True))
    for index in range(ORDERED):
        parts += _machine(16 + index * (MACHINE + 2), min(fit, max(0, CHATS - index * fit)))
    parts.append(f'<circle cx="22" cy="{HEIGHT - 18}" r="4" fill="{BLUE}"/>')
    parts.append(text(32, HEIGHT - 14, f"a chat of {CHAT:,} tokens", size=12))
    if mark:
        parts.append(rect(200, HEIGHT - 25, 22, 14, BLANK, stroke=QUIET, dash="4 3"))
        parts.append(text(230, HEIGHT - 14, "a machine that stands idle", size=12))
    return svg(WIDTH, HEIGHT, *parts, label=f"{title}. {'. '.join(lines)}. {CHATS} chats need {machines}.")


def _machine(x: float, chats: int) -> list[str]:
    """Draw a machine with a dot for each of its chats."""
    fill, dash = ("#FFFFFF", None) if chats else (BLANK, "4 3")
    parts = [rect(x, MACHINES_Y, MACHINE, 56, fill, stroke=QUIET, dash=dash)]
    for dot in range(chats):
        row, column = divmod(dot, DOTS_A_ROW)
        parts.append(f'<circle cx="{x + 6 + column * 10}" cy="{MACHINES_Y + 10 + row * 12}" r="4" fill="{BLUE}"/>')
    return parts
