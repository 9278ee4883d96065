"""The site opened from disk in Chromium: it is searched, read and its knobs are turned, without any
network request.
"""

import re
from pathlib import Path

import pytest
from e2e.browser import box_of, faultless, serious_violations
from playwright.sync_api import Browser, Page

pytestmark = pytest.mark.browser
LESSON = "lessons/01_kv_cache.html"
PICTURE = ".lesson-widget[data-table=tiny] .lw-picture"
WIDGET = ".lesson-widget[data-table=tiny]"

# What sticks out of a narrow page, unless it scrolls inside a box of its own.
STICKS_OUT = """() => {
  const scrolls = element => element && element.tagName !== 'ARTICLE'
    && (getComputedStyle(element).overflowX !== 'visible' || scrolls(element.parentElement));
  return [...document.querySelectorAll('article *:not(svg *):not(math *)')]
    .filter(element => element.getBoundingClientRect().right > innerWidth + 1 && !scrolls(element.parentElement))
    .map(element => `${element.tagName} ${element.className.baseVal ?? element.className}`);
}"""


def test_the_search_finds_a_word_and_leads_to_it(opened):
    with opened("index.html") as page:
        page.locator("input[name=q]").fill("preemption")
        page.keyboard.press("Enter")
        result = page.get_by_role("link", name="Glossary > preemption", exact=True)
        result.wait_for()
        result.click()
        page.wait_for_url("**/lessons/GLOSSARY.html*#preemption")


def test_formulas_and_diagrams_are_seen(opened):
    with opened(LESSON) as page:
        for selector in ("div.math math msqrt", "article p math", ".mermaid .nodeLabel"):
            box = box_of(page.locator(selector).first)
            assert min(box["width"], box["height"]) > 4, selector
        assert page.locator("div.math math mfrac").first.bounding_box()["height"] > 25, "a fraction is two lines"


def test_a_widget_turns_by_keyboard_without_a_kernel(opened):
    with opened(LESSON) as page:
        picture, words = page.locator(PICTURE), page.locator(f"{WIDGET} .lw-says span")
        slider = page.locator(f"{WIDGET} [id$='-load']")
        page.locator(f"{WIDGET} button", has_text="Show me").click()
        before, said = picture.inner_html(), words.inner_text()
        slider.focus()
        page.keyboard.press("ArrowRight")
        assert picture.inner_html() != before
        assert (said, words.inner_text()) == ("At load 0.5 this is fine.", "At load 0.7 this is fine.")
        assert slider.get_attribute("aria-valuetext") == "0.7"
        page.keyboard.press("End")
        assert words.inner_text() == "At load 1.5 this is broken."
        assert page.locator(f"{WIDGET} [id$='-loud']").is_disabled()
        assert page.locator(f"{WIDGET} [id$='-servers']").is_enabled()
        progress = page.locator(f"{WIDGET} .lw-progress")
        assert progress.inner_text().startswith("✓ Met.")
        page.locator(WIDGET).get_by_role("button", name="Challenge 3").click()
        assert progress.inner_text() == "Not yet. It needs knobs that only turn in the notebook."


def test_a_preset_beyond_the_knobs_is_shown_and_a_knob_leads_back(opened):
    with opened(LESSON) as page:
        note, words = page.locator(f"{WIDGET} [id$='-note']"), page.locator(f"{WIDGET} .lw-says span")
        page.locator(f"{WIDGET} button", has_text="Said").click()
        assert (note.input_value(), words.inner_text()) == ("said", "At load 1.5 this is broken.")
        page.locator(f"{WIDGET} [id$='-load']").focus()
        page.keyboard.press("Home")
        assert (note.input_value(), words.inner_text()) == ("", "At load 0.1 this is fine.")


def test_a_link_into_the_glossary_says_what_the_term_means(opened):
    with opened(LESSON) as page:
        link, hint = (page.locator("article a[href$='GLOSSARY.html#kv-cache']").first, page.locator("#term-hint"))
        assert not hint.is_visible()
        link.focus()
        page.evaluate("scrollBy(0, 40)")
        page.wait_for_timeout(100)
        assert hint.is_visible()
        assert len(hint.inner_text()) > 20
        page.keyboard.press("Escape")
        hint.wait_for(state="hidden")
        link.hover()
        hint.wait_for()


