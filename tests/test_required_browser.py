"""MINIVLLM_REQUIRE_BROWSER: a test run in which no browser test finished fails, and says why."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PASSES = "tests/core/test_request_queue.py"  # no browser test among them


def test_a_run_without_a_browser_test_fails_where_one_is_required():
    environment = {**os.environ, "MINIVLLM_REQUIRE_BROWSER": "1"}
    command = [sys.executable, "-P", "-m", "pytest", "-p", "no:cacheprovider", PASSES]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT, env=environment)
    assert " passed" in done.stdout
    assert " failed" not in done.stdout
    assert "MINIVLLM_REQUIRE_BROWSER is set, and no browser test ran" in done.stdout
    assert done.returncode == 1, done.stdout[-3000:]
