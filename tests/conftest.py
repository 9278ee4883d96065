"""Tests that this machine cannot run are left out, and one line at the end says so."""

import pytest
import torch

from minivllm.lab.gpu import HAS_TRITON, INTERPRETED

LEFT_OUT = pytest.StashKey[list[str]]()


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "interpreted: runs a kernel in Triton's interpreter")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect `gpu` tests where there is no CUDA device, and `interpreted` ones where kernels are compiled."""
    reasons = {}
    if not torch.cuda.is_available() or INTERPRETED:
        reasons["gpu"] = "need a CUDA device (make gpu)"
    if not HAS_TRITON:
        reasons["interpreted"] = "need Triton, which has no build for this platform"
    elif not INTERPRETED:
        reasons["interpreted"] = "need Triton's interpreter (TRITON_INTERPRET=1)"
    said = []
    for mark, reason in reasons.items():
        left_out = [item for item in items if item.get_closest_marker(mark)]
        if left_out:
            config.hook.pytest_deselected(items=left_out)
            items[:] = [item for item in items if item not in set(left_out)]
            said.append(f"left out: {len(left_out)} tests that {reason}")
    config.stash[LEFT_OUT] = said


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    for line in config.stash.get(LEFT_OUT, []):
        terminalreporter.write_line(line)
