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
        if was != look():
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


Look, Restore = Callable[[], Any], Callable[[Any], object]


def _attribute(owner: Any, name: str) -> tuple[Look, Restore]:
    return lambda: getattr(owner, name), lambda was: setattr(owner, name, was)


def _list_of_sys(name: str) -> tuple[Look, Restore]:
    return lambda: tuple(getattr(sys, name)), lambda was: getattr(sys, name).__setitem__(slice(None), was)


def _handler(number: signal.Signals) -> tuple[Look, Restore]:
    return lambda: signal.getsignal(number), lambda was: signal.signal(number, was)


def _restore_collector(was: tuple[bool, tuple[int, int, int]]) -> None:
    enabled, threshold = was
    gc.enable() if enabled else gc.disable()
    gc.set_threshold(*threshold)


def _shell() -> bool:
    """Return whether IPython has a shell, which makes `notebook.begin` believe it is in a notebook."""
    interactive = sys.modules.get("IPython.core.interactiveshell")
    return interactive is not None and interactive.InteractiveShell.initialized()


def _restore_shell(was: bool) -> None:
    if not was:
        sys.modules["IPython.core.interactiveshell"].InteractiveShell.clear_instance()


SIGNALS = ("SIGINT", "SIGTERM", "SIGHUP", "SIGALRM", "SIGVTALRM", "SIGUSR1", "SIGUSR2", "SIGCHLD", "SIGPIPE")
VALUES: dict[str, tuple[Look, Restore | None]] = {
    "working directory": (os.getcwd, os.chdir),
    "sys.argv": _list_of_sys("argv"),
    "sys.path": _list_of_sys("path"),
    "sys.excepthook": _attribute(sys, "excepthook"),
    "threading.excepthook": _attribute(threading, "excepthook"),
    "switch interval": (sys.getswitchinterval, sys.setswitchinterval),
    "socket timeout": (socket.getdefaulttimeout, socket.setdefaulttimeout),
    "garbage collector": (lambda: (gc.isenabled(), gc.get_threshold()), _restore_collector),
    "numpy errors": (lambda: tuple(np.geterr().items()), lambda was: np.seterr(**dict(was))),
    "Prometheus metrics": (lambda: len(REGISTRY._names_to_collectors) if REGISTRY else 0, None),
    "shell of IPython": (_shell, _restore_shell),
    "disabled log levels": (lambda: logging.root.manager.disable, logging.disable),
    "torch's default dtype": (torch.get_default_dtype, torch.set_default_dtype),
    "torch's default device": (torch.get_default_device, None),
    "torch's threads": (torch.get_num_threads, torch.set_num_threads),
    "torch's gradients": (torch.is_grad_enabled, torch.set_grad_enabled),
    "torch's inference mode": (torch.is_inference_mode_enabled, None),
    "torch's determinism": (torch.are_deterministic_algorithms_enabled, torch.use_deterministic_algorithms),
    "torch's float32 matmuls": (torch.get_float32_matmul_precision, torch.set_float32_matmul_precision),
    **{f"handler of {name}": _handler(signal.Signals[name]) for name in SIGNALS},
}


def _values() -> dict[str, Any]:
    return {name: look() for name, (look, _) in VALUES.items()}


def _restore_values(was: dict[str, Any]) -> None:
    for name, (look, restore) in VALUES.items():
        if restore is not None and look() != was[name]:
            restore(was[name])


UNTOUCHED = (logging.NOTSET, False, True, (), ())


def _logging() -> dict[str, Any]:
    """Return the level, disabled, propagate, handlers and filters of each logger that is not as it was made."""
    results: dict[str, Any] = {}
    for name, logger in _loggers().items():
        handlers = tuple(each for each in logger.handlers if not type(each).__module__.startswith("_pytest"))
        found = (logger.level, logger.disabled, logger.propagate, handlers, tuple(logger.filters))
        if found != UNTOUCHED:
            results[name] = found
    return results


def _loggers() -> dict[str, logging.Logger]:
    """Return the root logger and the project's; look at all hundreds only if there are new ones."""
    known = logging.root.manager.loggerDict
    if len(known) != _logs["looked at"]:
        ours = [name for name in [*known] if name.partition(".")[0] == "minivllm"]
        _logs["loggers"] = {name: logging.getLogger(name) for name in ("root", *ours)}
        _logs["looked at"] = len(known)
    return _logs["loggers"]


_logs: dict[str, Any] = {"looked at": 0, "loggers": {}}


def _restore_logging(was: dict[str, Any]) -> None:
    for name, now in _logging().items():
        if was.get(name) == now:
            continue
        logger = logging.getLogger(name)
        level, logger.disabled, logger.propagate, handlers, filters = was.get(name, UNTOUCHED)
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


KINDS: dict[str, tuple[Callable[[], dict[Any, Any]], Callable[[dict[Any, Any]], None]]] = {
    "environment variable": (_environment, _restore_environment),
    "process:": (_values, _restore_values),
    "logger": (_logging, _restore_logging),
    "module": (_modules, sys.modules.update),
}
MAY_GROW = {"module"}
"""Kinds in which something new is not a change."""
