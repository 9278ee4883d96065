"""MINIVLLM_REQUIRE_BROWSER: a run of tests in which no browser test came to an end fails, and says why."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PASSES = "tests/core/test_request_queue.py"  # no browser test among them


@pytest.mark.parametrize(("value", "code"), [("1", 1), ("", 0)])
def test_a_run_without_a_browser_test_fails_where_one_is_required(value: str, code: int):
    environment = {**os.environ, "MINIVLLM_REQUIRE_BROWSER": value}
    command = [sys.executable, "-P", "-m", "pytest", "-p", "no:cacheprovider", PASSES]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT, env=environment)
    assert done.returncode == code, done.stdout[-3000:]
    assert " passed" in done.stdout
    assert ("no browser test ran" in done.stdout) == bool(code)
