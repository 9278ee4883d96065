"""The command's output: a prediction, a comparison, and the tables of errors, which a page quotes."""

from __future__ import annotations

import argparse
import difflib
import statistics
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TypeVar

from minivllm.config.checks import require
from minivllm.config.units import GIB
from minivllm.errors import MinivllmError
from minivllm.memory.bytes_per_token import KV_DTYPES
from minivllm_lab.tables import console, markdown_table, table
from minivllm_lab.workload import published
from minivllm_lab.workload.load import Load, drawn_lengths, make_load, of_bench, of_kind, read_bench
from minivllm_lab.workload.prediction import Prediction, compare, explain
from minivllm_lab.workload.published import ASIDE, KINDS, known_error, published_rows
from minivllm_lab.workload.server import Server, minor_version
from minivllm_simulate.hardware import HARDWARE, get_hardware
from minivllm_simulate.known_models import CONFIGS, HYBRIDS, find_model
from minivllm_simulate.workloads import WORKLOADS

Found = TypeVar("Found")
PAGE = Path(__file__).parents[3] / "lessons" / "workload.md"
BEGIN, END = "<!-- errors: begin -->\n", "<!-- errors: end -->"
BY_KIND = ("what is predicted", "rows", "median", "worst", "labs not calibrated on", "goal")
BY_SOURCE = ("source", "vLLM", "GPU", "rows", "median error", "role")


def report(arguments: argparse.Namespace) -> None:
    """Print what the command line asks for."""
    if arguments.errors:
        if arguments.write:
            published.write_modelled()
            write_page()
        print_errors()
        return
    require(arguments.model is not None, "give a model, or --errors for the table of errors")
    require(arguments.rate is None or arguments.clients is None, "give --rate or --clients, not both")
    prediction = Prediction(_server(arguments), _load(arguments))
    result = read_bench(arguments.compare) if arguments.compare else None
    print_prediction(arguments.model, prediction)
    if result:
        rows = [
            (name, _figure(predicted), _figure(measured), f"{predicted / measured - 1:+.0%}", known_error(kind))
            for name, predicted, measured, kind in compare(prediction, result)
        ]
        table(f"Beside {Path(arguments.compare).name}", ("metric", "predicted", "measured", "error", "usual"), rows)
        console.print("\n".join(explain(prediction, result)), markup=False)


def print_prediction(name: str, prediction: Prediction) -> None:
    """Print what fits, the metrics with their usual errors, the knee, and the knobs."""
    server = prediction.server
    copies = f"{server.tp} × {server.gpu.name}" if server.tp > 1 else server.gpu.name
    console.print(
        f"{name} on {copies}, vLLM {server.version} ({server.host.name})\n{prediction.load}\n"
        f"{server.ledger.kv_bytes / GIB:.1f} GiB a GPU are left for the KV cache: {server.kv_tokens:,} tokens, or "
        f"{prediction.at_once:,} such requests at once. {prediction.measured.batch:.1f} run in the mean.\n",
        markup=False,
    )
    figures = prediction.figures().items()
    rows = [(metric, _figure(value), known_error(prediction.kind(metric))) for metric, value in figures]
    rows.append(("knee, requests/s", _figure(prediction.knee), known_error("knee")))
    table("Predicted (modelled)", ("metric", "predicted", "usual error"), rows)
    knobs = [(knob.flag, f"{knob.knee:.2f} ×", f"{knob.gap:.2f} ×") for knob in prediction.knobs()]
    table("What each knob does", ("flag", "knee", "gap"), knobs)
    console.print(prediction.advice(), markup=False)


def print_errors() -> None:
    """Print the errors by kind and by source, and every row."""
    table("Errors on published measurements that were kept aside", BY_KIND, by_kind())
    table("By source", BY_SOURCE, by_source())
    figures = published.modelled_figures()
    rows = [(row.key, row.value, figures[row.key], f"{row.error(figures[row.key]):+.0%}") for row in published_rows()]
    table("Row by row", ("row", "published", "modelled", "error"), rows)


