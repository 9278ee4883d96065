"""Test that what a test leaves behind is named and undone."""

import gc
import logging
import os
import signal
import socket
import sys
from pathlib import Path

import distribution
import numpy as np
import pytest
import torch
from IPython.core.interactiveshell import InteractiveShell
from left_as_found import changes, put_back, state

import minivllm.config as config

LEAKS = {
    "environment variable LEFT_BEHIND": lambda: os.environ.update(LEFT_BEHIND="1"),
    "environment variable PATH": lambda: os.environ.pop("PATH"),
    "process: working directory": lambda: os.chdir("/"),
    "process: sys.argv": lambda: sys.argv.append("--quick"),
    "process: sys.path": lambda: sys.path.append("nowhere"),
    "process: garbage collector": gc.disable,
    "process: socket timeout": lambda: socket.setdefaulttimeout(9),
    "process: numpy errors": lambda: np.seterr(all="ignore"),
    "process: shell of IPython": InteractiveShell.instance,
    "process: torch's default dtype": lambda: torch.set_default_dtype(torch.float64),
    "process: torch's threads": lambda: torch.set_num_threads(torch.get_num_threads() + 1),
    "process: torch's gradients": lambda: torch.set_grad_enabled(False),
    "logger minivllm": lambda: logging.getLogger("minivllm").setLevel(1),
    "logger minivllm.somewhere": lambda: setattr(logging.getLogger("minivllm.somewhere"), "disabled", True),
    "process: disabled log levels": lambda: logging.disable(50),
    "process: handler of SIGTERM": lambda: signal.signal(signal.SIGTERM, lambda *_: None),
    "module minivllm.config": lambda: sys.modules.pop(config.__name__),
}


@pytest.mark.parametrize("where", LEAKS)
def test_what_is_left_behind_is_named_and_put_back(where: str):
    before = state()
    LEAKS[where]()
    left = changes(before, state())
    put_back(before)
    (line,) = left
    assert line.startswith(f"{where}: ")
    assert changes(before, state()) == []


def test_files_that_share_something_or_come_first_are_there():
    for name in (*distribution.TOGETHER, *distribution.TOGETHER.values(), *distribution.LONGEST):
        assert (Path(__file__).parents[1] / name).exists(), name
