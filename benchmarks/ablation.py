"""Measure the gain of each lever: every technique is switched on and off on one engine, with the
same work, in one run.

    make ablation
    uv run python benchmarks/ablation.py --quick

Weights and KV cache share a fixed number of bytes; both kinds of work (`benchmarks/levers.py`)
arrive all at once and are greedy. What is a lever worth? There are three answers:

- the ladder: techniques switched on one after another, in the order of the list that ranks them;
- leave one out: everything on but one;
- Shapley: what a lever adds, averaged over all orders of switching on, for the levers that interact
  most.

Configurations take turns for a few rounds; the tables show the median of the rounds, with the
minimum and the maximum beside it. Outputs are compared with those of the plain engine. The table is
followed by one line of JSON.
"""

import argparse
import math
import random
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterable
from itertools import pairwise
from pathlib import Path
from typing import Any

from levers import BY_NAME, INTERACTING, LEVERS, Work, budget, engine_of, modelled_factors, works
from shapley import shapley_values, subsets

from minivllm.core.engine_messages import EngineCoreRequest
from minivllm.engine.core import EngineCore
from minivllm.platforms.device import pick_device
from minivllm.sampling_params import SamplingParams
from minivllm_lab.cli import benchmark_parser, figure_file, positive_int, run
from minivllm_lab.marks import put_between_marks
from minivllm_lab.pictures.figures import panels
from minivllm_lab.pictures.palette import BLUE, GREY, ORANGE
from minivllm_lab.progress import track
from minivllm_lab.results import read_record, record, report
from minivllm_lab.tables import console, markdown_table, table
from minivllm_simulate.levers import KNOWN_ERROR

ROOT = Path(__file__).resolve().parents[1]
README = ROOT / "README.md"
NOTES = ROOT / "lessons" / "notes" / "05_optimization_catalog.md"
ALONE = ("tensor parallel", "CUDA graphs")
"""Levers that help only on some machines: switched on at the end of the ladder, and left out of
the rest.
"""
NOT_IN_BASE = frozenset({"weights int8", "speculation"})
"""Off under Shapley's subsets, since neither pays on every machine."""
SLOW, VERY_SLOW = 4.0, 20.0  # seconds: slower configurations run in only two rounds, or one
On = frozenset[str]
Measured = dict[str, Any]


def ladder(names: Iterable[str]) -> list[On]:
    """Return the rungs of the ladder: nothing on, then one more lever on each rung."""
    rungs: list[On] = [frozenset()]
    for name in names:
        rungs.append(rungs[-1] | {name})
    return rungs


def everything_of(names: Iterable[str]) -> On:
    """Return all levers except those in `ALONE`: the set from which one lever at a time is left
    out.
    """
    return frozenset(names) - set(ALONE)


def base_of(names: Iterable[str]) -> On:
    """Return the set to which Shapley's subsets are added: the plain engine, whose outputs are the
    reference.
    """
    return everything_of(names) - set(INTERACTING) - NOT_IN_BASE


def configurations(names: list[str]) -> list[On]:
    """List every configuration to run, each once: the ladder, everything but one lever, and
    Shapley's subsets.
    """
    everything, base = everything_of(names), base_of(names)
    left_out = [everything - {name} for name in names if name in everything]
    return list(dict.fromkeys([*ladder(names), *left_out, *(base | some for some in subsets(INTERACTING))]))


def serve(core: EngineCore, work: Work) -> Measured:
    """Run the work to its end; return its throughput, latencies, step counts and outputs."""
    before, arrived = core.scheduler.make_stats(), time.perf_counter()
    for index, (prompt, output) in enumerate(zip(work.prompts, work.outputs, strict=True)):
        params = SamplingParams(temperature=0.0, max_tokens=output, ignore_eos=True)
        core.add_request(EngineCoreRequest(str(index), prompt, params, (), arrived))
    tokens: dict[str, list[int]] = defaultdict(list)
    times: dict[str, list[float]] = defaultdict(list)
    steps = most_running = 0
    while core.has_unfinished_requests():
        outputs = core.step().outputs
        now = time.perf_counter()
        steps += 1
        most_running = max(most_running, len(core.scheduler.running))
        for one in outputs:
            tokens[one.request_id] += one.new_token_ids
            times[one.request_id].append(now)
    seconds = time.perf_counter() - arrived
    gaps = [later - earlier for when in times.values() for earlier, later in pairwise(when)]
    stats = core.scheduler.make_stats()
    queries = stats.prefix_cache_stats.queries - before.prefix_cache_stats.queries
    hits = stats.prefix_cache_stats.hits - before.prefix_cache_stats.hits
    return {
        "seconds": seconds,
        "tokens_per_second": sum(work.outputs) / seconds,
        "first_token_ms": statistics.mean(when[0] - arrived for when in times.values()) * 1e3,
        "gap_p99_ms": sorted(gaps)[int(0.99 * (len(gaps) - 1))] * 1e3 if gaps else 0.0,
        "steps": steps,
        "most_running": most_running,
        "hit_rate": hits / max(1, queries),
        "accepted": stats.spec_decoding_stats.num_accepted_tokens - before.spec_decoding_stats.num_accepted_tokens,
        "preemptions": stats.num_preemptions - before.num_preemptions,
        "kv_tokens": (core.scheduler.cache_config.num_gpu_blocks - 1) * core.scheduler.cache_config.block_size,
        "outputs": [tokens[str(index)] for index in range(len(work.prompts))],
    }


