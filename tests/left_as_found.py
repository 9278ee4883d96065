"""Check that a test leaves its process as it found it, because the next test in the same worker
inherits that state.
"""

from __future__ import annotations

import gc
import logging
import os
import random
import signal
import socket
import sys
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

try:
    from prometheus_client import REGISTRY
except ImportError:  # not on every machine that runs `make gpu`
    REGISTRY = None

SIGNALS = {
    number.name: number
    for number in (
        signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGALRM, signal.SIGVTALRM, signal.SIGUSR1,
        signal.SIGUSR2, signal.SIGCHLD, signal.SIGPIPE,
    )
}  # fmt: skip
OURS = ("minivllm", "minivllm_lab", "minivllm_simulate", "widgets")
"""What the names of the project's own modules begin with."""
NOT_OURS = {b"PYTEST_CURRENT_TEST", b"TORCHINDUCTOR_CACHE_DIR", b"NIXL_LOG_LEVEL"}
"""Variables that pytest sets for each test, torch when its compiler is first asked for, and we
when nixl is loaded.
"""
ABSENT = "nothing"


def seed_everything() -> None:
    """Give every test the same random numbers, whatever ran before it."""
    random.seed(0)
    np.random.seed(0)
    torch.default_generator.manual_seed(0)  # `torch.manual_seed` formats a stack for a GPU that is not there


def state() -> dict[str, dict[Any, Any]]:
    """Return the current values of each kind of state, by name."""
    return {kind: look() for kind, (look, _) in KINDS.items()}


def changes(before: dict[str, dict[Any, Any]], now: dict[str, dict[Any, Any]]) -> list[str]:
    """Return one line for each value that has changed."""
    results = []
    for kind, was in before.items():
        if was == now[kind]:
            continue
        added = [] if kind in MAY_GROW else [name for name in now[kind] if name not in was]
        names = [*was, *added]
        values = ((name, was.get(name, ABSENT), now[kind].get(name, ABSENT)) for name in names)
        results += [f"{kind} {name}: {old!r:.200} became {new!r:.200}" for name, old, new in values if old != new]
    return results


def put_back(before: dict[str, dict[Any, Any]]) -> None:
    """Restore what can be restored, so that one test fails and not all after it."""
    for kind, was in before.items():
        look, restore = KINDS[kind]
        if restore is not None and was != look():
            restore(was)


def _environment() -> dict[str, str]:
    """Return the variables; decode them only if they have changed, since that takes 0.1 ms."""
    encoded = {name: value for name, value in os.environ._data.items() if name not in NOT_OURS}
    if encoded != _variables["encoded"]:
        _variables["encoded"] = encoded
        _variables["decoded"] = {os.fsdecode(name): os.fsdecode(value) for name, value in encoded.items()}
    return _variables["decoded"]


_variables: dict[str, Any] = {"encoded": {}, "decoded": {}}


def _restore_environment(was: dict[str, str]) -> None:
    for name in set(_environment()) - set(was):
        del os.environ[name]
    os.environ.update(was)


def _process() -> dict[str, Any]:
    return {
        "working directory": os.getcwd(),
        "sys.argv": tuple(sys.argv),
        "sys.path": tuple(sys.path),
        "sys.excepthook": sys.excepthook,
        "threading.excepthook": threading.excepthook,
        "switch interval": sys.getswitchinterval(),
        "socket timeout": socket.getdefaulttimeout(),
        "garbage collector": (gc.isenabled(), gc.get_threshold()),
        "numpy errors": tuple(np.geterr().items()),
        "Prometheus metrics of the process": _metrics(),
        "shell of IPython": _shell(),
    }


def _metrics() -> int:
    return len(REGISTRY._names_to_collectors) if REGISTRY else 0


def _shell() -> bool:
    """Return whether IPython has a shell, which makes `notebook.begin` believe it is in a notebook."""
    interactive = sys.modules.get("IPython.core.interactiveshell")
    return interactive is not None and interactive.InteractiveShell.initialized()


