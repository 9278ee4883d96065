"""Check every lesson's script, exercise and rows of claims, in a few lines each."""

from __future__ import annotations

import io
import itertools
import json
import math
import os
import re
import runpy
import subprocess
import sys
from collections.abc import Callable
from contextlib import redirect_stdout
from functools import cache
from pathlib import Path
from types import ModuleType
from unittest import mock

import pytest
import torch
from lessons.mistakes import messages_of, mutants_of
from refusals import assert_refuses as assert_refuses

from minivllm.config import ModelConfig
from minivllm.core.scheduler import Scheduler
from minivllm.core.scheduler_output import ModelRunnerOutput, SchedulerOutput
from minivllm.platforms.triton_utils import HAS_TRITON, INTERPRETED
from minivllm_lab.checks.checking import Check, CheckResult
from minivllm_lab.checks.mutants import Mutant, load_mutant
from minivllm_lab.checks.reach import joined, names_in, reached
from minivllm_lab.exercise import checks_of, checks_paths, load, run_checks

REPOSITORY = Path(__file__).resolve().parents[2]
noted: list[tuple[str, object]] = []
"""User properties of the test that is running: they travel with its report, also from a worker
of xdist.
"""


def script_path(number: str) -> Path:
    """Return the path of `vllm/NN_*.py`."""
    (path,) = (REPOSITORY / "vllm").glob(f"{number}_*.py")
    return path


def run_script(number: str, *arguments: str) -> str:
    """Run a lesson's script as a program, which must succeed, and return what it printed.

    Without a GPU it runs in this process, where torch is imported already. If there is one, or if
    this process compiles its kernels, the script gets a process of its own that does not see the
    GPU.
    """
    if torch.cuda.is_available() or (HAS_TRITON and not INTERPRETED):
        return _run_without_gpu(number, *arguments)
    shown = io.StringIO()
    with (
        mock.patch.object(sys, "argv", [str(script_path(number)), *arguments]),
        mock.patch.dict(os.environ),
        redirect_stdout(shown),
    ):
        try:
            runpy.run_path(str(script_path(number)), run_name="__main__")
        except SystemExit as end:
            raise AssertionError(f"exit code {end.code}: {shown.getvalue()[-1000:]}") from end
    return shown.getvalue()


def _run_without_gpu(number: str, *arguments: str, seconds: int = 300) -> str:
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    environment.pop("TRITON_INTERPRET", None)
    command = [sys.executable, str(script_path(number)), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=seconds, env=environment, check=False)
    assert done.returncode == 0, f"exit code {done.returncode}: {done.stdout[-1000:]}{done.stderr[-2000:]}"
    return done.stdout


def figures_of_quick_run(number: str, folder: Path, *arguments: str) -> dict:
    """Return what `--quick --json --plot` measured; it must succeed, print three lines, and leave
    both files.

    On a busy machine one line replaces those that depend on timings.
    """
    results, picture = folder / "results.json", folder / "figure.svg"
    shown = run_script(number, "--quick", *arguments, "--json", str(results), "--plot", str(picture))
    assert picture.read_text().startswith("<?xml")
    record = json.loads(results.read_text())
    assert record["machine"]["versions"]["torch"]
    lines = shown.split("What you saw")[1]
    assert lines.count("•") == 3 or "This machine was disturbed" in lines
    return record["figures"]


def mistaken(number: str, mistake: str) -> ModuleType:
    """Return the lesson's script with this mistake of its `mistakes.toml`."""
    return load_mutant(script_path(number), mutants_of(number)[mistake])


def results_of(path: Path, number: str) -> list[CheckResult]:
    """Return the results of the exercise's checks on a file: the lesson's script, or the stub."""
    return run_checks(load(path), _checks(number))


def assert_caught(number: str, mutant: Mutant, says: re.Pattern[str] | None = None) -> None:
    """Expect a check to fail on the script with the mutant's change, and one of them to say this.

    No more checks run than it takes.
    """
    module = load_mutant(script_path(number), mutant)
    checks = nearest_first(number, mutant[0].partition(".")[0])
    results = (result for check in checks for result in run_checks(module, [check]))
    problems = (result.problem or "" for result in results if not result.passed)
    first = next(problems, None)
    noted.append(("mutant", [number, repr(mutant), first is not None]))
    assert first is not None
    assert says is None or any(map(says.search, itertools.chain([first], problems))), f"no check says {says.pattern!r}"


def exercise_test(number: str) -> Callable[[str], None]:
    """Return a test for a lesson's test file, with a case for each mistake of its `mistakes.toml`:

    test_the_checks_catch = exercise_test("13")
    """
    mutants, messages = mutants_of(number), messages_of(number)
    assert messages.keys() <= mutants.keys()

    @pytest.mark.interpreted
    @pytest.mark.filterwarnings("ignore::RuntimeWarning")  # some mistakes make NaN
    @pytest.mark.parametrize("mistake", mutants)
    def test_the_checks_catch(mistake: str) -> None:
        assert_caught(number, mutants[mistake], messages.get(mistake))

    return test_the_checks_catch


_checks = cache(checks_of)


def nearest_first(number: str, function: str) -> list[Check]:
    """Return the lesson's checks, starting with those that reach this function of the script in the
    fewest calls.

    They are the likeliest to catch a mistake in it; the others only take time.
    """
    return sorted(_checks(number), key=lambda check: _calls_from(number, check.__name__).get(function, math.inf))


@cache
def _calls_from(number: str, check: str) -> dict[str, int]:
    """Return, for each function that a check reaches in its own file and in the script, how many
    functions are nearer to the check.
    """
    return reached(
        check, joined(*(names_in(path.read_text()) for path in (*checks_paths(number), script_path(number))))
    )


def engine_step(scheduler: Scheduler) -> SchedulerOutput:
    """Schedule a step, and sample a token for each request that has caught up."""
    output, live = scheduler.schedule(), scheduler.requests
    done = [name for name in output.num_scheduled_tokens if live[name].num_computed_tokens == live[name].num_tokens]
    scheduler.update_from_output(output, ModelRunnerOutput({name: [1] for name in done}))
    return output


SMALL = ModelConfig(
    num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=16, hidden_size=64,
    intermediate_size=96, vocab_size=128, max_position_embeddings=256, model_type="llama",
)  # fmt: skip
"""A model for tests that need weights of any values, and little time."""
