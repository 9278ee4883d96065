"""Logging: call `logger = init_logger(__name__)`, then use it like any logger of Python's
`logging`.

`MINIVLLM_LOGGING_LEVEL` sets the level (default INFO; DEBUG logs one line per step). Output goes to
standard error. If an application has already configured the logger "minivllm", its configuration is
kept.

In vLLM v0.33.0: `vllm/logger.py` (`init_logger`), `VLLM_LOGGING_LEVEL`.
"""

import logging
import os
import sys

from minivllm.errors import MinivllmError

LEVEL_VARIABLE = "MINIVLLM_LOGGING_LEVEL"
FORMAT = "%(levelname)s %(asctime)s [%(filename)s:%(lineno)d] %(message)s"
DATE_FORMAT = "%m-%d %H:%M:%S"


def init_logger(name: str) -> logging.Logger:
    """Return a module's logger, a child of the logger "minivllm", which the first call configures.

    Raises:
        MinivllmError: `MINIVLLM_LOGGING_LEVEL` is not a valid level.
    """
    root = logging.getLogger("minivllm")
    if not root.handlers and root.level == logging.NOTSET:
        handler = _StandardError()
        handler.setFormatter(logging.Formatter(FORMAT, DATE_FORMAT))
        root.addHandler(handler)
        root.setLevel(_level(os.environ.get(LEVEL_VARIABLE, "INFO")))
        root.propagate = False
    return logging.getLogger(name)


class _StandardError(logging.StreamHandler):
    """A log handler that looks up `sys.stderr` for each record, because notebooks and tests replace
    it.
    """

    def emit(self, record: logging.LogRecord) -> None:
        self.stream = sys.stderr
        super().emit(record)


def _level(name: str) -> int:
    levels = logging.getLevelNamesMapping()
    if name.upper() not in levels:
        raise MinivllmError(f"{LEVEL_VARIABLE} is {name!r}; it must be one of {', '.join(levels)}")
    return levels[name.upper()]
