"""Lesson 12's pictures of the gate, and of the memory that adapters have: a queue beside empty
seats, and slots beside one pool.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from minivllm.config import CacheConfig, SchedulerConfig
from minivllm.core.lora_request import LoRARequest
from minivllm.core.request import Request
from minivllm.core.scheduler import Scheduler
from minivllm.core.scheduler_output import ModelRunnerOutput
from minivllm_lab.pictures.drawing import BLANK, QUIET, legend, rect, svg, text, tint
from minivllm_lab.pictures.palette import BLUE, GREEN, INK, ORANGE, PURPLE

WIDTH, LEFT, CELL = 700, 120, 34
SEATS, SLOTS, ADAPTERS, STEPS = 16, 2, 16, 8
IN_A_ROW, MOMENT = 16, 200
DASH = "4 3"


class Moment(NamedTuple):
    """The adapters of the requests that run and of those that wait, in order, before a step."""

    running: list[int]
    waiting: list[int]


def usual_moment() -> Moment:
    """Return the engine's state after 200 steps, when the queue no longer grows.

    Before each step a request of 8 steps arrives, for sixteen adapters in turn; there are two LoRA
    slots, 16 seats and memory for all.
    """
    limits = SchedulerConfig(max_model_len=STEPS + 1, max_num_seqs=SEATS, max_loras=SLOTS)
    scheduler = Scheduler(limits, CacheConfig(num_gpu_blocks=100, enable_prefix_caching=False))
    moment = Moment([], [])
    for number in range(MOMENT + 1):
        name = 1 + number % ADAPTERS
        lora = LoRARequest(str(name), name, f"/adapters/{name}")
        scheduler.add_request(Request(str(number), [0], max_tokens=STEPS, lora_request=lora))
        step = scheduler.schedule()
        moment = Moment(_adapters(scheduler.running), _adapters(scheduler.waiting))
        scheduler.update_from_output(step, ModelRunnerOutput({name: [1] for name in step.num_scheduled_tokens}))
    return moment


def bet() -> str:
    """Draw seats, memory and queue, without the adapters."""
    moment = usual_moment()
    parts = [text(16, 28, "What do they wait for?", size=15, bold=True)]
    parts += _seats(moment, 56, coloured=False)
    parts.append(text(LEFT - 12, 116, "memory", anchor="end"))
    parts.append(rect(LEFT, 98, SEATS * CELL, 26, BLANK, stroke=QUIET, label="blocks for every seat are free"))
    parts += _queue(moment, 152, coloured=False)
    words = (
        f"{len(moment.running)} of {SEATS} seats are in use, memory is free, and {len(moment.waiting)} requests wait."
    )
    y = 152 + _queue_height(moment) + 8
    kinds = (("a request that runs", INK), ("one that waits", tint(INK, 0.35)), ("an empty seat", None))
    parts += legend(LEFT, y, 190, kinds)
    return svg(WIDTH, y + 32, *parts, label=words)


def reveal() -> str:
    """Draw the same moment with the two slots, and each request in the colour of its adapter."""
    moment = usual_moment()
    active = sorted(set(moment.running))
    parts = [text(16, 28, "Both LoRA slots are taken, and all who wait need another adapter", size=15, bold=True)]
    parts.append(text(LEFT - 12, 74, "LoRA slots", anchor="end"))
    for place, adapter in enumerate(active):
        parts.append(
            rect(LEFT + place * 3 * CELL, 56, 3 * CELL - 6, 26, _fill(adapter, active), label=f"adapter {adapter}")
        )
    parts += _seats(moment, 98, coloured=True)
    parts += _queue(moment, 140, coloured=True)
    y = 140 + _queue_height(moment) + 8
    kinds = ((f"uses adapter {active[0]}", BLUE), (f"uses adapter {active[-1]}", ORANGE))
    parts += legend(LEFT, y, 138, (*kinds, ("needs another", tint(PURPLE, 0.5)), ("an empty seat", None)))
    others = sum(adapter not in active for adapter in moment.waiting)
    words = f"Both slots are taken; {others} of {len(moment.waiting)} waiting requests want another adapter."
    return svg(WIDTH, y + 32, *parts, label=words)


def memory() -> str:
    """Draw a GPU's memory with slots set aside, and with one pool of pages for adapters and cache;
    the same three adapters lie in both.
    """
    x, weights, page, pages = 150, 130, 19.5, 20
    left, cache = x + weights, tint(BLUE, 0.6)
    sizes = {"A": 1, "B": 4, "C": 1}
    slot = max(sizes.values())
    parts = [text(16, 28, "The same three adapters, in slots and in a pool", size=15, bold=True)]
    for y, name in ((72, "slots (vLLM)"), (162, "one pool (S-LoRA)")):
        parts += [text(x - 12, y + 22, name, anchor="end"), rect(x, y, weights - 4, 34, GREEN, label="weights")]
    for place, (name, size) in enumerate(sizes.items()):
        at = left + place * slot * page
        parts += [
            text(at + slot * page / 2, 64, f"slot {place}", size=12, colour=QUIET, anchor="middle"),
            rect(at, 72, slot * page - 4, 34, BLANK, stroke=QUIET, dash=DASH),
            rect(at, 72, size * page - (4 if size == slot else 0), 34, ORANGE, label=name),
        ]
    rest = pages - slot * len(sizes)
    parts.append(rect(left + slot * len(sizes) * page, 72, rest * page, 34, cache, label=f"KV cache: {rest} pages"))
    parts.append(text(left, 124, "each slot has room for the largest rank", size=12, colour=QUIET))
    pool = {2: "B", 3: "B", 6: "A", 9: "B", 10: "B", 15: "C"}
    assert {name: [*pool.values()].count(name) for name in sizes} == sizes
    for place in range(pages):
        fill = ORANGE if place in pool else cache
        at = left + place * page
        parts.append(rect(at, 162, page, 34, fill, stroke="#FFFFFF", label=pool.get(place, ""), size=12))
    words = f"an adapter takes the pages that it fills; {pages - len(pool)} are left for the cache"
    parts.append(text(left, 214, words, size=12, colour=QUIET))
    kinds = (("weights", GREEN), ("an adapter", ORANGE), ("keys and values", cache), ("set aside, empty", None))
    parts += legend(x, 238, 136, kinds)
    words = "Above, slots of fixed size between weights and cache; below, one pool of pages that both share."
    return svg(WIDTH, 270, *parts, label=words)


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
    for place, adapter in enumerate(moment.waiting):
        x, row = LEFT + place % IN_A_ROW * CELL, place // IN_A_ROW
        fill = _fill(adapter, active) if coloured else tint(INK, 0.35)
        parts.append(rect(x, y + row * 24, CELL - 4, 20, fill, label=str(adapter) if coloured else "", size=11))
    return parts


def _queue_height(moment: Moment) -> float:
    return 24 * -(-len(moment.waiting) // IN_A_ROW)
