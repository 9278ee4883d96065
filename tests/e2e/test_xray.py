"""The page `/xray` in a real browser: live, paused, stepped back, clicked, saved, loaded; light and dark."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from axe_playwright_python.sync_playwright import Axe
from e2e.browser import ColorScheme, Seen, emptied_page
from e2e.xray_run import BusyScheduler, Served, served
from playwright.sync_api import Browser, Page

from minivllm.core.step_events import KeyLine, StepLine
from minivllm.entrypoints.xray.page import script, style
from minivllm.entrypoints.xray.recorder import STEPS_KEPT, is_key
from minivllm_lab.step_recording import ReplayedState

pytestmark = pytest.mark.browser
STEPS = 300


@pytest.fixture(scope="module")
def run() -> list[bytes]:
    """Steps of a busy scheduler with 1,000 blocks."""
    busy = BusyScheduler()
    return [line for _ in range(STEPS) for line in busy.lines()]


@pytest.fixture(scope="module")
def server(run: list[bytes]) -> Iterator[Served]:
    with served() as server:
        server.put(run)
        yield server


@pytest.fixture
def open_page(browser: Browser) -> Iterator[Callable[..., Page]]:
    seen, unwatch = Seen(), []

    def open_at(url: str, scheme: ColorScheme = "light", width: int = 1366) -> Page:
        page = emptied_page(browser, width, 900, scheme)
        unwatch.append(seen.watch(page))
        page.goto(f"{url}/xray")
        return page

    yield open_at
    for end in unwatch:
        end()
    emptied_page(browser, 1366, 900)  # which ends its stream
    assert [one for one in seen.errors if "401" not in one] == []
    assert seen.elsewhere == []


@pytest.fixture
def page(server: Served, open_page: Callable[..., Page]) -> Page:
    page = open_page(server.url)
    at_step(page, STEPS)
    return page


def at_step(page: Page, step: int) -> None:
    """Waits until this step is shown."""
    page.wait_for_function("step => window.xray?.state?.step === step && window.xray.frame?.step === step", arg=step)


def told(run: list[bytes], step: int) -> dict[str, Any]:
    """The state after a step, as Python replays it, in the form of `State.plain`."""
    state: ReplayedState | None = None
    for line in run:
        if is_key(line):
            state = state or ReplayedState.of(msgspec.json.decode(line, type=KeyLine))
        elif state is not None and state.step < step:
            state.apply(msgspec.json.decode(line, type=StepLine))
    assert state is not None
    requests = [
        {
            "number": number, "id": one.request_id, "prompt": one.prompt_tokens, "max": one.max_tokens,
            "tokens": one.num_tokens, "computed": one.num_computed_tokens, "preemptions": one.num_preemptions,
            "running": one.running, "blocks": one.blocks, "adapter": one.adapter,
        }
        for number, one in sorted(state.requests.items())
    ]  # fmt: skip
    plain = {"step": step, "cached": sorted(state.cached), "waiting": list(state.waiting), "requests": requests}
    slots = {"slots": [list(slot) for slot in state.slots]} if state.slots else {}
    return plain | ({"tier": state.tier} if state.tier else {}) | slots


def test_what_is_drawn_is_the_state_at_each_step_forward_and_back(page: Page, run: list[bytes]) -> None:
    for step in (STEPS, 17, 249, 250, 251, 90, 299):
        shown = page.evaluate("step => window.xray.replay.state(step).plain()", step)  # frame 0 is the first key
        assert shown == told(run, step)


def test_a_second_tier_is_shown_where_there_is_one(open_page: Callable[..., Page], run: list[bytes]) -> None:
    steps = [json.loads(line) for line in run[:20]]
    steps[10]["tier"], steps[15]["tier"] = [40, 12, 3, 2], [40, 14, 0, 0]
    with served() as server:
        server.put([json.dumps(line).encode() for line in steps])
        page = open_page(server.url)
        at_step(page, 19)
        numbers = page.locator(".xr-numbers")
        assert "14 of 40" in numbers.inner_text()
        page.evaluate("() => window.xray.go(12)")
        at_step(page, 12)
        assert "12 of 40, 3 loading, 2 storing" in numbers.inner_text()
        page.evaluate("() => window.xray.go(5)")
        at_step(page, 5)
        assert "in host memory" not in numbers.inner_text()


@pytest.fixture(scope="module")
def run_with_adapters(run: list[bytes]) -> list[bytes]:
    """Its first steps, as if requests used adapters in two slots; one name is hostile."""
    steps = [json.loads(line) for line in run[:60]]
    names = ["french", "<b>sql</b>", ""]
    for line in steps:
        for one in line.get("named", []):
            one[4:] = [names[one[0] % 3]]
    steps[0] |= {"max_loras": 2, "slots": [["", False], ["", False]]}
    steps[10]["slots"] = [["french", False], ["", False]]
    steps[20]["slots"] = [["french", True], ["<b>sql</b>", False]]
    steps[40]["slots"] = [["french", True], ["unused", False]]
    return [json.dumps(line).encode() for line in steps]


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_slots_of_adapters_are_shown_where_there_are_any(
    open_page: Callable[..., Page], run_with_adapters: list[bytes], scheme: str
) -> None:
    with served() as server:
        server.put(run_with_adapters)
        page = open_page(server.url, scheme, 600)
        slots = page.locator(".xr-slots button")

        def words_at(step: int) -> list[str]:
            page.evaluate("step => window.xray.go(step)", step)
            at_step(page, step)
            assert page.evaluate("window.xray.state.plain()") == told(run_with_adapters, step)
            return [one.get_attribute("aria-label") or "" for one in slots.all()]

        at_step(page, 59)
        assert words_at(5) == ["Slot 0: free", "Slot 1: free"]
        wanting = next(one for one in told(run_with_adapters, 5)["requests"] if one["adapter"] == "french")
        page.locator(f"[data-number='{wanting['number']}']").click()
        page.locator(".xr-facts").get_by_text("french, in no slot", exact=True).wait_for()
        page.keyboard.press("Escape")
        assert words_at(10)[0].endswith("; copied in this step")
        assert words_at(11)[0].startswith("Slot 0: adapter french, used by ")
        assert "copied" not in words_at(11)[0]
        assert ", pinned" in words_at(20)[0]
        assert words_at(40)[1] == (
            "Slot 1: adapter unused, not in use, so another adapter may take its place; copied in this step, "
            "in place of <b>sql</b>"
        )
        assert slots.nth(1).get_attribute("title") == slots.nth(1).get_attribute("aria-label")
        page.wait_for_function(
            "words => document.querySelector('.xr-spoken').textContent.includes(words)",
            arg="Slot 1 gets the adapter unused in place of <b>sql</b>.",
        )
        state = told(run_with_adapters, 40)
        users = [one["number"] for one in state["requests"] if one["running"] and one["adapter"] == "french"]
        for wanted in (*users, users[0]):
            slots.first.click()
            page.locator(".xr-facts").get_by_text(f"#{wanted}", exact=True).wait_for()
        page.locator(".xr-facts").get_by_text("french, in slot 0", exact=True).wait_for()
        colours = [
            page.locator(f"{place} .xr-adapter i").first.evaluate("one => one.style.background")
            for place in (".xr-slots", f"[data-number='{users[0]}']")
        ]
        assert colours[0] == colours[1] != ""
        found = Axe().run(page).response["violations"]
        assert [one["id"] for one in found if one["impact"] in ("serious", "critical")] == []
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")


def test_without_adapters_there_is_no_row_of_slots(page: Page) -> None:
    assert not page.get_by_text("Adapter slots").is_visible()


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
    at_step(page, 0)
    page.wait_for_function("() => document.querySelector('.xr-spoken').textContent.startsWith('Step 0:')")
    page.get_by_role("button", name="● Live").click()
    at_step(page, STEPS)
    slider = page.get_by_label("Step", exact=True)
    slider.focus()
    page.keyboard.press("ArrowLeft")
    at_step(page, STEPS - 1)
    assert slider.get_attribute("aria-valuetext") == f"step {STEPS - 1}"


def test_a_request_is_chosen_by_block_batch_and_queue(page: Page, run: list[bytes]) -> None:
    state = told(run, STEPS)
    request = next(one for one in state["requests"] if one["running"])
    chip = page.locator(f"[data-number='{request['number']}']")
    chip.click()
    assert page.locator(".xr-facts").inner_text().split("\n")[:4] == [
        "request", f"#{request['number']}", "id", request["id"]
    ]  # fmt: skip
    places = page.locator(".xr-table li").all_inner_texts()
    assert [int(one.split("→")[1].split("×")[0]) for one in places] == request["blocks"]
    assert chip.get_attribute("aria-pressed") == "true"
    page.keyboard.press("Escape")
    page.locator(".xr-facts").wait_for(state="hidden")

    pool = page.get_by_role("application")
    block = state["requests"][-1]["blocks"][-1] if state["requests"][-1]["blocks"] else request["blocks"][-1]
    holder = next(one["number"] for one in state["requests"] if block in one["blocks"])
    columns = page.evaluate("window.xray.columns")
    size = page.evaluate("window.xray.pool.clientWidth / window.xray.columns | 0")
    place = {"x": block % columns * size + size / 2, "y": block // columns * size + size / 2}
    pool.hover(position=place)
    assert page.locator(".xr-tip").inner_text().startswith(f"Block {block}:")
    pool.click(position=place)
    page.locator(".xr-facts").get_by_text(f"#{holder}", exact=True).wait_for()

    page.locator(".xr-card canvas.xr-pick").first.click(position={"x": 5, "y": 20})
    first = page.evaluate("window.xray.frame.batch[0].number")
    page.locator(".xr-facts").get_by_text(f"#{first}", exact=True).wait_for()


def test_the_pool_is_walked_by_keys_and_says_each_block(page: Page) -> None:
    page.get_by_role("application").focus()
    for key in ("ArrowRight", "ArrowDown", "ArrowUp"):
        page.keyboard.press(key)
    assert page.locator(".xr-spoken").inner_text().startswith("Block 1:")
    page.keyboard.press("Enter")
    assert page.evaluate("window.xray.selected") is not None
    at_step(page, STEPS)


def test_steps_are_saved_and_loaded(page: Page, run: list[bytes], tmp_path: Path) -> None:
    with page.expect_download() as download:
        page.get_by_role("button", name="Save").click()
    saved = tmp_path / "saved.jsonl"
    download.value.save_as(saved)
    assert saved.read_bytes().splitlines()[0] == b'{"xray":1,"model":"tiny-python"}'
    assert [json.loads(line) for line in saved.read_bytes().splitlines()[1:]] == [json.loads(line) for line in run]

    page.get_by_label("A recording").set_input_files(saved)
    page.get_by_text("■ recording").wait_for()
    at_step(page, 0)
    page.get_by_label("Steps a second").select_option("30")
    page.get_by_role("button", name="Play").click()
    page.wait_for_function("() => window.xray.frame.step > 4")
    page.get_by_role("button", name="Back to live").click()
    at_step(page, STEPS)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("hello\n", "line 1: it is no JSON"),
        ('{"xray":1}\n{"step":1,"t":0,"batch":[1]}\n', "line 2: the first step comes before any state"),
        ('{"xray":1}\n{"step":1,"t":0,"batch":"<b>"}\n', "line 2: a field has another form than it should"),
        ('{"xray":1}\n{"key":0,"t":0,"num_blocks":1e12}\n', "line 2: no sizes of a pool"),
        ('{"xray":1}\n{"step":1,"t":0,"slots":[["a"]]}\n', "line 2: a field has another form than it should"),
        ('{"xray":1}\nnull\n', "line 2: no line of a recording"),
        ('{"xray":1}\n', "there is no step in it"),
    ],
)
def test_a_file_that_is_no_recording_changes_nothing(page: Page, content: str, words: str) -> None:
    page.get_by_label("A recording").set_input_files(
        {"name": "evil.jsonl", "mimeType": "text/plain", "buffer": content.encode()}
    )
    page.get_by_text(f"evil.jsonl is no recording that can be shown: {words}.").wait_for()
    assert page.evaluate("window.xray.frame.step") == STEPS


def test_a_server_with_keys_asks_for_one(open_page: Callable[..., Page], run: list[bytes]) -> None:
    with served(keys=["secret"]) as server:
        server.put(run[:5])
        page = open_page(server.url)
        field = page.get_by_label("API key")
        for key in ("wrong", "secret"):
            field.fill(key)
            page.get_by_role("button", name="Open").click()
            if key == "wrong":
                page.get_by_text("This key is not known here.").wait_for()
        at_step(page, 4)
        assert not field.is_visible()


def test_of_several_cores_the_reader_chooses_one(
    open_page: Callable[..., Page], run: list[bytes], tmp_path: Path
) -> None:
    with served(cores=2) as server:
        server.put(run[:5])
        server.put(run[:9], core=1)
        page = open_page(server.url)
        at_step(page, 4)
        page.get_by_text("tiny-python · core 0 of 2").wait_for()
        page.get_by_label("Core", exact=True).select_option("core 1")
        at_step(page, 8)
        page.get_by_text("tiny-python · core 1 of 2").wait_for()
        server.put(run[5:7])
        server.put(run[9:11], core=1)
        at_step(page, 10)
        with page.expect_download() as download:
            page.get_by_role("button", name="Save").click()
        download.value.save_as(tmp_path / "saved.jsonl")
        page.get_by_label("A recording").set_input_files(tmp_path / "saved.jsonl")
        page.get_by_text("■ recording").wait_for()
        page.get_by_text("tiny-python · core 1 of 2").wait_for()
        page.get_by_label("Core", exact=True).select_option("core 0")
        at_step(page, 6)
        page.get_by_text("● live").wait_for()


def test_a_thousand_blocks_are_drawn_ten_times_a_second(open_page: Callable[..., Page]) -> None:
    busy = BusyScheduler()
    warm = [line for _ in range(200) for line in busy.lines()]
    with served() as server:
        server.put(warm)
        page = open_page(server.url)
        at_step(page, 200)
        # What the machine does besides is no part of this: a frame's own time is what ten a second leave room for.
        spent = page.evaluate(
            """() => { const view = window.xray, spent = [], draw = view.draw.bind(view);
                 view.draw = () => { const start = performance.now(); draw(); spent.push(performance.now() - start); };
                 return window.spent = spent; }"""
        )
        for _ in range(20):
            server.put(busy.lines())
            time.sleep(0.1)
        at_step(page, 220)
        spent = page.evaluate("window.spent")
        assert len(spent) >= 15, "each step that comes at this rate is drawn"
        assert sorted(spent)[len(spent) // 2] < 100


def test_the_page_keeps_the_last_steps_and_forgets_the_others(open_page: Callable[..., Page]) -> None:
    busy = BusyScheduler(num_gpu_blocks=200)
    with served() as server:
        page = open_page(server.url)
        server.put([line for _ in range(2 * STEPS_KEPT + 300) for line in busy.lines()])
        at_step(page, 2 * STEPS_KEPT + 300)
        assert STEPS_KEPT <= page.evaluate("window.xray.replay.frames.length") < STEPS_KEPT + 260
        page.keyboard.press("Home")
        page.wait_for_function("() => window.xray.position === 0")
        assert page.evaluate("Boolean(window.xray.frame.key)")


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [600, 1366])
def test_nothing_serious_stands_in_anyones_way(
    server: Served, open_page: Callable[..., Page], scheme: str, width: int
) -> None:
    page = open_page(server.url, scheme, width)
    at_step(page, STEPS)
    page.locator(".xr-chip").first.click()
    page.locator(".xr-facts").wait_for()
    found = Axe().run(page).response["violations"]
    assert [one["id"] for one in found if one["impact"] in ("serious", "critical")] == []
    assert ("xr-dark" in (page.locator(".xr").get_attribute("class") or "")) == (scheme == "dark")
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")


def test_a_notebook_shows_the_same_view_without_a_kernel(browser: Browser, run: list[bytes]) -> None:
    text = '{"xray":1,"model":"a model"}\n' + "".join(line.decode() + "\n" for line in run[:20])
    body = f"""<!doctype html><html lang="en"><head><meta charset="utf-8"><title>x</title>
      <style>{style()}</style></head>
      <body><p class="still">a picture</p><div id="here"></div><script type="module">
      import widget from "./view.js";
      const model = {{ get: () => ({{ text: {json.dumps(text)}, still: "still" }}) }};
      window.end = widget.render({{ model, el: document.getElementById("here") }});
      </script></body></html>"""
    page, seen = emptied_page(browser, 1366, 900), Seen()
    unwatch = seen.watch(page)
    page.route("**/view.js", lambda route: route.fulfill(body=script(), content_type="text/javascript"))
    page.route("**/here", lambda route: route.fulfill(body=body, content_type="text/html"))
    page.goto("http://127.0.0.1:1/here")
    page.get_by_text("■ recording").wait_for()
    assert not page.get_by_text("a picture").is_visible()
    page.get_by_role("button", name="Step forward").click()
    page.get_by_text("step 1 ·").wait_for()
    page.evaluate("window.end()")
    unwatch()
    assert seen.errors == []