def test_the_opening_figure_is_stepped_through_by_keyboard(opened):
    with opened(LESSON) as page:
        steps = page.locator(".steps .step")
        page.locator(".steps input").first.focus()
        assert [steps.nth(index).is_visible() for index in (0, 1)] == [True, False]
        page.keyboard.press("ArrowRight")
        assert [steps.nth(index).is_visible() for index in (0, 1)] == [False, True]


def test_a_lesson_read_to_its_end_is_marked_in_the_side_bar(opened):
    with opened("lessons/02_paged_attention.html") as page:
        caption = page.locator(".sidebar-tree .caption-text").first
        page.evaluate("localStorage.clear()")
        page.reload()
        assert caption.text_content() == "Lessons"
        page.locator(".next-page").scroll_into_view_if_needed()
        page.locator(".sidebar-tree [aria-label=finished]").wait_for()
        assert caption.text_content() == "Lessons · 1 of 12"
        page.reload()
        assert caption.text_content() == "Lessons · 1 of 12"
        page.evaluate("localStorage.clear()")


def test_the_page_and_its_pictures_follow_the_theme(opened):
    with opened(LESSON) as page:
        for theme in ("light", "dark"):
            dark = theme == "dark"
            page.emulate_media(color_scheme=theme)
            page.locator(f"{WIDGET} .lw-dark").wait_for(state="attached" if dark else "detached")
            ground = page.evaluate("getComputedStyle(document.body).backgroundColor")
            assert (sum(map(int, re.findall(r"\d+", ground)[:3])) < 200) == dark
            label = page.locator(".mermaid .nodeLabel").first.evaluate("label => getComputedStyle(label).color")
            assert (sum(map(int, re.findall(r"\d+", label)[:3])) > 500) == dark


@pytest.mark.parametrize("name", ["index.html", LESSON])
def test_nothing_serious_is_in_the_way_of_a_screen_reader(opened, name: str):
    with opened(name) as page:
        page.wait_for_load_state()
    assert serious_violations(page) == []  # axe itself requests style sheets


def turn_each(page: Page, widgets: list[str]) -> None:
    """Turn the first knob of each widget of a page, and expect another picture."""
    if widgets:
        page.locator(".lesson-widget .lw-picture > svg").nth(len(widgets) - 1).wait_for()
    for name in widgets:
        picture = page.locator(f".lesson-widget[data-table={name}] .lw-picture")
        before = picture.inner_html()
        page.locator(f".lesson-widget[data-table={name}] .lw-knob :enabled[id]").first.focus()
        page.keyboard.press("ArrowRight")
        if picture.inner_html() == before:
            page.keyboard.press("ArrowLeft")
        assert picture.inner_html() != before, name


def test_on_a_telephone_every_widget_lives_nothing_sticks_out_of_a_page_and_none_complains(opened, site: Path):
    wide, widgets = {}, []
    with opened("index.html", width=400) as page:
        for path in sorted(site.rglob("*.html")):
            page.goto(path.as_uri())
            widgets += (here := re.findall(r'data-table="([^"]+)"', path.read_text()))
            turn_each(page, here)
            result = page.evaluate(STICKS_OUT)
            if result or page.evaluate("document.documentElement.scrollWidth > innerWidth"):
                wide[path.name] = result
        assert wide == {}
    assert len(widgets) > 12


def test_on_a_telephone_pictures_are_whole_and_everything_is_large_enough_for_a_finger(site: Path, browser: Browser):
    phone = browser.new_context(viewport={"width": 390, "height": 844}, has_touch=True, is_mobile=True)
    with phone, phone.new_page() as page, faultless(page):
        page.goto(f"{site.as_uri()}/{LESSON}")
        page.locator(f"{WIDGET} button", has_text="Show me").click()
        for picture in page.locator(".lw-picture > svg").all():
            box = box_of(picture)
            assert box["x"] >= 0
            assert box["x"] + box["width"] <= 390
        assert box_of(page.locator("article p > img").first)["width"] > 500, "its words are too small to read"
        inputs = "button, select, summary, input:not([type=checkbox]), .lw-switch label"
        targets = page.locator(f"{WIDGET} .lw :is({inputs})")
        boxes = {target.inner_text() or target.get_attribute("id"): target.bounding_box() for target in targets.all()}
        assert len(boxes) > 10
        assert {name: box for name, box in boxes.items() if box and min(box["width"], box["height"]) < 44} == {}
        assert page.locator("[data-live]").count() == 0, "Python cannot run on a page from disk"
