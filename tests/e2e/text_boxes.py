"""Find texts of widgets' pictures that touch each other or stick out, for random settings:

PYTHONPATH=tests uv run python -m e2e.text_boxes --count 200 kv_cache

All pictures are measured in one page of Chromium.
"""

from __future__ import annotations

import argparse
import importlib
import random
import time
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from e2e.browser import start_browser
from e2e.chromium import HOW_TO_GET_IT, find_chromium
from playwright.sync_api import Page, sync_playwright

import widgets
from minivllm.errors import MinivllmError
from widgets.shell.knobs import Value
from widgets.shell.spec import Spec

WIDTHS = (360, 600, 760, 1200)
PATIENCE = 0.5
"""CPU seconds that a sweep may take: its texts change little afterwards."""
MEASURE = """pictures => pictures.map(picture => {
  document.body.innerHTML = picture;
  const frames = (text) => {
    let [first, last] = [0, Infinity];
    for (let mark = text.closest('[data-at]'); mark; mark = mark.parentElement.closest('[data-at]')) {
      const [from, to] = mark.dataset.at.split(' ').map(Number);
      [first, last] = [Math.max(first, from), Math.min(last, to)];
    }
    return [first, last];
  };
  document.querySelectorAll('[style]').forEach(mark => (mark.style.display = ''));
  const found = [];
  for (const root of document.querySelectorAll('body > svg')) {
    const page = root.getBoundingClientRect();
    const boxes = [...root.querySelectorAll('text')].map(text => {
      const box = text.getBoundingClientRect();
      const [first, last] = frames(text);
      const rim = box.height * 0.18; // of a line's height, letters take less
      const turned = text.hasAttribute('transform');
      const when = text.closest('[data-answer]') ? 2 : text.closest('[data-asking]') ? 1 : 3;
      return { words: text.textContent, left: box.left, right: box.right, first, last, turned, when,
               top: box.top + (turned ? 0 : rim), bottom: box.bottom - (turned ? 0 : rim) };
    });
    for (const [index, a] of boxes.entries()) {
      const inside = a.left > page.left - 1 && a.right < page.right + 1 && a.bottom < page.bottom + 1;
      if (!inside) found.push([a.words, 'the edge']);
      for (const b of boxes.slice(index + 1)) {
        const across = Math.min(a.right, b.right) - Math.max(a.left, b.left);
        const down = Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top);
        const together = a.first <= b.last && b.first <= a.last && a.when & b.when;
        if (across > 1 && down > 1 && together) found.push([a.words, b.words]);
      }
    }
  }
  return found;
})"""


class Drawn(NamedTuple):
    """A picture, and the setting and width for which it was drawn."""

    values: dict[str, Value]
    width: int
    picture: str


def random_settings(spec: Spec, count: int, seed: int = 0) -> Iterator[dict[str, Value]]:
    """Yield this many random settings of a widget's knobs, except lines of text."""
    draw = random.Random(seed)
    knobs = {name: knob for name, knob in spec.flat().items() if knob.kind != "entry"}
    for _ in range(count):
        yield {
            name: draw.choice([True, False] if knob.kind == "switch" else knob.places()) for name, knob in knobs.items()
        }


def known_state(spec: Spec, values: dict[str, Value]) -> Any:
    """Return the first state of a sweep that knows the outcome at the reader's value, or the state
    after PATIENCE.
    """
    state, until = None, time.process_time() + PATIENCE
    for state in spec.states(**values):
        if getattr(state, "known", True) or time.process_time() > until:
            break
    return state


def drawn(spec: Spec, settings: Sequence[dict[str, Value]], widths: Sequence[int] = WIDTHS) -> Iterator[Drawn]:
    """Draw each setting that is not refused at each width."""
    for values in settings:
        try:
            state = known_state(spec, spec.start() | values)
        except MinivllmError:
            continue
        yield from (Drawn(values, width, spec.pictures(state, width)) for width in widths)


def touching(page: Page, pictures: Sequence[str]) -> list[list[list[str]]]:
    """Return, for each picture, the pairs of texts that touch, and the texts that stick out."""
    return page.evaluate(MEASURE, list(pictures))


def main() -> None:
    """Print which texts touch, with one setting for each pair."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("widgets", nargs="*", default=widgets.names())
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    chromium = find_chromium()
    assert chromium, HOW_TO_GET_IT
    with sync_playwright() as playwright:
        page = start_browser(playwright, chromium).new_page()
        for name in arguments.widgets:
            spec = importlib.import_module(f"widgets.{name}").SPEC
            settings = [{}, *spec.presets.values(), *random_settings(spec, arguments.count, arguments.seed)]
            pictures = list(drawn(spec, settings))
            report(name, pictures, touching(page, [each.picture for each in pictures]))


def report(name: str, pictures: Sequence[Drawn], pairs: Sequence[list[list[str]]]) -> None:
    """Print the number of pictures in which texts touch, and an example of each pair."""
    bad = [(each, found) for each, found in zip(pictures, pairs, strict=True) if found]
    print(f"{name}: {len(bad)} of {len(pictures)} pictures", flush=True)
    seen = set[tuple[str, ...]]()
    for each, found in bad:
        for pair in found:
            key = tuple(words[:12] for words in pair)
            if key not in seen and len(seen) < 12:
                print(f"  {each.width}: {pair[0]!r} / {pair[1]!r}  {each.values}")
            seen.add(key)


if __name__ == "__main__":
    main()