def turns_of(sets: list[On], rounds: int, seed: int) -> list[tuple[int, On]]:
    """Return (round, configuration) for all runs; each round has its own order, and runs
    everything-on, the common baseline, three times.

    Order matters: for some seconds after an engine that gathers keys, the next one runs up to a
    fifth slower.
    """
    everything = max((on for on in sets if on.isdisjoint(ALONE)), key=len)
    order, turns = random.Random(seed), []
    for index in range(rounds):
        turns += [(index, on) for on in order.sample([*sets, everything, everything], len(sets) + 2)]
    return turns


def measure(turns: list[tuple[int, On]], work: list[Work], folder: Path, device: str) -> dict[On, dict[str, list]]:
    """Run every configuration on every kind of work, in turns; return the runs by configuration and
    work.
    """
    runs: dict[On, dict[str, list]] = {on: {one.name: [] for one in work} for _, on in turns}
    for round_index, on in track(turns, "runs"):
        longest = max((run["seconds"] for runs_of_work in runs[on].values() for run in runs_of_work), default=0.0)
        if round_index >= (1 if longest > VERY_SLOW else 2 if longest > SLOW else math.inf):
            continue
        core = engine_of(on, folder, device)
        serve(core, Work("warm up", [[1, 2, 3]], [4]))
        for one in work:
            core.reset_prefix_cache()
            runs[on][one.name].append(serve(core, one))
        core.shutdown()
    return runs


