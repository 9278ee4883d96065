"""The page `/xray` in a real browser: live, paused, stepped back, clicked, saved, loaded; light and
dark.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from e2e.browser import ColorScheme, box_of, emptied_page, faultless, serious_violations, watched
from e2e.xray_run import BusyScheduler, Served, served
from playwright.sync_api import Browser, Page

from minivllm.entrypoints.xray.page import script, style

pytestmark = pytest.mark.browser
STEPS = 150
HEADER = '{"xray":2,"model":"tiny-python","core":0,"cores":1}'


@pytest.fixture(scope="module")
def run() -> list[str]:
    """Record the steps of a busy scheduler with 1,000 blocks."""
    busy = BusyScheduler()
    return [busy.line() for _ in range(STEPS)]


@pytest.fixture
def open_page(browser: Browser) -> Iterator[Callable[..., Page]]:
    complaints: list[list[str]] = []
    with ExitStack() as until_the_end:

        def open_at(url: str, scheme: ColorScheme = "light", width: int = 1366) -> Page:
            page = emptied_page(browser, width, 900, scheme)
            complaints.append(until_the_end.enter_context(watched(page)))
            page.goto(f"{url}/xray")
            return page

        yield open_at
        emptied_page(browser, 1366, 900)  # which ends its stream
    assert [complaint for those in complaints for complaint in those if "401" not in complaint] == []


@pytest.fixture
def server() -> Iterator[Served]:
    with served() as server:
        yield server


@pytest.fixture(scope="module")
def page_of_all(browser: Browser, run: list[str]) -> Iterator[Page]:
    """Open a page of its own that has been sent the whole run."""
    with served() as server, browser.new_context(viewport={"width": 1366, "height": 900}) as context:
        page = context.new_page()
        with faultless(page):
            page.goto(f"{server.url}/xray")
            server.put(run)
            at_step(page, STEPS)
            yield page


@pytest.fixture
def page(page_of_all: Page) -> Page:
    """Return the page of the whole run, live, with no request chosen."""
    page_of_all.evaluate("window.xray.show(window.xray.live)")
    at_step(page_of_all, STEPS)
    page_of_all.evaluate("document.activeElement.blur()")
    return page_of_all


def at_step(page: Page, step: int) -> None:
    """Wait until this step is drawn."""
    page.wait_for_function("step => window.xray?.frame?.step === step", arg=step)


def state_of(run: list[str], step: int) -> dict[str, Any]:
    return json.loads(run[step - 1])


def test_what_is_drawn_is_the_state_of_the_step(page: Page, run: list[str]) -> None:
    for step in (STEPS, 17, 90):
        page.evaluate("step => window.xray.go(step - 1)", step)
        at_step(page, step)
        state = state_of(run, step)
        held = {block for item in (*state["running"], *state["waiting"]) for block in item["blocks"]}
        numbers = dict(zip(*(page.locator(f".xr {tag}").all_inner_texts() for tag in ("dt", "dd")), strict=True))
        tokens = sum(row[1] for row in state["batch"])
        assert numbers["tokens in step"] == f"{tokens:,} of {state['max_num_batched_tokens']}"
        assert numbers["running"].split()[0] == str(len(state["running"]))
        assert numbers["waiting"].strip() == str(state["num_waiting"])
        assert numbers["blocks held"].split()[0] == f"{len(held):,}"
        assert numbers["cached and free"].split()[0] == f"{len(set(state['cached']) - held):,}"
        chips = page.locator("[data-number]").evaluate_all("chips => chips.map((one) => Number(one.dataset.number))")
        assert chips == [item["number"] for item in (*state["running"][:40], *state["waiting"])]


def test_blocks_are_marked_by_what_the_step_did_to_them(page: Page, run: list[str]) -> None:
    # A request was admitted, and found blocks in the cache.
    step = next(step for step in range(2, STEPS) if any(row[4] >= 16 for row in state_of(run, step)["batch"]))
    before, now = ({each["number"]: each["blocks"] for each in state_of(run, at)["running"]} for at in (step - 1, step))
    cached, hits, fresh = {row[0]: row[4] for row in state_of(run, step)["batch"]}, set(), set()
    for number, blocks in now.items():
        for index, block in enumerate(blocks):
            if block not in before.get(number, []):
                (hits if index < cached[number] // 16 else fresh).add(block)
    page.evaluate("step => window.xray.go(step - 1)", step)
    at_step(page, step)
    assert set(page.evaluate("[...window.xray.shown.hits]")) == hits != set()
    assert set(page.evaluate("[...window.xray.shown.fresh]")) == fresh != set()


def test_a_second_tier_and_adapter_slots_are_shown_if_there_are_any(server: Served, open_page, run: list[str]):
    page = open_page(server.url)
    server.put(run[:1])
    at_step(page, 1)
    assert not page.get_by_text("Adapter slots").is_visible()
    assert "in host memory" not in page.locator(".xr-numbers").inner_text()
    hostile = "<b>sql</b>"
    more = state_of(run, 2) | {"tier": [40, 12, 3, 2], "slots": [["french", True], [hostile, False], ["", False]]}
    more["running"][0]["adapter"] = hostile
    server.put([json.dumps(more)])
    at_step(page, 2)
    assert "12 of 40, 3 loading, 2 storing" in page.locator(".xr-numbers").inner_text()
    slots = page.get_by_label("Adapter slots").locator("button")
    assert slots.all_inner_texts() == ["0: french, not in use, pinned", f"1: {hostile}, 1 running", "2: free"]
    slots.nth(1).click()
    page.locator(".xr-facts").get_by_text(hostile, exact=True).wait_for()


def test_a_server_without_requests_shows_a_recorded_run_until_its_next_step(server, open_page, run: list[str]):
    page = open_page(server.url)
    idle = state_of(run, 1) | {"step": 0, "batch": [], "running": [], "waiting": [], "num_waiting": 0, "cached": []}
    server.put([json.dumps(idle)])
    page.get_by_text("■ recording").wait_for()
    assert "has nothing to do" in page.locator(".xr-alarm").inner_text()
    page.wait_for_function("() => window.xray.frame.step > 2")
    server.put(run[:3])
    at_step(page, 3)
    page.get_by_text("● live").wait_for()
    assert page.locator(".xr-alarm").inner_text() == ""


def test_of_a_large_pool_the_blocks_in_use_are_drawn_large(server: Served, open_page, run: list[str]) -> None:
    page = open_page(server.url, width=390)
    server.put([json.dumps(state_of(run, 3) | {"num_blocks": 32_769})])
    at_step(page, 3)
    reach = max(block for request in state_of(run, 3)["running"] for block in request["blocks"])
    beyond = page.get_by_label("KV-cache blocks").locator("p").inner_text()
    assert beyond.endswith("of 32,769: the others have not been used yet.")
    shown = int(beyond.split()[3].replace(",", "")) + 1
    canvas = box_of(page.get_by_label("KV-cache blocks").locator("canvas"))
    assert reach < shown
    assert canvas["width"] * canvas["height"] / shown > 12**2
    assert page.evaluate("document.documentElement.scrollWidth") <= 390


def test_keys_pause_step_and_go_on(page: Page) -> None:
    page.locator("body").press("Space")
    page.get_by_text("❚❚ paused").wait_for()
    page.keyboard.press("ArrowLeft")
    at_step(page, STEPS - 1)
    page.get_by_role("button", name="Step back").click()
    at_step(page, STEPS - 2)
    page.keyboard.press("ArrowRight")
    at_step(page, STEPS - 1)
    page.keyboard.press("Home")
    at_step(page, 1)
    page.get_by_role("button", name="● Live").click()
    at_step(page, STEPS)
    slider = page.get_by_label("Step", exact=True)
    slider.focus()
    page.keyboard.press("ArrowLeft")
    at_step(page, STEPS - 1)
    assert (slider.get_attribute("aria-valuetext") or "").startswith(f"step {STEPS - 1} ·")


def test_a_request_is_chosen_by_block_batch_and_queue(page: Page, run: list[str]) -> None:
    state = state_of(run, STEPS)
    request = state["running"][0]
    chip = page.locator(f"[data-number='{request['number']}']")
    chip.click()
    facts = page.locator(".xr-facts")
    facts.get_by_text(request["id"], exact=True).wait_for()
    places = page.locator(".xr-table li").all_inner_texts()
    assert [int(place.split("→")[1]) for place in places] == request["blocks"]
    assert chip.get_attribute("aria-pressed") == "true"
    page.keyboard.press("Escape")
    facts.wait_for(state="hidden")

    block = request["blocks"][-1]
    pool = page.get_by_label("KV-cache blocks").locator("canvas")
    size = page.evaluate(
        "block => { const at = window.xray.areas.get(window.xray.pool); let x = 0, y = 0;"
        " while (!at(x, y)?.words.startsWith(`Block ${block}:`)) { x += 3; if (x > 2000) { x = 0; y += 3; } }"
        " return [x + 2, y + 2]; }",
        block,
    )
    pool.hover(position={"x": size[0], "y": size[1]})
    assert page.locator(".xr-tip").inner_text().startswith(f"Block {block}:")
    pool.click(position={"x": size[0], "y": size[1]})
    holders = [request["number"] for request in state["running"] if block in request["blocks"]]
    facts.get_by_text(f"#{holders[0]}", exact=True).wait_for()

    page.get_by_label("Batch of this step").locator("canvas").click(position={"x": 5, "y": 20})
    first = state["batch"][0][0]
    if first == holders[0]:  # chosen already: chosen again, it is let go
        facts.wait_for(state="hidden")
    else:
        facts.get_by_text(f"#{first}", exact=True).wait_for()


def test_steps_are_saved_and_loaded(page: Page, run: list[str], tmp_path: Path) -> None:
    with page.expect_download() as download:
        page.get_by_role("button", name="Save").click()
    saved = tmp_path / "saved.jsonl"
    download.value.save_as(saved)
    assert [json.loads(line) for line in saved.read_text().splitlines()] == [*map(json.loads, (HEADER, *run))]

    page.get_by_label("A recording").set_input_files(saved)
    page.get_by_text("■ recording").wait_for()
    at_step(page, 1)
    page.get_by_role("button", name="Play").click()
    page.wait_for_function("() => window.xray.frame.step > 4")
    page.get_by_role("button", name="Back to live").click()
    at_step(page, STEPS)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("hello\n", "is not valid JSON"),
        ('{"xray":1}\n{}\n', "its first line is not a header of format 2"),
        (HEADER + "\n", "there is no step in it"),
    ],
)
def test_a_file_that_is_no_recording_changes_nothing(page: Page, content: str, words: str) -> None:
    file = {"name": "other.jsonl", "mimeType": "text/plain", "buffer": content.encode()}
    page.get_by_label("A recording").set_input_files(file)
    page.get_by_text("other.jsonl is not a recording that can be shown").wait_for()
    assert words in page.locator("p.xr-alarm").inner_text()
    assert page.evaluate("window.xray.frame.step") == STEPS


def test_a_server_with_keys_asks_for_one(open_page: Callable[..., Page], run: list[str]) -> None:
    with served(keys=["secret"]) as server:
        page = open_page(server.url)
        field = page.get_by_label("API key")
        for key in ("wrong", "secret"):
            field.fill(key)
            page.get_by_role("button", name="Open").click()
            if key == "wrong":
                page.get_by_text("This key is not known here.").wait_for()
        server.put(run[:4])
        at_step(page, 4)
        assert not field.is_visible()


def test_of_several_cores_the_page_shows_the_one_in_its_address(open_page: Callable[..., Page], run: list[str]) -> None:
    with served(cores=2) as server:
        page = open_page(server.url)
        server.put(run[:5])
        server.put(run[:9], core=1)
        at_step(page, 5)
        with page.expect_navigation():
            page.get_by_role("link", name="core 1").click()
        page.get_by_text("● live").wait_for()
        server.put(run[9:11], core=1)
        at_step(page, 11)


def test_the_page_keeps_a_thousand_steps_and_draws_each_in_time(server: Served, open_page, run: list[str]):
    page = open_page(server.url)
    for last in range(STEPS, 8 * STEPS + 1, STEPS):  # a feed keeps 200 lines for a slow page
        server.put([numbered(run, step) for step in range(last - STEPS + 1, last + 1)])
        at_step(page, last)
    assert page.evaluate("window.xray.live.frames.length") == 1000
    # What the machine does besides is no part of this: a frame's own time is what ten a second
    # leave room for.
    page.evaluate(
        """() => { const view = window.xray, spent = [], draw = view.draw.bind(view);
             view.draw = () => { const start = performance.now(); draw(); spent.push(performance.now() - start); };
             window.spent = spent; }"""
    )
    for step in range(1201, 1211):
        server.put([numbered(run, step)])
        at_step(page, step)
    spent = page.evaluate("window.spent")
    assert sorted(spent)[len(spent) // 2] < 100
    page.keyboard.press("Home")
    at_step(page, 211)


def numbered(run: list[str], step: int) -> str:
    """Return a snapshot of the run, as if it were that of this step."""
    index = (step - 1) % STEPS
    return run[index].replace(f'{{"step":{index + 1},', f'{{"step":{step},')


@pytest.mark.parametrize(("scheme", "width"), [("light", 600), ("dark", 1366)])
def test_nothing_serious_is_in_anyones_way(server: Served, open_page, run: list[str], scheme: str, width: int):
    page = open_page(server.url, scheme, width)
    server.put([json.dumps(state_of(run, STEPS) | {"slots": [["french", True], ["", False]]})])
    at_step(page, STEPS)
    page.locator(".xr-chip[data-number]").first.click()
    page.locator(".xr-facts").wait_for()
    assert serious_violations(page) == []
    assert ("xr-dark" in (page.locator(".xr").get_attribute("class") or "")) == (scheme == "dark")
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")


def test_a_notebook_shows_the_same_view_without_a_kernel(browser: Browser, run: list[str]) -> None:
    text = "".join(f"{line}\n" for line in (HEADER, *run[:20]))
    body = f"""<!doctype html><html lang="en"><head><meta charset="utf-8"><title>x</title>
      <style>{style()}</style></head>
      <body><div id="here"></div><script type="module">
      import widget from "./view.js";
      const model = {{ get: () => {json.dumps(text)} }};
      window.end = widget.render({{ model, el: document.getElementById("here") }});
      </script></body></html>"""
    page = emptied_page(browser, 1366, 900)
    page.route("**/view.js", lambda route: route.fulfill(body=script(), content_type="text/javascript"))
    page.route("**/here", lambda route: route.fulfill(body=body, content_type="text/html"))
    with faultless(page):
        page.goto("http://127.0.0.1:1/here")
        page.get_by_text("■ recording").wait_for()
        page.get_by_role("button", name="Step forward").click()
        page.get_by_text("step 2 ·").wait_for()
        page.evaluate("window.end()")
