"""Compare two pools of GPUs with one, on the virtual clock: a map of goodput, what links hide, and
the model's errors.

    uv run python benchmarks/disaggregation_model.py \\
        --json benchmarks/results/disaggregation_model.cpu.json --plot lessons/figures/08_edge.svg
    uv run python benchmarks/disaggregation_model.py --quick         # shorter runs, fewer cells

Four H100s serve Llama-3.1-8B. For each kind of request and service level, the map has the requests
per second and GPU that one pool of four GPUs sustains, with the best budget of
`disaggregation.tuning.BUDGETS` and with vLLM's default, and that two pools sustain in their best
split over a link of 400 Gb/s. Then comes the edge: how much longer than its arithmetic and bytes a
step that mixes prompts and answers may take before two pools win. All figures come from runs of the
real schedulers; nothing is measured, everything is *modelled*. The errors are against published
figures, and those to which two factors were fitted are marked. The tables are followed by one line
of JSON.
"""

import argparse
import math
from dataclasses import replace
from typing import Any

from minivllm_lab.cli import benchmark_parser, run
from minivllm_lab.disaggregation.goodput import Colocated, Disaggregated, Objective, Work, for_each_gpu, goodput
from minivllm_lab.disaggregation.model_checks import disaggregation_checks, disaggregation_error
from minivllm_lab.disaggregation.tuning import best_budget, best_split, break_even, winning_budgets
from minivllm_lab.pictures import palette
from minivllm_lab.pictures.figures import panels
from minivllm_lab.progress import track
from minivllm_lab.results import read_record, record, report
from minivllm_lab.tables import table
from minivllm_simulate.cost_model import ARITHMETIC_EFFICIENCY, MATMUL_EFFICIENCY
from minivllm_simulate.hardware import get_hardware
from minivllm_simulate.known_models import known_model
from minivllm_simulate.kv_links import LINKS, Transfer, get_link
from minivllm_simulate.layouts import Layout, PlacedCost, PlacedModel

MODEL, GPU, GPUS, LINK = "Llama-3.1-8B", "H100", 4, "400 Gb/s"
KINDS = ((512, 64), (1024, 128), (2048, 128), (512, 256), (4000, 64))
LEVELS = ((0.2, 0.0075), (0.2, 0.01), (0.3, 0.02), (1.0, 0.03))
DEFAULT_BUDGET = 8192
"""The default `max_num_batched_tokens` of `vllm serve` v0.33.0 on an H100."""
EDGE_KINDS = ((4096, 32), (1024, 128))
EDGE_LEVELS, EDGE_TTFT = (0.007, 0.0075, 0.01, 0.015, 0.03), 0.5
BET_PROMPT, BET_MS = 4096, 10.0
"""The tokens and the limit of lesson 08's bet, whose point the figure marks."""
FLOOR_MS = 0.05
"""Where the figure's axis ends; what is below is drawn there."""
ROUNDS = 6
LINK_MODELS = (("Llama-3.1-8B", "H100"), ("Llama-2-13b-hf", "A100-80"), ("Qwen3-32B", "H100"))
PROMPT = 2048


def pools(cost: PlacedCost | None = None) -> tuple[Colocated, Disaggregated]:
    """Return one pool of GPUs that do both phases, and as many GPUs in two pools; budget and split
    are found later.
    """
    model, gpu = known_model(MODEL), get_hardware(GPU)
    link = get_link(LINK)
    return Colocated(model, gpu, GPUS, cost=cost), Disaggregated(model, gpu, 1, GPUS - 1, link, True, cost=cost)


def work_of(prompt: int, output: int, seconds: float) -> Work:
    """Return the work of a run that lasts for about `seconds` at the highest rate."""
    one, _ = pools()
    most = one.bound(Work(prompt, output), Objective(math.inf, math.inf)) / GPUS
    return Work(prompt, output, counted=max(60, round(seconds * most)))


def cell(prompt: int, output: int, objective: Objective, seconds: float) -> dict[str, Any]:
    """Return the goodput per GPU with the best budget, with vLLM's default and with the best split,
    and this budget and split.
    """
    work, (one, two) = work_of(prompt, output, seconds), pools()
    tuned = best_budget(one, work, objective, ROUNDS)
    split = best_split(two, for_each_gpu(work, two), objective, ROUNDS)
    default = goodput(replace(one, budget=DEFAULT_BUDGET), work, objective, ROUNDS)
    winning = winning_budgets(one, split.goodput.rate, work, objective)
    figures = {
        "one": tuned.goodput.per_gpu, "budget": int(tuned.name), "two": split.goodput.per_gpu, "split": split.name,
        "default": default.per_gpu, "from": min(winning, default=0), "to": max(winning, default=0),
    }  # fmt: skip
    return {name: round(one, 2) if isinstance(one, float) else one for name, one in figures.items()} | {
        "gain": round(split.goodput.rate / tuned.goodput.rate, 3) if tuned.goodput.rate else None
    }