def by_kind() -> list[tuple[str, ...]]:
    """Return the errors by kind."""
    rows = []
    for kind, (title, goal) in KINDS.items():
        error = known_error(kind)
        shares = (error.median, error.worst, error.independent, goal)
        rows.append((title, str(error.rows), *("–" if share is None else f"{share:.0%}" for share in shares)))
    return rows


def by_source() -> list[tuple[str, ...]]:
    """Return each source with its address, and its median error: of a calibration, what the fit left."""
    sources = dict.fromkeys(row.source for row in published_rows())
    rows = []
    for source in sources:
        off = published.errors(row for row in published_rows() if row.source == source)
        link = f"[{source.name}]({source.address}), {source.date}"
        rows.append((link, source.vllm, source.gpu, str(len(off)), f"{statistics.median(off):.0%}", source.role))
    return rows


def page_tables() -> str:
    """Return the page's tables in Markdown."""
    aside = sum(row.source.role == ASIDE for row in published_rows())
    counted = f"{aside} rows were kept aside; {len(published_rows()) - aside} calibrate.\n\n"
    return f"{markdown_table(BY_KIND, by_kind())}\n\n{counted}{markdown_table(BY_SOURCE, by_source(), words=True)}\n"


def write_page() -> None:
    """Put the tables into the page, between its two marks."""
    before, _, rest = PAGE.read_text().partition(BEGIN)
    PAGE.write_text(before + BEGIN + page_tables() + END + rest.partition(END)[2])


def _figure(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"


def _found(what: str, find: Callable[[str], Found], name: str, known: Iterable[str]) -> Found:
    """Return what `find` finds, or refuse with the nearest names."""
    if Path(name).expanduser().exists():
        return find(name)
    try:
        return find(name)
    except MinivllmError:
        by_plain = {each.lower(): each for each in known}
        near = [by_plain[each] for each in difflib.get_close_matches(name.lower(), by_plain, cutoff=0.4)]
        raise MinivllmError(
            f"no figures for the {what} {name!r}; nearest: {', '.join(near or by_plain.values())}"
        ) from None


def _server(arguments: argparse.Namespace) -> Server:
    share, dtype = arguments.gpu_memory_utilization, arguments.kv_cache_dtype
    require(share is None or 0 < share <= 1, f"--gpu-memory-utilization is {share}; it must be above 0 and at most 1")
    require(dtype in KV_DTYPES, f"--kv-cache-dtype is {dtype!r}; it must be one of {', '.join(KV_DTYPES)}")
    minor_version(arguments.vllm)
    models = (each.split("/")[1] for each in (*CONFIGS, *HYBRIDS))
    server = Server(
        _found("model", find_model, arguments.model, models), _found("GPU", get_hardware, arguments.gpu, HARDWARE),
        arguments.tp, arguments.vllm, arguments.max_model_len, arguments.max_num_seqs, arguments.max_num_batched_tokens,
        share, dtype,
    )  # fmt: skip
    _ = server.ledger, server.cost  # a model that does not fit is refused before anything is printed
    return server


def _load(arguments: argparse.Namespace) -> Load:
    name, rate, clients = arguments.load, arguments.rate, arguments.clients
    lengths = [each.removeprefix("~") for each in name.split(":")]
    if len(lengths) == 2 and all(each.isdigit() for each in lengths):
        require("0" not in lengths, f"--load is {name!r}; lengths must be above 0")
        return make_load(name, drawn_lengths(*name.split(":"), arguments.requests), rate, clients)
    if name.lower().endswith(".json"):
        return of_bench(name, rate, clients)
    known = f"PROMPT:OUTPUT, a .csv or .json file, or one of {', '.join(WORKLOADS)}"
    require(name in WORKLOADS or name.lower().endswith(".csv"), f"--load is {name!r}; give {known}")
    return of_kind(name, arguments.requests, rate, clients)
