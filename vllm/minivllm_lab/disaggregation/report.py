"""Lesson 08's modelled links and pools, its figure and its command line; its other tables are in
`interference` and `engines`.

A function `measure_*`, `compare_*` or `show_*` prints its table and returns its figures; the
callables that it takes are the lesson's own code.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import product
from typing import Any

from minivllm_lab.cli import lesson_parser, whole_number
from minivllm_lab.disaggregation.goodput import (
    Colocated,
    Disaggregated,
    Goodput,
    Objective,
    System,
    Work,
    for_each_gpu,
    goodput,
)
from minivllm_lab.disaggregation.interference import BUDGETS
from minivllm_lab.disaggregation.model_checks import link_checks
from minivllm_lab.disaggregation.tuning import BUDGETS as LADDER
from minivllm_lab.disaggregation.tuning import best_budget, winning_budgets
from minivllm_lab.pictures import palette
from minivllm_lab.pictures.figures import SMALL_TEXT, panels
from minivllm_lab.progress import track
from minivllm_lab.tables import Timed, closing, console, heading, ms, record_table
from minivllm_simulate.hardware import get_hardware
from minivllm_simulate.known_models import known_model
from minivllm_simulate.kv_links import Transfer, get_link, layer_wise_end

LINKS = ("10 Gb/s", "100 Gb/s", "400 Gb/s", "NVLink 4")
PLACES = {
    "8B, 1 H100": ("Llama-3.1-8B", "H100", 1),
    "70B, 8 H100": ("Meta-Llama-3-70B", "H100", 8),
    "70B, 8 A100": ("Meta-Llama-3-70B", "A100-80", 8),
}
PROMPTS = (512, 8192)


# ---- 4. links ------------------------------------------------------------------------------------


def show_links(added_seconds: Callable[[float, float, int], float]) -> dict:
    """Show a prompt's prefill time, its bytes, and how much each link delays its first token.
    *Modelled*.
    """
    heading("4. Which links hide the transfer")
    results, shown = {}, {}
    for (place, (name, gpu, tp)), prompt in product(PLACES.items(), PROMPTS):
        model = known_model(name), get_hardware(gpu), prompt
        transfers = {link: Transfer.of(*model, get_link(link), tp) for link in LINKS}
        transfer = transfers[LINKS[0]]
        after = {link: each.seconds for link, each in transfers.items()}
        layered = {link: added_seconds(each.prefill, each.seconds, each.layers) for link, each in transfers.items()}
        results[f"{place}, {prompt}"] = {
            "prefill_ms": 1e3 * transfer.prefill,
            "megabytes": transfer.num_bytes / 1e6,
            "least_gb_per_second": transfer.num_bytes / transfer.prefill / 1e9,
            "after_ms": {link: 1e3 * seconds for link, seconds in after.items()},
            "layer_wise_ms": {link: 1e3 * seconds for link, seconds in layered.items()},
        }
        shown[f"{place}, {prompt}"] = {
            **results[f"{place}, {prompt}"],
            "place": place,
            "prompt": prompt,
            "prefill": transfer.prefill,
            **{link: f"{ms(after[link])} | {ms(layered[link])}" for link in LINKS},
        }
    off = {check.what: check.error for check in link_checks() if "loading pays" in check.what}
    columns = {"Llama-3": "{place}", "tokens": "{prompt:,}", "prefill": "{prefill:ms}"}
    record_table(
        "ms that a link adds to a first token, modelled",
        shown,
        {**columns, "GB/s": "{least_gb_per_second:.1f}", **{link: f"{{{link}}}" for link in LINKS}},
        "Sent after the prefill | layer by layer. GB/s: at this rate it takes as long as the prefill. Mooncake's "
        "paper says 6 and 19 GB/s for 8,192 tokens of 70B on 8 A800 and 8 H800 at data-sheet rates, where the "
        f"model is off by {' and '.join(f'{error:+.0%}' for error in off.values())}. The table's GPUs are slower.",
    )
    return {"places": results, "off_mooncake": off}


# ---- 5. how many of each -------------------------------------------------------------------------

MODEL, GPU, GPUS, LINK = "Llama-3.1-8B", "H100", 4, "400 Gb/s"
PROMPT, OUTPUT = 4096, 32
"""Tokens of each request."""
TTFT_SLO, TPOT_SLO = 0.5, 0.010
"""Seconds."""
COUNTED = 200
"""Requests that each GPU serves in a run."""
POOL_BUDGETS = (512, 8192)
"""Beside the best one. The last is the default of `vllm serve` on an H100."""
SPLITS = ((1, 3), (3, 1))
"""The worst and the best for these requests."""
DISTSERVE = {"together": 1.6, "prefill": 5.6, "decode": 10.0}
"""Requests a second of one A100 with a model of 13 billion parameters, in the example of
DistServe's authors.
"""


def show_ratios(goodput_per_gpu: Callable[[float, float, int, int], float], arguments: argparse.Namespace) -> dict:
    """Show DistServe's example for each ratio by arithmetic, and four GPUs simulated with the real
    schedulers.
    """
    heading("5. How many of each")
    results, shown = {}, {}
    for prefillers, decoders in ((1, 1), (2, 1), (3, 1), (1, 2), (1, 3)):
        rate = goodput_per_gpu(DISTSERVE["prefill"], DISTSERVE["decode"], prefillers, decoders)
        busy, name = rate * (prefillers + decoders), f"{prefillers}:{decoders}"
        results[name] = {"per_gpu": rate, "times": rate / DISTSERVE["together"]}
        idle = [1 - busy / (many * DISTSERVE[kind]) for many, kind in ((prefillers, "prefill"), (decoders, "decode"))]
        shown[name.replace(":", " : ")] = {**results[name], "prefillers": idle[0], "decoders": idle[1]}
    record_table(
        "DistServe's example: 5.6 requests a second to prefill, 10 to decode, 1.6 for both",
        shown,
        "prefillers : decoders {name} | requests/s a GPU {per_gpu:.2f} | of one pool {times:.2f} × | "
        "prefillers idle {prefillers:.0%} | decoders idle {decoders:.0%}",
    )
    console.print()
    return {"distserve": results, **_simulated_pools(arguments)}


def _simulated_pools(arguments: argparse.Namespace) -> dict:
    """Find the goodput per GPU of one pool, tuned and not, and of two pools in each split."""
    counted, rounds = (4, 2) if arguments.quick else (COUNTED, 6)
    work, objective = Work(PROMPT, OUTPUT, counted=counted), Objective(TTFT_SLO, TPOT_SLO)
    mixed = Colocated(known_model(MODEL), get_hardware(GPU), GPUS)
    systems: dict[str, System] = {
        f"one pool, {each} tokens a step": replace(mixed, budget=each) for each in POOL_BUDGETS
    }
    for prefill, decode in SPLITS:
        pools = Disaggregated(mixed.model, mixed.gpu, prefill, decode, get_link(LINK), layer_wise=True)
        systems[f"two pools, {prefill} : {decode}"] = pools
    tuned = best_budget(mixed, work, objective, rounds)
    found = {"one pool, its best budget": tuned.goodput} | {
        name: goodput(system, for_each_gpu(work, system), objective, rounds)
        for name, system in track(systems.items(), "bisecting")
    }
    two = max(each.per_gpu for name, each in found.items() if name.startswith("two"))
    best = {
        "one": tuned.goodput.per_gpu,
        "two": two,
        "budget": int(tuned.name),
        "winning": winning_budgets(mixed, two * GPUS, work, objective),
        "default": found[f"one pool, {POOL_BUDGETS[-1]} tokens a step"].per_gpu,
    }
    _show_pools(found, best, counted)
    return {"pools": {name: each.per_gpu for name, each in found.items()}, "best": best}


CAUSES = {"tpot": "tokens", "ttft": "first tokens", "queue": "first tokens", "link": "link", "": "nothing"}


def _show_pools(found: Mapping[str, Goodput], best: Mapping[str, Any], counted: int) -> None:
    """Print a row for each way to use the GPUs, and the best budgets in words."""
    record_table(
        "Goodput by bisection, modelled",
        {name: {"per_gpu": each.per_gpu, "late": CAUSES[each.cause]} for name, each in found.items()},
        {f"{GPUS} {GPU}, {MODEL}": "{name}", "requests/s a GPU": "{per_gpu:.1f}", "late beyond it": "{late}"},
        f"{PROMPT:,} tokens in, {OUTPUT} out. In time: for 9 of 10 requests, a first token within {TTFT_SLO:g} s and "
        f"{1e3 * TPOT_SLO:g} ms a token. Link: {LINK}, layer by layer. The best of {len(LADDER)} budgets: "
        f"{best['budget']} tokens a step. Runs of {counted} requests a GPU.",
    )
    wins = ", ".join(map(str, best["winning"])) or "none"
    console.print(f"\nBudgets with which one pool sustains what two do: {wins}.")


# ---- the whole lesson ----------------------------------------------------------------------------


def close(results: dict, arguments: argparse.Namespace, disturbance: str) -> None:
    """Print the conclusions; `disturbance` says what else kept the machine busy, if anything."""
    gaps = {budget: each["itl_max_ms"] for budget, each in results["interference"].items()}
    requests, best = results["tokens"]["requests"], results["ratio"]["best"]
    closing(
        Timed(
            f"A prompt of {arguments.prompt:,} tokens stops running chats for {gaps[str(BUDGETS[0])]:.0f} ms; "
            f"in chunks of {BUDGETS[-1]} tokens for {gaps[str(BUDGETS[-1])]:.0f}, again and again."
        ),
        f"{len(requests)} requests through two engines give the same tokens as through one, and "
        f"{sum(each['bytes'] for each in requests.values()):,} bytes moved for that.",
        f"Modelled, {MODEL} on {GPUS} {GPU}, long prompts and short answers: one pool sustains "
        f"{best['one'] / best['two']:.2f} × what two do with its best budget, with {POOL_BUDGETS[-1]:,} tokens a step "
        f"{best['default'] / best['two']:.2f} ×.",
        disturbance=disturbance,
    )


def draw(results: dict, path: str) -> None:
    """Draw what each link adds to a first token, sent after the prefill and layer by layer."""
    added = results["links"]["places"][f"{next(iter(PLACES))}, {PROMPTS[-1]}"]
    rates = [get_link(link).bandwidth / 1e9 for link in LINKS]
    knee, prefill, layers = added["least_gb_per_second"], added["prefill_ms"], known_model(MODEL).num_hidden_layers
    with panels(path, 1, width=6.4) as (axes,):
        after, layered = (list(added[f"{way}_ms"].values()) for way in ("after", "layer_wise"))
        axes.plot(rates, after, "o-", color=palette.VERMILLION, label="sent after the prefill")
        # Up to the knee the line is curved, so its points come from the formula; then it is straight on these axes.
        bend = [rates[0] * (knee / rates[0]) ** (step / 32) for step in range(33)]
        curve = [layer_wise_end(0, prefill, added["megabytes"] / rate, layers) - prefill for rate in bend]
        points = bend + rates[1:], curve + layered[1:]
        axes.plot(*points, "s-", color=palette.INK, markevery=[0, 33, 34, 35], label="layer by layer")
        axes.axhline(prefill, color=palette.GREY, linewidth=1)
        words = f"the prefill itself: {prefill:.0f} ms"
        axes.annotate(words, (rates[-1], prefill), ha="right", va="bottom", fontsize=SMALL_TEXT)
        axes.axvline(knee, color=palette.GREEN, linestyle="--")
        axes.annotate(f" right of {knee:.1f} GB/s,\n the link keeps up", (knee, 0.1), va="bottom", fontsize=SMALL_TEXT)
        title = "What a link adds to the first token of a long prompt (modelled)"
        xlabel = f"speed of the link, for {PROMPTS[-1]:,} tokens of {MODEL} on an {GPU}"
        axes.set(title=title, xlabel=xlabel, ylabel="ms later", xscale="log", yscale="log")
        axes.set_xticks(rates, [f"{link}\n{rate:g} GB/s" for link, rate in zip(LINKS, rates, strict=True)])
        axes.set_yticks((0.1, 1, 10, 100, 1000), ("0.1", "1", "10", "100", "1,000"))
        axes.minorticks_off()
        axes.legend(loc="upper right", bbox_to_anchor=(1, 0.8))


def parser(doc: str | None) -> argparse.ArgumentParser:
    """Add the lesson's own flag to the common ones; --help shows `doc`."""
    flags = lesson_parser(doc)
    prompt = "tokens of the long prompt, 64 to 1900 (default: 1800)"
    flags.add_argument("--prompt", type=whole_number(64, 1900), default=1800, help=prompt)
    return flags
