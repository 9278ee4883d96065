"""Logging: `logger = init_logger(__name__)`, then what Python's `logging` offers.

`MINIVLLM_LOGGING_LEVEL` sets the level (default INFO; DEBUG says a line for each step). Lines go to standard error.
An application that has configured the logger "minivllm" itself keeps its configuration.

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
    """The logger of a module, below the logger "minivllm", which is configured at the first call.

    Raises:
        MinivllmError: the environment asks for a level that does not exist.
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
    """Writes to what `sys.stderr` is at that moment: notebooks and tests replace it."""

    def emit(self, record: logging.LogRecord) -> None:
        """As `logging.StreamHandler`."""
        self.stream = sys.stderr
        super().emit(record)


def _level(name: str) -> int:
    levels = logging.getLevelNamesMapping()
    if name.upper() not in levels:
        raise MinivllmError(f"{LEVEL_VARIABLE} is {name!r}; it must be one of {', '.join(levels)}")
    return levels[name.upper()]
