"""What every lesson's tests ask of its script, its exercise and its rows of claims, in a few lines each."""

from __future__ import annotations

import io
import itertools
import json
import os
import subprocess
import sys
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from types import ModuleType
from unittest import mock

from minivllm.lab.cli import run
from minivllm.lab.exercise import CheckResult, checks_of, exercise_path, load, run_checks
from minivllm.lab.mutants import Mutant, load_mutant

REPOSITORY = Path(__file__).resolve().parents[2]
noted: list[tuple[str, object]] = []
"""User properties of the test that is running: they travel with its report, also from a worker of xdist."""


def script_path(number: str) -> Path:
    """`vllm/NN_*.py`."""
    (path,) = (REPOSITORY / "vllm").glob(f"{number}_*.py")
    return path


def run_script(number: str, *arguments: str, seconds: int = 300) -> subprocess.CompletedProcess[str]:
    """Run a lesson's script in a process of its own, without a GPU, on one thread: others use this machine too."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "COLUMNS": "100"}
    environment.pop("TRITON_INTERPRET", None)
    command = [sys.executable, str(script_path(number)), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=seconds, env=environment, check=False)


def assert_refuses(lesson: ModuleType, *arguments: str, about: str) -> None:
    """Bad input: exit code 2 and one line on stderr that says `about`, before any work is shown."""
    said, shown = io.StringIO(), io.StringIO()
    with mock.patch.object(sys, "argv", ["lesson", *arguments]), redirect_stderr(said), redirect_stdout(shown):
        try:
            run(lesson.main, lesson.parser())
        except SystemExit as end:
            code = end.code
        else:
            code = 0
    assert code == 2, f"exit code {code}"
    assert len(said.getvalue().strip().splitlines()) == 1, said.getvalue()
    assert about in said.getvalue(), said.getvalue()
    assert len(shown.getvalue().splitlines()) <= 1, shown.getvalue()


def figures_of_quick_run(number: str, folder: Path) -> dict:
    """What `--quick --json --plot` measured. It must end well, with three lines, and leave both files.

    On a busy machine one line stands for those that rest on timings.
    """
    results, picture = folder / "results.json", folder / "figure.svg"
    done = run_script(number, "--quick", "--json", str(results), "--plot", str(picture))
    assert done.returncode == 0, f"exit code {done.returncode}: {done.stdout[-1000:]}{done.stderr[-2000:]}"
    assert picture.read_text().startswith("<?xml")
    record = json.loads(results.read_text())
    assert record["machine"]["versions"]["torch"]
    lines = done.stdout.split("What you saw")[1]
    assert lines.count("•") == 3 or "This machine was disturbed" in lines
    return record["figures"]


def solution_results(number: str) -> list[CheckResult]:
    """The exercise's checks on the lesson's script."""
    return run_checks(load(script_path(number)), checks_of(number))


def stub_results(number: str) -> list[CheckResult]:
    """The exercise's checks on the stub."""
    return run_checks(load(exercise_path(number)), checks_of(number))


def checks_that_catch(number: str, mutant: Mutant) -> list[str]:
    """The check that fails first on the script with the mutant's change, or none. One is enough."""
    module = load_mutant(script_path(number), mutant)
    results = (result for check in checks_of(number) for result in run_checks(module, [check]))
    caught = list(itertools.islice((result.name for result in results if not result.passed), 1))
    noted.append(("mutant", [number, repr(mutant), bool(caught)]))
    return caught
