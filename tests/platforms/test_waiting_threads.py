"""Threads that wait for the next operator sleep soon, unless a user has decided otherwise."""

import os
import subprocess
import sys

import pytest

from minivllm.platforms.threads import parallel_region

NAMES = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME", "OMP_NUM_THREADS")
PROCESSOR_SECONDS_OF_WAITING = """
import time
import minivllm, torch
torch.set_num_threads(2)
x = torch.ones(1 << 16)
x.add_(1)
start = time.process_time()
for _ in range(50):
    x.add_(1)  # threads share it
    time.sleep(0.005)
print(time.process_time() - start)
"""
ENVIRONMENT = f"import os, minivllm; print([os.environ.get(name) for name in {NAMES[:3]}])"


def printed_by(program: str, **environment: str) -> str:
    """Return what a process with these choices of a user prints."""
    inherited = {name: value for name, value in os.environ.items() if name not in NAMES}
    command = [sys.executable, "-c", program]
    return subprocess.run(command, env=inherited | environment, check=True, capture_output=True, text=True).stdout


@pytest.mark.skipif(
    parallel_region() is None or len(os.sched_getaffinity(0)) < 2,
    reason="torch has another OpenMP library than GNU's here, or one core, where nothing spins",
)
def test_threads_that_wait_take_little_time() -> None:
    always = float(printed_by(PROCESSOR_SECONDS_OF_WAITING, GOMP_SPINCOUNT="300000"))
    assert float(printed_by(PROCESSOR_SECONDS_OF_WAITING)) < always / 2


@pytest.mark.parametrize(
    ("chosen", "found"),
    [
        ({}, [None, "1000", "1"]),
        ({"GOMP_SPINCOUNT": "7"}, [None, "7", "1"]),
        ({"OMP_WAIT_POLICY": "active"}, ["active", None, None]),
    ],
)
def test_what_a_user_has_set_stands(chosen: dict[str, str], found: list[str | None]) -> None:
    assert printed_by(ENVIRONMENT, **chosen) == f"{found}\n"