def summary(runs: list[Measured], reference: list[list[int]]) -> Measured:
    """Return the figures of the median run, the spread of all runs, and the share of outputs that
    equal the plain engine's.
    """
    rates = [one["tokens_per_second"] for one in runs]
    same = sum(map(list.__eq__, runs[0]["outputs"], reference)) / len(reference)
    middle = sorted(runs, key=lambda one: one["tokens_per_second"])[len(runs) // 2]
    kept = {name: value for name, value in middle.items() if name not in ("outputs", "seconds")}
    return kept | {"tokens_per_second": statistics.median(rates), "spread": [min(rates), max(rates)], "same": same}


def shapley_of(runs: dict[On, dict[str, list]], work: str, base: On) -> dict[str, dict[str, float]]:
    """Return each lever's factor, 2 to the power of its Shapley value in log2 tokens per second:
    median, minimum and maximum over the rounds.
    """
    found = defaultdict(list)
    rounds = min(len(runs[base | some][work]) for some in subsets(INTERACTING))
    for index in range(rounds):
        worth = {some: math.log2(runs[base | some][work][index]["tokens_per_second"]) for some in subsets(INTERACTING)}
        for name, value in shapley_values(INTERACTING, worth).items():
            found[name].append(2**value)
    return {n: {"factor": statistics.median(v), "least": min(v), "most": max(v)} for n, v in found.items()}


def figures_of(runs: dict[On, dict[str, list]], names: list[str], work: list[Work]) -> dict[str, Any]:
    """Return everything that the tables show, by kind of work."""
    everything, base = everything_of(names), base_of(names)
    found: dict[str, Any] = {}
    for one in work:
        reference = runs[base][one.name][0]["outputs"]
        figures = {on: summary(by_work[one.name], reference) for on, by_work in runs.items()}
        rungs = ladder(names)
        whole = figures[everything]["tokens_per_second"]
        found[one.name] = {
            "ladder": [{"lever": name, **figures[on]} for name, on in zip(["nothing", *names], rungs, strict=True)],
            "leave_one_out": {
                name: {
                    "factor": whole / figures[everything - {name}]["tokens_per_second"],
                    **figures[everything - {name}],
                }
                for name in names
                if name in everything
            },
            "shapley": shapley_of(runs, one.name, base),
            "everything": figures[everything],
        }
    return found


def show(found: dict[str, Any]) -> None:
    """Print the tables."""
    columns = (
        "lever", "tokens/s", "rounds", "bought", "first token, ms", "p99 gap, ms", "room, tokens", "at once", "hits",
        "same text",
    )  # fmt: skip
    for work, one in found["figures"].items():
        rates = [None, *(rung["tokens_per_second"] for rung in one["ladder"])]
        rows = [_rung(rung, before) for rung, before in zip(one["ladder"], rates, strict=False)]
        table(f"The ladder, {work}", columns, rows)
    table("What each lever gains: factors in tokens per second", *_comparison(found))


def _rung(rung: Measured, before: float | None) -> tuple[str, ...]:
    rate, (least, most) = rung["tokens_per_second"], rung["spread"]
    return (
        f"+ {rung['lever']}" if before else "nothing",
        f"{rate:,.0f}",
        f"{least:,.0f}–{most:,.0f}",
        f"{rate / before:.2f} ×" if before else "",
        f"{rung['first_token_ms']:,.0f}",
        f"{rung['gap_p99_ms']:,.0f}",
        f"{rung['kv_tokens']:,}",
        str(rung["most_running"]),
        f"{rung['hit_rate']:.0%}",
        f"{rung['same']:.0%}",
    )


def _comparison(found: dict[str, Any]) -> tuple[list[str], list[list[str]]]:
    """Return the columns and rows of the comparison: a lever's place in the list, our rank, and its
    gains here and, modelled, on an H100, for both kinds of work.
    """
    figures, modelled = found["figures"], found["modelled"]
    order = _our_order(figures)
    columns = ["lever", "list", "ours", "left out", "ladder", "average", "H100, *modelled*", "same tokens"]
    rows = [
        [
            name,
            str(BY_NAME[name].rank or "—"),
            _rank(order, name, figures),
            _pair(_worth(one, name) for one in figures.values()),
            _pair(_factor(_bought(one["ladder"], name)) for one in figures.values()),
            _pair(_factor(one["shapley"].get(name, {}).get("factor")) for one in figures.values()),
            _pair(_factor(factors.get(name)) for factors in modelled.values()),
            "yes" if BY_NAME[name].exact else "nearly",
        ]
        for name in found["levers"]
    ]
    return columns, rows


def _bought(rungs: list[Measured], name: str) -> float:
    """Return the throughput of a rung relative to the rung before."""
    place = next(index for index, rung in enumerate(rungs) if rung["lever"] == name)
    return rungs[place]["tokens_per_second"] / rungs[place - 1]["tokens_per_second"]


def _factor(value: float | None) -> str:
    return "—" if value is None else f"{value:.2f} ×"


def extremes(work: Measured, name: str) -> tuple[float, float]:
    """Return the least and the greatest factor of a lever that is left out: the slowest run with
    everything over the fastest without the lever, and the fastest over the slowest.
    """
    slowest, fastest = work["leave_one_out"][name]["spread"]
    least, most = work["everything"]["spread"]
    return least / fastest, most / slowest


def is_told_from_1(work: Measured, name: str) -> bool:
    """Return whether all runs agree that the lever gains, or that it costs. A single run tells nothing."""
    least, most = extremes(work, name)
    return least != most and (least > 1 or most < 1)


def _worth(work: Measured, name: str) -> str:
    if name not in work["leave_one_out"]:
        return "—"
    return _factor(work["leave_one_out"][name]["factor"]) if is_told_from_1(work, name) else "≈ 1"


def _rank(order: list[str], name: str, figures: dict[str, Any]) -> str:
    """Return our rank of a lever, or a dash if no kind of work tells it from 1."""
    ranked = name in order and any(is_told_from_1(work, name) for work in figures.values())
    return str(order.index(name) + 1) if ranked else "—"


def _our_order(figures: dict[str, Any]) -> list[str]:
    """Order the levers by what leaving them out costs, averaged over the kinds of work, most costly
    first.
    """
    found = [work["leave_one_out"] for work in figures.values()]
    return sorted(found[0], key=lambda name: -sum(math.log(one[name]["factor"]) for one in found))


def comparison(found: dict[str, Any]) -> str:
    """Return the table of every lever in lesson 05's notes, and how it was measured."""
    where = found["machine"]
    return (
        f"{markdown_table(*_comparison(found))}\n\n"
        f"Measured by `make ablation` on {where['cpu']}, {where['cores']} cores, torch {where['versions']['torch']}, "
        f"with {found['bytes'] / 2**20:.0f} MiB for weights and cache; chat / mixed. *Modelled*: left out, "
        "Llama-3.1-8B on an H100, by the simulator, whose constants are calibrated on measured figures. Compared with "
        f"[other measurements](#how-far-the-modelled-figures-are-off): {KNOWN_ERROR}."
    )


def finding(found: dict[str, Any]) -> str:
    """Return the README's sentence, which sums up the comparison."""
    works = found["figures"].values()
    worth = {name: " and ".join(_worth(work, name) for work in works) for name in found["levers"]}
    return (
        "**No ranking holds for every load:** in throughput of chats and of mixed texts, prefix caching is worth "
        f"{worth['prefix caching']}, paging {worth['paging']}, "
        f"and the KV cache, which rankings take for granted, {worth['KV cache']}."
    )


def pages(found: dict[str, Any]) -> dict[Path, str]:
    """Return the pages that quote the measurements, up to date."""
    parts = {README: ("ablation", finding), NOTES: ("levers", comparison)}
    return {page: put_between_marks(page.read_text(), name, part(found)) for page, (name, part) in parts.items()}


def _pair(values: Iterable[str]) -> str:
    """Join what belongs to the two kinds of work as "chat / mixed", with one dash if there is none."""
    known = [value for value in values if value != "—"]
    return " / ".join(known) or "—"


def draw(found: dict[str, Any], path: str) -> None:
    """Draw how many times the throughput each lever is worth when it alone is left out: a dot for
    each kind of work, on a line between the extremes of its runs.
    """
    figures, machine = found["figures"], found["machine"]
    order = _our_order(figures)
    ranks = {name: f"{name} ({BY_NAME[name].rank or 'not in the list'})" for name in order}
    with panels(path, columns=1, width=7.2, height=4.2) as (axis,):
        axis.axvline(1, color=GREY, linewidth=1)
        for (work, each), colour, below in zip(figures.items(), (BLUE, ORANGE), (-0.14, 0.14), strict=True):
            places = [place + below for place in range(len(order))]
            axis.plot([each["leave_one_out"][name]["factor"] for name in order], places, "o", color=colour, label=work)
            axis.hlines(places, *zip(*(extremes(each, name) for name in order), strict=True), color=colour)
        axis.set(xscale="log", xlim=(0.6, 60), title="Throughput with all levers, over throughput without this one")
        where = machine["gpu"] or f"{machine['cores']} cores of an {machine['cpu']} processor"
        axis.set_xlabel(f"the embedded model on {where}\n(in brackets: the rank in the list)")
        axis.set_xticks((1, 2, 4, 8, 16, 32), ("1 ×", "2 ×", "4 ×", "8 ×", "16 ×", "32 ×"))
        axis.set_xticks((), minor=True)
        axis.set_yticks(range(len(order)), ranks.values())
        axis.legend(title="work", loc="lower right")
        axis.invert_yaxis()


def measured(arguments: argparse.Namespace) -> dict[str, Any]:
    """Run everything and return the record."""
    device = pick_device(arguments.device).type
    left_out = {"CUDA graphs"} if device == "cpu" else set()
    left_out |= {"tensor parallel"} if arguments.quick else set()
    names = [lever.name for lever in LEVERS if lever.name not in left_out]
    work = works(arguments.quick, arguments.seed)
    rounds = arguments.rounds or (1 if arguments.quick else 3)
    with tempfile.TemporaryDirectory() as folder:
        runs = measure(turns_of(configurations(names), rounds, arguments.seed), work, Path(folder), device)
    figures = figures_of(runs, names, work)
    context = {"levers": names, "modelled": modelled_factors(), "bytes": budget(device), "rounds": rounds}
    return record("ablation", figures, device=device, **context)


def main(arguments: argparse.Namespace) -> None:
    found = read_record(arguments.source, "ablation") if arguments.source else measured(arguments)
    if arguments.remodel:
        found["modelled"] = modelled_factors()
    show(found)
    console.print(f"{found['bytes'] / 2**20:.0f} MiB for weights and cache; {found['rounds']} rounds")
    report(found, arguments.json)
    if arguments.plot:
        draw(found, arguments.plot)
    if arguments.readme:
        for page, text in pages(found).items():
            page.write_text(text)


def parser() -> argparse.ArgumentParser:
    flags = benchmark_parser(__doc__)
    flags.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto", help="where the engine runs")
    flags.add_argument("--rounds", type=positive_int, help="rounds of every configuration (default: 3, quick: 1)")
    flags.add_argument("--quick", action="store_true", help="one sixth of the requests, one round, one rank")
    flags.add_argument(
        "--plot", metavar="FILE", type=figure_file, help="also draw the waterfall to FILE (.png or .svg)"
    )
    flags.add_argument("--from", dest="source", metavar="FILE", help="show an earlier run instead of measuring")
    flags.add_argument("--remodel", action="store_true", help="with --from: recompute only the modelled column")
    flags.add_argument("--readme", action="store_true", help="write the results into README.md and lesson 05's notes")
    flags.add_argument("--seed", type=int, default=0, help="seed for lengths and passages (default: 0)")
    return flags


if __name__ == "__main__":
    run(main, parser())