def goodput_map(kinds: tuple[tuple[int, int], ...], seconds: float) -> dict[str, dict[str, Any]]:
    """Map each kind of request ("1024/128") and service level ("200 ms/10 ms") to its `cell`."""
    cells = [(kind, level) for kind in kinds for level in LEVELS]
    found: dict[str, dict[str, Any]] = {}
    for (prompt, output), (ttft, tpot) in track(cells, "serving"):
        level = f"{ttft * 1e3:g} ms/{tpot * 1e3:g} ms"
        found.setdefault(f"{prompt}/{output}", {})[level] = cell(prompt, output, Objective(ttft, tpot), seconds)
    return found


def print_map(found: dict[str, dict[str, Any]]) -> None:
    """Print a row for each cell."""
    columns = ("in/out", "first/each", "one pool", "best budget", f"with {DEFAULT_BUDGET:,}", "two pools", "best split",
               "gain", "one pool wins with")  # fmt: skip
    rows = []
    for kind, levels in found.items():
        for level, one in levels.items():
            wins = f"{one['from']:,} to {one['to']:,}" if one["to"] else "no budget"
            gain = f"{one['gain']:.2f}" if one["gain"] else "only two pools"
            figures = (f"{one['one']:.1f}", f"{one['budget']:,}", f"{one['default']:.1f}", f"{one['two']:.1f}")
            rows.append((kind, level, *figures, one["split"], gain, wins))
    caption = f"{MODEL}, {GPUS} {GPU}, {LINK}, layer by layer. Gain: two pools ÷ one, both tuned. All modelled."
    table("Requests per second and GPU within the service level", columns, rows, caption)


def edges(kinds: tuple[tuple[int, int], ...], levels: tuple[float, ...], seconds: float) -> dict[str, Any]:
    """Map each kind of request and share of the peak to the extra cost of a mixed step, in ms, at
    which both designs sustain the same load, for each TPOT limit.
    """
    cost = PlacedModel(known_model(MODEL), get_hardware(GPU), Layout(1, 1, 1)).cost
    best = replace(cost, step=replace(cost.step, roofline=cost.step.roofline.at_best()))
    costs = {ARITHMETIC_EFFICIENCY: cost, MATMUL_EFFICIENCY: best}
    found: dict[str, Any] = {}
    for kind in track(kinds, "looking for the edge"):
        for share, each in costs.items():
            ways = pools(each)
            ones = [edge(ways, work_of(*kind, seconds), Objective(EDGE_TTFT, level)) for level in levels]
            found.setdefault(f"{kind[0]}/{kind[1]}", {})[f"{share:g}"] = ones
    return found


def edge(ways: tuple[Colocated, Disaggregated], work: Work, objective: Objective) -> float:
    """Return the extra milliseconds per mixed step at which one tuned pool sustains as much as two."""
    one, two = ways
    split = best_split(two, for_each_gpu(work, two), objective, ROUNDS)
    return round(1e3 * break_even(one, split.goodput.rate, work, objective), 2)


def print_edges(found: dict[str, Any], levels: tuple[float, ...]) -> None:
    """Print a row for each kind of request and share of the peak."""
    rows = [
        (kind, f"{float(share):.0%}", *map("{:.2f}".format, ones))
        for kind, shares in found.items()
        for share, ones in shares.items()
    ]
    columns = ("in/out", "arithmetic", *(f"{1e3 * level:g} ms" for level in levels))
    caption = "Milliseconds, by TPOT limit; beyond them, two pools sustain more. Arithmetic: share of the peak."
    table("How much more a mixed step may cost before two pools win", columns, rows, caption)


def draw(found: dict[str, Any], levels: tuple[float, ...], path: str) -> None:
    """Draw the break-even cost over the TPOT limit, a line for each kind of request, with arithmetic
    at the smaller share of the peak; the bet's point is marked.
    """
    milliseconds = [1e3 * level for level in levels]
    with panels(path, 1, 7.2, 4.1) as (axes,):
        for (kind, shares), colour in zip(
            found.items(), (palette.PURPLE, palette.GREEN, palette.VERMILLION), strict=False
        ):
            prompt, output = map(int, kind.split("/"))
            costs = [max(ms, FLOOR_MS) for ms in next(iter(shares.values()))]
            axes.plot(milliseconds, costs, "o-", color=colour, label=f"{prompt:,} tokens in, {output} out")
            if prompt == BET_PROMPT and BET_MS in milliseconds:
                bet = (BET_MS, costs[milliseconds.index(BET_MS)])
                axes.plot(*bet, "o", markersize=15, markerfacecolor="none", color=palette.INK)
                axes.annotate("the bet", bet, (14, -16), textcoords="offset points")
        axes.set(
            xscale="log",
            yscale="log",
            xlabel="time allowed for each token, ms",
            ylabel="extra cost of a mixed step, ms",
        )
        axes.set_title("How much may mixing cost before two pools win? (modelled)")
        axes.set_xticks(milliseconds, [f"{level:g}" for level in milliseconds], minor=False)
        axes.set_yticks([0.1, 0.3, 1, 3], ["0.1", "0.3", "1", "3"])
        axes.minorticks_off()
        axes.text(0.03, 0.95, "above the line: two pools sustain more", transform=axes.transAxes, va="top")
        axes.text(0.97, 0.05, "below it: one pool sustains more", transform=axes.transAxes, ha="right")
        axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.16), ncol=3)


