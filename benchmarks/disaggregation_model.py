"""Two pools of GPUs against one, on the virtual clock: a map of goodput, what links hide, and the model's errors.

    uv run python benchmarks/disaggregation_model.py --json benchmarks/results/disaggregation_model.cpu.json
    uv run python benchmarks/disaggregation_model.py --quick         # fewer requests and cells

Four H100 serve Llama-3.1-8B. For each kind of request and service level: requests a second and GPU that are borne, by
how many of the four prefill, over a link of 400 Gb/s; and by four that do both, with the best of three budgets. A
figure is a bisection of 5 rounds over runs of the real schedulers; nothing is measured here, all is *modelled*. The
errors are against published figures, with those marked that two factors were fitted to. The tables are followed by one
line of JSON.
"""

import argparse
import json
from typing import Any

from minivllm.lab.cli import Parser, run
from minivllm.lab.progress import track
from minivllm.lab.results import record, write_json
from minivllm.lab.tables import table
from minivllm.simulate.disaggregation import Colocated, Disaggregated, Objective, Work, goodput
from minivllm.simulate.disaggregation_checks import disaggregation_checks, disaggregation_error
from minivllm.simulate.hardware import get_hardware
from minivllm.simulate.known_models import known_model
from minivllm.simulate.kv_links import LINKS, Transfer, get_link

MODEL, GPU, GPUS, LINK = "Llama-3.1-8B", "H100", 4, "400 Gb/s"
KINDS = ((512, 64), (1024, 128), (2048, 128), (512, 256), (4000, 64))
LEVELS = ((0.2, 0.0075), (0.2, 0.01), (0.3, 0.02), (1.0, 0.03))
BUDGETS = (512, 2048, 8192)
ROUNDS = 5
LINK_MODELS = (("Llama-3.1-8B", "H100"), ("Llama-2-13b-hf", "A100-80"), ("Qwen3-32B", "H100"))
PROMPT = 2048


def cell(prompt: int, output: int, objective: Objective, counted: int) -> dict[str, Any]:
    """Goodput per GPU of each split, and of GPUs that do both by budget; and what breaks beyond."""
    model, gpu, work = known_model(MODEL), get_hardware(GPU), Work(prompt, output, counted=counted)
    splits = {
        f"{one}:{GPUS - one}": Disaggregated(model, gpu, one, GPUS - one, get_link(LINK)) for one in range(1, GPUS)
    }
    both = {str(budget): Colocated(model, gpu, GPUS, budget) for budget in BUDGETS}
    found = {name: goodput(system, work, objective, ROUNDS) for name, system in (splits | both).items()}
    figures = {name: {"per_gpu": round(one.per_gpu, 2), "cause": one.cause} for name, one in found.items()}
    best, chunked = (max(found[name].rate for name in names) for names in (splits, both))
    return {"found": figures, "gain": round(best / chunked, 3) if chunked else None}


def goodput_map(kinds: tuple[tuple[int, int], ...], counted: int) -> dict[str, dict[str, Any]]:
    """ "1024/128" -> "200 ms/10 ms" -> `cell`."""
    cells = [(kind, level) for kind in kinds for level in LEVELS]
    found: dict[str, dict[str, Any]] = {}
    for (prompt, output), (ttft, tpot) in track(cells, "serving"):
        level = f"{ttft * 1e3:g} ms/{tpot * 1e3:g} ms"
        found.setdefault(f"{prompt}/{output}", {})[level] = cell(prompt, output, Objective(ttft, tpot), counted)
    return found


def print_map(found: dict[str, dict[str, Any]]) -> None:
    """A row for each cell."""
    names = list(next(iter(next(iter(found.values())).values()))["found"])
    columns = ["in/out", "first/each", *names[: GPUS - 1], *(f"both, {name}" for name in names[GPUS - 1 :]), "gain"]
    rows = []
    for kind, levels in found.items():
        for level, one in levels.items():
            figures = [f"{one['found'][name]['per_gpu']:.1f}" for name in names]
            rows.append((kind, level, *figures, f"{one['gain']:.2f}" if one["gain"] else "only two pools"))
    caption = f"{MODEL}, {GPUS} {GPU}, {LINK}. gain: the best split over the best budget. All modelled."
    table("Requests a second and GPU within the service level", columns, rows, caption)


def transfers() -> dict[str, dict[str, dict[str, float]]]:
    """Model -> link -> seconds of a transfer, of the prefill, and what is left layer by layer."""
    found: dict[str, dict[str, dict[str, float]]] = {}
    for model, gpu in LINK_MODELS:
        for name, link in LINKS.items():
            one = Transfer.of(known_model(model), get_hardware(gpu), PROMPT, link)
            figures = {"seconds": one.seconds, "prefill": one.prefill, "exposed": one.exposed}
            found.setdefault(f"{model} on {gpu}", {})[name] = figures
    return found


def print_transfers(found: dict[str, dict[str, dict[str, float]]]) -> None:
    """A row for each link; a transfer that the prefill hides is marked."""
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
    caption = f"Milliseconds for {PROMPT:,} tokens; in brackets what is left layer by layer; * hidden by the prefill."
    table("Transfers", ("link", "GB/s", *found), rows, caption)


def print_checks(counted: int) -> list[dict[str, Any]]:
    """A row for each published figure."""
    checks = disaggregation_checks(counted)
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
    caption = f"Median error of what nothing was fitted to: {disaggregation_error(counted):.0%}."
    table("Published figures and the model's", ("table", "figure", "published", "modelled", "error"), rows, caption)
    return [
        {
            "table": one.table, "what": one.what, "source": one.source, "published": one.measured,
            "modelled": one.modelled, "error": one.error, "fitted": one.fitted,
        }
        for one in checks
    ]  # fmt: skip


def main(arguments: argparse.Namespace) -> None:
    """Map, links, errors."""
    kinds, counted = (KINDS[1:2], 60) if arguments.quick else (KINDS, arguments.requests)
    found = goodput_map(kinds, counted)
    print_map(found)
    moved = transfers()
    print_transfers(moved)
    checks = print_checks(counted)
    settings = {"model": MODEL, "gpu": GPU, "gpus": GPUS, "link": LINK, "requests": counted, "rounds": ROUNDS}
    outcome = {
        **settings, "map": found, "transfers": moved, "checks": checks,
        "median_error": round(disaggregation_error(counted), 3),
    }  # fmt: skip
    print(json.dumps(record("disaggregation_model", outcome)))
    if arguments.json:
        write_json(arguments.json, "disaggregation_model", outcome)


def parser() -> argparse.ArgumentParser:
    """The command line."""
    flags = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    flags.add_argument("--requests", type=int, default=120, help="requests that are looked at in a run (default: 120)")
    flags.add_argument("--quick", action="store_true", help="one kind of request, 60 requests")
    flags.add_argument("--json", metavar="FILE", help="also write the figures to FILE")
    return flags


if __name__ == "__main__":
    run(main, parser())
