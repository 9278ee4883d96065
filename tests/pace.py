"""CPU time that means the same on any processor under any load: in seconds of a quiet core of one
reference machine.
"""

import time
from collections.abc import Callable

REFERENCE_SECONDS = 0.0017
"""What `_draw` takes there: an AMD Zen 3 at 2.45 GHz with Python 3.11."""


def quiet_seconds(action: Callable[[], object]) -> float:
    """Return the CPU seconds that the action takes on the reference machine: those measured here,
    divided by how much slower `_draw` is before and after it.

    If `_draw` is faster here than there, return what was measured here.
    """
    before, taken, after = (_seconds(part) for part in (_draw, action, _draw))
    return taken / max(1.0, (before + after) / 2 / REFERENCE_SECONDS)


def _seconds(action: Callable[[], object]) -> float:
    start = time.process_time()
    action()
    return time.process_time() - start


def _draw() -> str:
    """Run plain Python like the widgets': turn numbers into text."""
    return "".join(f'<circle cx="{number * 0.37:.2f}" r="2"/>' for number in range(4000))