def transfers() -> dict[str, dict[str, dict[str, float]]]:
    """Map model and link to the seconds of a transfer, of the prefill, and of the part that a
    layer-by-layer transfer does not hide.
    """
    found: dict[str, dict[str, dict[str, float]]] = {}
    for model, gpu in LINK_MODELS:
        for name, link in LINKS.items():
            one = Transfer.of(known_model(model), get_hardware(gpu), PROMPT, link)
            figures = {"seconds": one.seconds, "prefill": one.prefill, "exposed": one.exposed}
            found.setdefault(f"{model} on {gpu}", {})[name] = figures
    return found


def print_transfers(found: dict[str, dict[str, dict[str, float]]]) -> None:
    """Print a row for each link; a transfer that the prefill hides is marked."""
    rows = []
    for name in LINKS:
        ones = [links[name] for links in found.values()]
        shown = (
            f"{one['seconds'] * 1e3:.1f} ({one['exposed'] * 1e3:.1f}){'' if one['seconds'] > one['prefill'] else ' *'}"
            for one in ones
        )
        rows.append((name, f"{LINKS[name].bandwidth / 1e9:g}", *shown))
    prefills = [f"{next(iter(links.values()))['prefill'] * 1e3:.1f}" for links in found.values()]
    rows.append(("prefill", "", *prefills))
    caption = f"Milliseconds for {PROMPT:,} tokens; in brackets what layer by layer leaves; * hidden by the prefill."
    table("Transfers", ("link", "GB/s", *found), rows, caption)


def print_checks() -> list[dict[str, Any]]:
    """Print a row for each published figure, and return the figures."""
    checks = disaggregation_checks()
    rows = [
        (
            one.table,
            one.what,
            f"{one.measured:.3g}",
            f"{one.modelled:.3g}",
            "fitted" if one.fitted else f"{one.error:+.0%}",
        )
        for one in checks
    ]
    caption = f"Median error of the figures that nothing was fitted to: {disaggregation_error():.0%}."
    table("Published figures and the model's", ("table", "figure", "published", "modelled", "error"), rows, caption)
    return [
        {
            "table": one.table, "what": one.what, "source": one.source, "published": one.measured,
            "modelled": one.modelled, "error": one.error, "fitted": one.fitted,
        }
        for one in checks
    ]  # fmt: skip


def main(arguments: argparse.Namespace) -> None:
    if arguments.source:
        shown = read_record(arguments.source, "disaggregation_model")["figures"]
        print_edges(shown["edge"], tuple(shown["edge_levels"]))
        draw(shown["edge"], tuple(shown["edge_levels"]), arguments.plot)
        return
    kinds, seconds = (KINDS[1:2], 2.0) if arguments.quick else (KINDS, arguments.seconds)
    found = goodput_map(kinds, seconds)
    print_map(found)
    edge_kinds, levels = (EDGE_KINDS[1:2], EDGE_LEVELS[1:3]) if arguments.quick else (EDGE_KINDS, EDGE_LEVELS)
    turning = edges(edge_kinds, levels, seconds)
    print_edges(turning, levels)
    moved = transfers()
    print_transfers(moved)
    checks = print_checks()
    settings = {"model": MODEL, "gpu": GPU, "gpus": GPUS, "link": LINK, "seconds": seconds, "rounds": ROUNDS}
    outcome = {
        **settings, "map": found, "edge_levels": levels, "edge": turning, "transfers": moved, "checks": checks,
        "median_error": round(disaggregation_error(), 3),
    }  # fmt: skip
    report(record("disaggregation_model", outcome), arguments.json)
    if arguments.plot:
        draw(turning, levels, arguments.plot)


def parser() -> argparse.ArgumentParser:
    flags = benchmark_parser(__doc__)
    flags.add_argument("--seconds", type=float, default=25.0, help="how long a run lasts, about (default: 25)")
    flags.add_argument("--quick", action="store_true", help="one kind of request, runs of two seconds")
    flags.add_argument("--plot", metavar="FILE", help="also draw the edge to FILE, an SVG")
    flags.add_argument("--from", dest="source", metavar="FILE", help="draw an earlier run's edge to --plot")
    return flags


if __name__ == "__main__":
    run(main, parser())
