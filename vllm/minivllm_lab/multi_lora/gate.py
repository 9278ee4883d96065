"""Lesson 12's pictures of the gate, and of the memory that adapters have: a queue beside empty
seats, and slots beside one pool.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from minivllm.config import CacheConfig, SchedulerConfig
from minivllm.core.lora_request import LoRARequest
from minivllm.core.request import Request
from minivllm.core.scheduler import Scheduler
from minivllm.core.scheduler_output import ModelRunnerOutput
from minivllm_lab.drawing import BLANK, QUIET, rect, svg, text, tint
from minivllm_lab.palette import BLUE, GREEN, INK, ORANGE, PURPLE

WIDTH, LEFT, CELL = 700, 120, 34
SEATS, SLOTS, ADAPTERS, REQUESTS, STEPS = 16, 2, 16, 160, 8
IN_A_ROW = 16
MEMORY = 4 * IN_A_ROW
DASH = "4 3"


@dataclass(frozen=True)
class Moment:
    """The adapters of the requests that run and of those that wait, in order, before a step."""

    running: list[int]
    waiting: list[int]


def longest_queue() -> Moment:
    """Return the engine's state when most requests wait.

    160 requests of 8 steps arrive, two before each step, for sixteen adapters in turn; there are
    two LoRA slots, 16 seats and memory for all.
    """
    limits = SchedulerConfig(max_model_len=STEPS + 1, max_num_seqs=SEATS, max_loras=SLOTS)
    scheduler = Scheduler(limits, CacheConfig(num_gpu_blocks=100, enable_prefix_caching=False))
    coming = [(number // 2, 1 + number % ADAPTERS) for number in range(REQUESTS)]
    moments: list[Moment] = []
    while coming or scheduler.has_unfinished_requests():
        while coming and coming[0][0] <= len(moments):
            name = coming.pop(0)[1]
            lora = LoRARequest(str(name), name, f"/adapters/{name}")
            request_id = str(REQUESTS - len(coming))
            scheduler.add_request(Request(request_id, [0], max_tokens=STEPS, lora_request=lora))
        step = scheduler.schedule()
        moments.append(Moment(_adapters(scheduler.running), _adapters(scheduler.waiting)))
        scheduler.update_from_output(step, ModelRunnerOutput({name: [1] for name in step.num_scheduled_tokens}))
    return max(moments, key=lambda moment: len(moment.waiting))


def bet() -> str:
    """Draw seats, memory and queue, without the adapters."""
    moment = longest_queue()
    parts = [text(16, 28, "What do they wait for?", size=15, bold=True)]
    parts += _seats(moment, 56, coloured=False)
    parts.append(text(LEFT - 12, 116, "memory", anchor="end"))
    parts.append(rect(LEFT, 98, SEATS * CELL, 26, BLANK, stroke=QUIET, label="blocks for every seat are free"))
    parts += _queue(moment, 152, coloured=False)
    words = (
        f"{len(moment.running)} of {SEATS} seats are in use, memory is free, and {len(moment.waiting)} requests wait."
    )
    y = 152 + _queue_height(moment) + 8
    for place, (name, fill) in enumerate((("a request that runs", INK), ("one that waits", tint(INK, 0.35)))):
        x = LEFT + place * 190
        parts += [rect(x, y, 22, 14, fill, stroke=QUIET), text(x + 30, y + 12, name, size=12)]
    return svg(WIDTH, y + 32, *parts, label=words)


def reveal() -> str:
    """Draw the same moment with the two slots, and each request in the colour of its adapter."""
    moment = longest_queue()
    active = sorted(set(moment.running))
    parts = [text(16, 28, "Two slots, and the rest of the queue wants others", size=15, bold=True)]
    parts.append(text(LEFT - 12, 74, "LoRA slots", anchor="end"))
    for place, adapter in enumerate(active):
        parts.append(
            rect(LEFT + place * 3 * CELL, 56, 3 * CELL - 6, 26, _fill(adapter, active), label=f"adapter {adapter}")
        )
    parts += _seats(moment, 98, coloured=True)
    parts += _queue(moment, 140, coloured=True)
    y = 140 + _queue_height(moment) + 4
    for place, (name, fill) in enumerate(
        ((f"adapter {active[0]}", BLUE), (f"adapter {active[-1]}", ORANGE), ("any other adapter", tint(PURPLE, 0.5)))
    ):
        x = LEFT + place * 150
        parts += [rect(x, y, 22, 14, fill, stroke=QUIET), text(x + 30, y + 12, name, size=12)]
    others = sum(adapter not in active for adapter in moment.waiting)
    words = f"Both slots are taken; {others} of {len(moment.waiting)} waiting requests want another adapter."
    return svg(WIDTH, y + 32, *parts, label=words)


def memory() -> str:
    """Draw a GPU's memory with slots set aside, and with one pool of pages for adapters and cache."""
    x, wide = 150, 520
    parts = [text(16, 28, "Where adapters live", size=15, bold=True)]
    weights = 150
    parts += [text(x - 12, 84, "slots (vLLM)", anchor="end"), rect(x, 64, weights, 34, GREEN, label="weights")]
    slot = 62
    for place, share in enumerate((0.25, 1.0, 0.12)):
        left = x + weights + place * slot
        parts += [
            rect(left, 64, slot, 34, BLANK, stroke=QUIET),
            rect(left, 64, slot * share, 34, ORANGE),
        ]
    cache = x + weights + 3 * slot
    parts.append(rect(cache, 64, wide - weights - 3 * slot, 34, tint(BLUE, 0.6), stroke=QUIET, label="KV cache"))
    parts.append(
        text(x + weights, 116, "three slots, each as large as the largest adapter may be", size=12, colour=QUIET)
    )
    parts += [text(x - 12, 174, "one pool (S-LoRA)", anchor="end"), rect(x, 154, weights, 34, GREEN, label="weights")]
    page, left = 18.5, x + weights
    pages = int((wide - weights) / page)
    for place in range(pages):
        of_adapter = place in (2, 3, 7, 8, 9, 14)
        is_free = place in (12, 17)
        fill = BLANK if is_free else ORANGE if of_adapter else tint(BLUE, 0.6)
        parts.append(rect(left + place * page, 154, page, 34, fill, stroke="#FFFFFF"))
    parts.append(text(left, 206, "pages of one size, for adapters and for the cache", size=12, colour=QUIET))
    for place, (name, fill) in enumerate(
        (("weights", GREEN), ("an adapter", ORANGE), ("keys and values", tint(BLUE, 0.6)), ("holds nothing", BLANK))
    ):
        at = x + place * 140
        parts += [rect(at, 226, 22, 14, fill, stroke=QUIET), text(at + 30, 238, name, size=12)]
    words = "Above, slots of fixed size between weights and cache; below, one pool of pages that both share."
    return svg(WIDTH, 258, *parts, label=words)


