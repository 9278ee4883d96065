"""Limits of CPU time that mean the same on any processor, whatever runs beside: stated for one machine, and scaled."""

import statistics
import time

REFERENCE_SECONDS = 0.0017
"""What `_draw` takes on a quiet core of the machine that the limits were set on (AMD Zen 3, 2.45 GHz, Python 3.11)."""


def slowness() -> float:
    """How many times slower than that machine this one is just now, but at least 1."""
    return max(1.0, statistics.median(_seconds() for _ in range(15)) / REFERENCE_SECONDS)


def _seconds() -> float:
    start = time.process_time()
    _draw()
    return time.process_time() - start


def _draw() -> str:
    """Plain Python as widgets run it: numbers become text."""
    return "".join(f'<circle cx="{number * 0.37:.2f}" r="2"/>' for number in range(4000))
