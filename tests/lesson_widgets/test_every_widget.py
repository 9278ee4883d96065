"""What holds for every widget: it is drawn again at once, and needs neither torch nor much time to import.

Times are of the processor: they hold on a machine that is busy with something else.
"""

import contextlib
import importlib
import inspect
import math
import statistics
import subprocess
import sys
import time
from pathlib import Path

import pytest

from minivllm.errors import MinivllmError
from widgets import base, kv_cache, paged_attention

BLOCKS = (16, 32, 48, 64, 80, 96, 112, 128)
MOVES = {
    "kv_cache": [{"max_model_len": length} for length in kv_cache.CONTEXTS * 2],
    "paged_attention": [{"block_size": size} for size in paged_attention.BLOCK_SIZES * 2],
    "flash_attention": [move for block in BLOCKS for move in ({"block_q": block}, {"tiles_seen": block % 7})],
    "continuous_batching": [{"slots": slots} for slots in (1, 2, 4, 8, 16)],
    "prefix_caching": [{"pool": 2048}, {"turns": 2}, {"kind": "documents"}, {"users": 16}, {"prefix": 256}],
    "optimization_catalog": [
        {"requests": "mixed"},
        {"paging": False},
        {"slots": 16},
        {"speculative_tokens": 3},
        {"acceptance": 0.7},
    ],
}
"""Turns of the knobs for each widget, most of them to where they have not been."""


TYPED = ("other_model", "levers")
"""Arguments of a sweep that are no knob with values of its own."""


def knobs_of(widget) -> list[str]:
    names = [name for name in inspect.signature(widget.sweep).parameters if name not in TYPED]
    return [*names, *getattr(widget, "OFF", {})]


@pytest.mark.parametrize("name", MOVES)
def test_what_no_knob_can_say_is_refused_in_one_line(name: str):
    widget = importlib.import_module(f"widgets.{name}")
    for knob in knobs_of(widget):
        for value in (None, math.nan, "nonsense", 10**9, -(10**9)):
            with pytest.raises(MinivllmError) as refusal:
                print(knob, value, widget.sweep(**{knob: value}))
            assert "\n" not in str(refusal.value)


@pytest.mark.parametrize("name", MOVES)
def test_the_most_that_is_let_in_is_no_burden(name: str):
    widget = importlib.import_module(f"widgets.{name}")
    for knob, value in widget.MOST.items():
        start = time.process_time()
        with contextlib.suppress(MinivllmError):  # what it says alone may not fit the other knobs
            widget.figure(widget.sweep(**{knob: value}))
        assert time.process_time() - start < 2, knob


def test_every_widget_is_here():
    modules = Path(base.__file__).parent.glob("*.py")
    assert {path.stem for path in modules if "\ndef show() -> LessonWidget:" in path.read_text()} == set(MOVES)


@pytest.mark.parametrize("name", MOVES)
def test_a_redraw_takes_less_than_100_ms(name: str):
    shown, seconds = importlib.import_module(f"widgets.{name}").show(), []
    for move in MOVES[name]:
        before = shown.state
        start = time.process_time()
        shown.set(**move)
        seconds.append(time.process_time() - start)
        assert shown.state is not None, shown.verdict.value
        assert shown.state is not before
    assert statistics.median(seconds) < 0.1


@pytest.mark.parametrize("name", MOVES)
def test_importing_needs_no_torch_and_little_time(name: str):
    code = (
        f"import sys, time; start = time.process_time(); from widgets import {name} as widget; "
        "seconds = time.process_time() - start; widget.show(); "
        "print(seconds, {'torch', 'triton', 'transformers', 'matplotlib', 'numpy'} & set(sys.modules))"
    )
    for last in (False, True):  # a busy machine may be slow once
        run = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True)
        assert run.stderr == ""
        seconds, heavy = run.stdout.split(maxsplit=1)
        assert heavy.strip() == "set()"
        if float(seconds) < 1.5:
            break
        assert not last, f"{seconds} s"
