"""The workshop's slides in Chromium: every text and figure fits, can be read, and comes from the
page's own folder.
"""

import os
from collections.abc import Iterator
from pathlib import Path

import npm_packages
import pytest
import slides
from e2e.browser import faultless, serious_violations
from playwright.sync_api import Browser, Page
from repository import ROOT

pytestmark = pytest.mark.browser
LESSONS = [deck.path.stem[:2] for deck in slides.decks(ROOT)]
LEAST_PIXELS = 24
LEAST_SCALE = 1.2
"""A figure is drawn for a page, so on a slide it must be larger."""

FAULTS = """([leastPixels, leastScale]) => [...document.querySelectorAll('.slide')].flatMap((slide, index) => {
  const faults = [], style = getComputedStyle(slide), box = slide.getBoundingClientRect();
  const inner = {
    left: box.left + parseFloat(style.paddingLeft), right: box.right - parseFloat(style.paddingRight),
    top: box.top + parseFloat(style.paddingTop), bottom: box.bottom - parseFloat(style.paddingBottom),
  };
  const say = (element, fault) =>
    faults.push(`slide ${index + 1}: <${element.localName}> ${element.textContent.trim().slice(0, 30)} ${fault}`);
  let above = inner.top;
  for (const part of slide.children) {
    const at = part.getBoundingClientRect();
    if (at.top < above - 1) say(part, 'covers what is above it');
    above = at.bottom;
  }
  const visible = [...slide.querySelectorAll('*')].filter(element => element.getClientRects().length);
  for (const element of visible) {
    const at = element.getBoundingClientRect(), look = getComputedStyle(element);
    const fits = at.left > inner.left - 1 && at.right < inner.right + 1 && at.bottom < inner.bottom + 1;
    if (!fits || at.top < inner.top - 1) say(element, 'is outside the slide');
    if (look.overflow !== 'visible' && element.scrollWidth > element.clientWidth + 1) say(element, 'is cut');
    const hasText = [...element.childNodes].some(node => node.nodeType === 3 && node.textContent.trim());
    if (hasText && parseFloat(look.fontSize) < leastPixels) say(element, `has text of ${look.fontSize}`);
  }
  for (const image of slide.querySelectorAll('img')) {
    const scale = Math.min(image.clientWidth / image.naturalWidth, image.clientHeight / image.naturalHeight);
    if (!(scale >= leastScale)) say(image, `${image.getAttribute('src')} is drawn at ${scale.toFixed(2)}`);
  }
  return faults;
})"""


@pytest.fixture(scope="module")
def opened(browser: Browser, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Page, Path]]:
    """Build all decks, and open a page for them."""
    out = tmp_path_factory.mktemp("slides")
    try:
        npm_packages.downloaded(npm_packages.OF_THE_SLIDES)
    except npm_packages.NotAvailable as reason:
        (pytest.fail if os.environ.get("MINIVLLM_REQUIRE_BROWSER") else pytest.skip)(f"no slides: {reason}")
    slides.build(ROOT, out, slides.decks(ROOT))
    with browser.new_page(viewport={"width": slides.WIDTH, "height": slides.HEIGHT}) as page, faultless(page):
        page.emulate_media(color_scheme="dark")  # which must change nothing
        yield page, out


@pytest.mark.parametrize("lesson", LESSONS)
def test_every_slide_fits_and_can_be_read(opened: tuple[Page, Path], lesson: str):
    page, out = opened
    (deck,) = slides.decks(ROOT, lesson)
    slides.open_printed(page, out / f"{deck.path.stem}.html")
    assert page.locator(".pdf-page").count() == len(deck.slides)
    assert page.evaluate(FAULTS, [LEAST_PIXELS, LEAST_SCALE]) == []
    assert serious_violations(page, "color-contrast") == []
    assert page.evaluate("() => getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"


def test_a_fault_is_found(opened: tuple[Page, Path]):
    """Spoil a slide in each of the ways that the test above looks for."""
    page, out = opened
    slides.open_printed(page, next(out.glob("04_*.html")))
    page.evaluate("""() => {
      const [first, second, third] = document.querySelectorAll('.slide');
      const style = 'font-size: 20px; white-space: nowrap';
      first.insertAdjacentHTML('beforeend', `<p style="${style}">${'word '.repeat(200)}</p>`);
      second.insertAdjacentHTML('afterbegin', '<div style="flex: none; height: 500px"></div>');
      third.querySelector('h2').style.marginBottom = '-80px';
    }""")
    faults = "\n".join(page.evaluate(FAULTS, [LEAST_PIXELS, LEAST_SCALE]))
    for fault in ("is outside the slide", "has text of 20px", "is drawn at", "covers what is above it"):
        assert fault in faults


def test_the_deck_moves_by_key_and_keeps_the_notes_from_the_room(opened: tuple[Page, Path]):
    page, out = opened
    page.goto(next(out.glob("04_*.html")).as_uri())
    page.wait_for_function("() => Reveal.isReady()")
    page.keyboard.press("ArrowRight")
    assert page.evaluate("() => Reveal.getIndices().h") == 1
    assert "Bet" in page.locator("section.present h2").inner_text()
    assert not page.locator("section.present aside.notes").is_visible()
    assert "A step is one pass" in page.evaluate("() => Reveal.getSlideNotes()")