def _adapters(requests: Iterable[Request]) -> list[int]:
    return [request.lora_request.lora_int_id for request in requests if request.lora_request]


def _fill(adapter: int, active: list[int]) -> str:
    if adapter not in active:
        return tint(PURPLE, 0.5)
    return BLUE if adapter == active[0] else ORANGE


def _seats(moment: Moment, y: float, *, coloured: bool) -> list[str]:
    active = sorted(set(moment.running))
    parts = [text(LEFT - 12, y + 18, f"{SEATS} seats", anchor="end")]
    for place in range(SEATS):
        x = LEFT + place * CELL
        if place >= len(moment.running):
            parts.append(rect(x, y, CELL - 4, 26, "#FFFFFF", stroke=QUIET, dash=DASH))
        else:
            adapter = moment.running[place]
            fill = _fill(adapter, active) if coloured else INK
            parts.append(rect(x, y, CELL - 4, 26, fill, label=str(adapter) if coloured else ""))
    return parts


def _queue(moment: Moment, y: float, *, coloured: bool) -> list[str]:
    active = sorted(set(moment.running))
    parts = [text(LEFT - 12, y + 18, f"{len(moment.waiting)} wait", anchor="end")]
    for place, adapter in enumerate(moment.waiting[:MEMORY]):
        x, row = LEFT + place % IN_A_ROW * CELL, place // IN_A_ROW
        fill = _fill(adapter, active) if coloured else tint(INK, 0.35)
        parts.append(rect(x, y + row * 24, CELL - 4, 20, fill, label=str(adapter) if coloured else "", size=11))
    if left := len(moment.waiting) - MEMORY:
        parts.append(text(LEFT, y + 4 * 24 + 16, f"and {left} more", size=12, colour=QUIET))
    return parts


def _queue_height(moment: Moment) -> float:
    rows = min(4, -(-len(moment.waiting) // IN_A_ROW))
    return 24 * rows + (24 if len(moment.waiting) > MEMORY else 0)