def _restore_process(was: dict[str, Any]) -> None:
    os.chdir(was["working directory"])
    sys.argv[:], sys.path[:] = was["sys.argv"], was["sys.path"]
    sys.excepthook, threading.excepthook = was["sys.excepthook"], was["threading.excepthook"]
    sys.setswitchinterval(was["switch interval"])
    socket.setdefaulttimeout(was["socket timeout"])
    enabled, threshold = was["garbage collector"]
    gc.enable() if enabled else gc.disable()
    gc.set_threshold(*threshold)
    np.seterr(**dict(was["numpy errors"]))
    if _shell() and not was["shell of IPython"]:
        sys.modules["IPython.core.interactiveshell"].InteractiveShell.clear_instance()


def _torch() -> dict[str, Any]:
    return {
        "default dtype": torch.get_default_dtype(),
        "default device": torch.get_default_device(),
        "threads": torch.get_num_threads(),
        "gradients": torch.is_grad_enabled(),
        "inference mode": torch.is_inference_mode_enabled(),
        "deterministic algorithms": torch.are_deterministic_algorithms_enabled(),
        "float32 matmuls": torch.get_float32_matmul_precision(),
    }


def _restore_torch(was: dict[str, Any]) -> None:
    torch.set_default_dtype(was["default dtype"])
    torch.set_num_threads(was["threads"])
    torch.set_grad_enabled(was["gradients"])
    torch.use_deterministic_algorithms(was["deterministic algorithms"])
    torch.set_float32_matmul_precision(was["float32 matmuls"])


def _logging() -> dict[str, Any]:
    results: dict[str, Any] = {"disabled up to": logging.root.manager.disable}
    for name, logger in _loggers().items():
        handlers = tuple(each for each in logger.handlers if not type(each).__module__.startswith("_pytest"))
        levels = (logger.level, logger.disabled, logger.propagate, handlers, tuple(logger.filters))
        if levels != (logging.NOTSET, False, True, (), ()):
            results[f"logger {name!r}"] = levels
    return results


def _loggers() -> dict[str, logging.Logger]:
    """Return the root logger and the project's; look at all hundreds only if there are new ones."""
    known = logging.root.manager.loggerDict
    if len(known) != _logs["looked at"]:
        ours = [name for name in [*known] if name.partition(".")[0] == "minivllm"]
        _logs["loggers"] = {"": logging.root, **{name: logging.getLogger(name) for name in ours}}
        _logs["looked at"] = len(known)
    return _logs["loggers"]


_logs: dict[str, Any] = {"looked at": 0, "loggers": {}}


def _restore_logging(was: dict[str, Any]) -> None:
    logging.disable(was["disabled up to"])
    for known, now in _logging().items():
        name = known.removeprefix("logger ").strip("'")
        if known == "disabled up to" or was.get(known) == now:
            continue
        logger = logging.getLogger(name)
        state = was.get(known, (logging.NOTSET, False, True, (), ()))
        level, logger.disabled, logger.propagate, handlers, filters = state
        logger.setLevel(level)
        of_pytest = [each for each in logger.handlers if type(each).__module__.startswith("_pytest")]
        logger.handlers[:], logger.filters[:] = [*handlers, *of_pytest], filters


def _modules() -> dict[str, Any]:
    """Return only the project's own modules: what a test loads under its own name affects no other
    test.
    """
    if len(sys.modules) != _own["looked at"]:  # 4,000 names, twice for each test: looked at only when there are others
        _own["names"] = [name for name in sys.modules if name.startswith(OURS)]
        _own["looked at"] = len(sys.modules)
    return {name: sys.modules.get(name) for name in _own["names"]}


_own: dict[str, Any] = {"looked at": 0, "names": []}


def _signals() -> dict[str, Any]:
    return {name: signal.getsignal(number) for name, number in SIGNALS.items()}


def _restore_signals(was: dict[str, Any]) -> None:
    for name, handler in was.items():
        if signal.getsignal(SIGNALS[name]) != handler:
            signal.signal(SIGNALS[name], handler)


KINDS: dict[str, tuple[Callable[[], dict[Any, Any]], Callable[[dict[Any, Any]], None] | None]] = {
    "environment variable": (_environment, _restore_environment),
    "process:": (_process, _restore_process),
    "torch:": (_torch, _restore_torch),
    "logging:": (_logging, _restore_logging),
    "handler of": (_signals, _restore_signals),
    "module": (_modules, sys.modules.update),
}
MAY_GROW = {"module"}
"""Kinds in which something new is not a change."""
