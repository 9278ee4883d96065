"""Run everything that needs a GPU within a few minutes, the most valuable first, so that an early
end loses the least.

    python3 -P benchmarks/gpu_campaign.py                        # 12 minutes, results into out/gpu_campaign
    python3 -P benchmarks/gpu_campaign.py --only kernels engine-8b --minutes 4
    python3 -P benchmarks/gpu_campaign.py --device cpu --quick   # the same commands where there is no GPU

Each stage is one command with a time limit of its own. Stages run one at a time, since two
processes that share a GPU disturb each other's measurements. A stage writes its figures to
`<name>.<the GPU's name>.json`, the name it has in `benchmarks/results`, and its output to
`logs/<stage>.txt`. After every stage, `campaign.json` says what ran, how long it took and how it
ended. Copy the results that you want to keep into `benchmarks/results`; `make claims` then quotes
them.

The tests run first, since figures of a wrong kernel are worth nothing; then the kernels and the
engine, whose figures PERFORMANCE.md quotes; then the lessons' scripts. The campaign needs what `make
gpu` needs; lesson 06 also needs the server's packages. The exit code is 1 if a stage failed.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from minivllm.errors import MinivllmError
from minivllm.platforms.device import DEVICES, pick_device
from minivllm_lab.cli import Parser, positive_int, run
from minivllm_lab.results import write_json
from minivllm_lab.tables import console, table

ROOT = Path(__file__).resolve().parents[1]
BENCHMARKS = ROOT / "benchmarks"
EMBEDDED = ROOT / "vllm" / "models" / "tiny-python"
LEAST_SECONDS = 15
"""A stage is not started with less time left."""


@dataclass(frozen=True)
class Stage:
    """One command: its name, its arguments after `python`, and its time limit in seconds."""

    name: str
    arguments: tuple[str, ...]
    seconds: int


def stages_of(device: str, gpu: str, quick: bool, into: Path) -> list[Stage]:
    """List all stages, the most valuable first."""
    small = ("--quick",) if quick else ()

    def script(name: str, path: Path, stem: str, seconds: int, *more: str) -> Stage:
        results = ("--json", str(into / f"{stem}.{gpu}.json"))
        return Stage(name, (str(path), "--device", device, *results, *dict.fromkeys((*small, *more))), seconds)

    def engine(name: str, stem: str, shape: str) -> Stage:
        model = ("--model", str(EMBEDDED)) if device == "cpu" else ("--shape", shape, "--rounds", "2")
        return script(name, BENCHMARKS / "gpu_engine.py", stem, 150, *model)

    files = [str(one) for pattern in (ROOT / "tests/gpu.txt").read_text().split() for one in sorted(ROOT.glob(pattern))]
    tests = ("-P", "-m", "pytest", *files, "-m", "gpu", *(("-n", "8") if _has_xdist() else ()))
    lessons = [
        script(f"lesson-{path.stem[:2]}", path, path.stem, 75) for path in sorted((ROOT / "vllm").glob("[0-9]*_*.py"))
    ]
    return [
        Stage("tests", (*tests, "--collect-only") if device == "cpu" else tests, 180),
        script("kernels", BENCHMARKS / "kernels.py", "kernels", 90),
        engine("engine-8b", "gpu_engine", "llama-3.1-8b"),
        *lessons,
        engine("engine-0.6b", "gpu_engine_small", "qwen3-0.6b"),
    ]


def run_stage(stage: Stage, seconds: float, log: Path) -> dict[str, object]:
    """Run one stage for at most `seconds` and write its output to `log`; return its row of
    `campaign.json`.
    """
    paths = filter(None, (str(ROOT / "vllm"), os.environ.get("PYTHONPATH")))
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths)}
    start = time.monotonic()
    with log.open("w") as output:
        try:
            done = subprocess.run(
                [sys.executable, *stage.arguments],
                cwd=ROOT, env=environment, stdout=output, stderr=subprocess.STDOUT, timeout=seconds,
            )  # fmt: skip
            ended = "passed" if done.returncode == 0 else f"exit code {done.returncode}"
        except subprocess.TimeoutExpired:
            ended = f"stopped after {seconds:.0f} s"
    return {"stage": stage.name, "seconds": round(time.monotonic() - start, 1), "ended": ended}


def run_all(stages: list[Stage], into: Path, minutes: float) -> list[dict[str, object]]:
    """Run the stages until the time is up; `campaign.json` is updated after each."""
    (into / "logs").mkdir(parents=True, exist_ok=True)
    deadline, rows = time.monotonic() + 60 * minutes, []
    for stage in stages:
        left = deadline - time.monotonic()
        if left < LEAST_SECONDS:
            rows.append({"stage": stage.name, "seconds": 0.0, "ended": "not started: no time left"})
        else:
            console.print(f"{stage.name}, at most {min(stage.seconds, left):.0f} s")
            rows.append(run_stage(stage, min(stage.seconds, left), into / "logs" / f"{stage.name}.txt"))
        write_json(into / "campaign.json", "gpu_campaign", {"stages": rows})
    return rows


def chosen(stages: list[Stage], names: list[str] | None) -> list[Stage]:
    """Return the stages with these names, or all if there are none.

    Raises:
        MinivllmError: there is no stage of that name.
    """
    known = [stage.name for stage in stages]
    if unknown := [name for name in names or () if name not in known]:
        raise MinivllmError(f"no stage {unknown[0]!r}: the stages are {', '.join(known)}")
    return [stage for stage in stages if not names or stage.name in names]


def main(arguments: argparse.Namespace) -> None:
    """Run the stages and print how each ended."""
    device = pick_device(arguments.device)
    gpu = _name_of(device.type)
    into = Path(arguments.into).resolve()
    stages = chosen(stages_of(device.type, gpu, arguments.quick, into), arguments.only)
    rows = run_all(stages, into, arguments.minutes)
    table(f"Stages on {gpu}", ("stage", "s", "ended"), [tuple(row.values()) for row in rows])
    print(json.dumps({"into": str(into), "stages": rows}))
    if any(row["ended"] != "passed" for row in rows):
        raise SystemExit(1)


def _name_of(device: str) -> str:
    if device == "cpu":
        return "cpu"
    import torch

    return "-".join(torch.cuda.get_device_name().lower().split())


def _has_xdist() -> bool:
    from importlib.util import find_spec

    return find_spec("xdist") is not None


def parser() -> argparse.ArgumentParser:
    """Build the command-line parser."""
    flags = Parser(description=__doc__)
    flags.add_argument("--device", choices=DEVICES, default="cuda", help="where the stages run (default: cuda)")
    flags.add_argument("--into", metavar="FOLDER", default="out/gpu_campaign", help="where results and logs go")
    flags.add_argument("--minutes", type=positive_int, default=12, help="limit for all stages together (default: 12)")
    flags.add_argument("--only", nargs="+", metavar="STAGE", help="run only these stages")
    flags.add_argument("--quick", action="store_true", help="small cases, to try the stages out")
    return flags


if __name__ == "__main__":
    run(main, parser())
