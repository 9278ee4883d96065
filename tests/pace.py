"""CPU time that means the same on any processor, whatever runs beside: in seconds of one
machine, on a quiet core.
"""

import time
from collections.abc import Callable

REFERENCE_SECONDS = 0.0017
"""What `_draw` takes there: an AMD Zen 3 at 2.45 GHz with Python 3.11."""


def quiet_seconds(action: Callable[[], object]) -> float:
    """CPU seconds that the action takes there: here's, divided by how much slower `_draw` is before
    it and after.

    Where `_draw` is faster than there, what the action takes here.
    """
    before, taken, after = (_seconds(part) for part in (_draw, action, _draw))
    return taken / max(1.0, (before + after) / 2 / REFERENCE_SECONDS)


def _seconds(action: Callable[[], object]) -> float:
    start = time.process_time()
    action()
    return time.process_time() - start


def _draw() -> str:
    """Plain Python as widgets run it: numbers become text."""
    return "".join(f'<circle cx="{number * 0.37:.2f}" r="2"/>' for number in range(4000))
