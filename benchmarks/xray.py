"""What it costs an engine to be watched: processor time of the same run with the lines of its steps and without.

    uv run python benchmarks/xray.py

The core, in this process, serves requests on the embedded model; watched, it writes what a page or a file would get,
and puts it into a server's ring. Processor time, not the wall clock. Runs alternate, and the pairs' median ratio is
what counts: what else the machine does falls on both of a pair. The recorder's own time is taken in runs of its own,
since reading the clock in each step costs something too. The table is followed by one line of JSON.
"""

import argparse
import json
import statistics
import time
from collections.abc import Sequence

import torch

from minivllm.config import EMBEDDED_MODEL, CacheConfig
from minivllm.core.messages import EngineCoreOutput, EngineCoreRequest
from minivllm.core.output import SchedulerOutput
from minivllm.engine.core import EngineCore
from minivllm.entrypoints.xray.recorder import StepRing
from minivllm.sampling_params import SamplingParams
from minivllm_lab.cli import Parser, positive_int, run
from minivllm_lab.recording import bare_engine
from minivllm_lab.results import record, write_json
from minivllm_lab.tables import table

BATCHES = (1, 8, 32)
TOKENS = 48
BLOCKS = 1001


def serve(core: EngineCore, batch: int) -> tuple[float, int]:
    """Serve `batch` requests to their ends; returns seconds of processor time and the number of steps."""
    core.reset_prefix_cache()
    ring = StepRing()
    params = SamplingParams(temperature=0.0, max_tokens=TOKENS, ignore_eos=True)
    for index in range(batch):
        prompt = [1 + index] * (20 + 7 * (index % 5))
        core.add_request(EngineCoreRequest(str(index), prompt, params, (), time.monotonic()))
    steps, start = 0, time.process_time()
    while core.has_unfinished_requests():
        if lines := core.step().step_events:
            ring.put(lines)
        steps += 1
    return time.process_time() - start, steps


def compare(core: EngineCore, batch: int, pairs: int) -> dict[str, float]:
    """Microseconds of processor time a step, alone and watched, and what is added in percent.

    That is told twice. The difference of two runs has the noise of both; the recorder's own time has little noise, and
    leaves out what the pool's events cost.
    """
    serve(core, batch)
    seconds: dict[str, list[float]] = {"alone": [], "watched": [], "timed": []}
    own: list[float] = []
    steps = 1
    for number in range(pairs):
        for kind in list(seconds)[:: 1 if number % 2 else -1]:
            clock = start_watching(core, kind == "timed") if kind != "alone" else []
            spent, steps = serve(core, batch)
            core.stop_step_events()
            seconds[kind].append(spent)
            own += [sum(clock) / spent] * (kind == "timed")
    ratios = [after / before for before, after in zip(seconds["alone"], seconds["watched"], strict=True)]
    alone, watched = (statistics.median(seconds[kind]) / steps * 1e6 for kind in ("alone", "watched"))
    return {
        "alone_us": round(alone, 1),
        "watched_us": round(watched, 1),
        "added_percent": round(100 * (statistics.median(ratios) - 1), 2),
        "recorder_percent": round(100 * statistics.median(own), 2),
    }


def start_watching(core: EngineCore, timed: bool) -> list[float]:
    """Has the core write lines; the returned list gets the seconds of processor time of each, if they are `timed`."""
    core.start_step_events()
    assert core.step_recorder is not None
    observe, spent = core.step_recorder.observe, []

    def observe_timed(scheduled: SchedulerOutput, outputs: Sequence[EngineCoreOutput]) -> None:
        start = time.thread_time()
        observe(scheduled, outputs)
        spent.append(time.thread_time() - start)

    if timed:
        core.step_recorder.observe = observe_timed
    return spent


def main(arguments: argparse.Namespace) -> None:
    """Measures all batch sizes."""
    torch.set_num_threads(1)
    cache = CacheConfig(num_gpu_blocks=BLOCKS)
    core = bare_engine(EMBEDDED_MODEL, torch.device("cpu"), cache, max_model_len=512)
    figures = {str(batch): compare(core, batch, arguments.pairs) for batch in BATCHES}
    columns = ("requests", "alone", "watched", "added, %", "recorder, %")
    rows = [(batch, *one.values()) for batch, one in figures.items()]
    table("Processor time of a step with and without the lines of an x-ray, µs", columns, rows)
    if arguments.json:
        write_json(arguments.json, "xray", figures)
    print(json.dumps(record("xray", figures)))


def parser() -> argparse.ArgumentParser:
    """The command line."""
    flags = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    flags.add_argument("--pairs", type=positive_int, default=15, help="runs with and without (default: 15 each)")
    flags.add_argument("--json", metavar="FILE", help="also write the figures to FILE")
    return flags


if __name__ == "__main__":
    run(main, parser())
