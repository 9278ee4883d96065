"""The page of one request shows a run of the real engine, and states nothing that the run does not
contain.
"""

import json
import re

import pytest
import record_request
import site_request
from repository import ROOT

from minivllm import LLM, LoRARequest, SamplingParams
from minivllm_lab.engines.step_recording import read_recording

SOURCE = (ROOT / site_request.PAGE).read_text()
ADDRESS = site_request.PAGE.replace(".md", ".html")


@pytest.fixture(scope="module")
def recording() -> list[dict]:
    return read_recording(site_request.RECORDED)


def answer_of(header: dict) -> str:
    """Return the text that the client received."""
    events = [json.loads(event) for event in header["request"]["events"][:-1]]
    return "".join(event["choices"][0]["text"] for event in events)


def test_the_recording_has_all_that_the_page_tells(recording: list[dict]) -> None:
    assert record_request.missing(recording[1:]) == []
    assert recording[0]["request"]["body"] == record_request.BODY, "the tool has changed: record anew"


def test_what_is_missing_from_a_run_is_named(recording: list[dict]) -> None:
    steps = [step | {"preempted": []} for step in recording[1:]]
    assert record_request.missing(steps) == ["two preemptions"]
    assert "three requests in a step" in record_request.missing([step | {"batch": step["batch"][:2]} for step in steps])


def test_the_recorded_answer_is_that_of_a_plain_engine(recording: list[dict]) -> None:
    body = recording[0]["request"]["body"]
    model = str(record_request.MODELS / "tiny-python")
    llm = LLM(model, enable_lora=True, max_model_len=512, num_gpu_blocks_override=64)
    adapter = LoRARequest(body["model"], 1, str(record_request.MODELS / "adapters" / body["model"]))
    parameters = SamplingParams(max_tokens=body["max_tokens"], temperature=0)
    (output,) = llm.generate([body["prompt"]], parameters, lora_request=adapter, use_tqdm=False)
    assert output.outputs[0].text == answer_of(recording[0])


def test_every_lesson_has_a_stop_and_every_number_is_filled_in() -> None:
    assert {int(number) for number in re.findall(r"^## .* · (\d\d) ", SOURCE, re.MULTILINE)} == set(range(1, 13))
    page = site_request.page(SOURCE, ROOT)
    steps = [int(step) for step in re.findall(r'data-step="(\d+)"', page)]
    assert steps == sorted(steps)
    assert not re.search(r"\{\w+\}", page)


@pytest.mark.browser
@pytest.mark.parametrize("width", [390, 1366])
def test_the_stops_are_walked_to_the_end_of_the_answer(opened, recording: list[dict], width: int) -> None:
    with opened(ADDRESS, width) as page:
        steps = []
        forward = page.get_by_role("button", name="Next stop")
        while True:
            (shown,) = page.locator(".one-request section:has(.stop):visible").all()
            steps.append(int(shown.locator(".stop").get_attribute("data-step") or ""))
            page.get_by_text(f"step {steps[-1]} ·").wait_for()
            if not forward.is_enabled():
                break
            forward.click()
        assert steps == [int(step) for step in re.findall(r'data-step="(\d+)"', site_request.page(SOURCE, ROOT))]
        assert page.locator(".client pre").inner_text().endswith(answer_of(recording[0]))
        assert page.evaluate("document.documentElement.scrollWidth") <= width


@pytest.mark.browser
def test_an_address_names_a_stop_and_the_slider_leaves_it(opened) -> None:
    with opened(f"{ADDRESS}#no-block-is-left-11-preemption") as page:
        assert page.locator(".one-request section:has(.stop):visible h2").inner_text().startswith("No block is left")
        slider = page.get_by_label("Step", exact=True)
        slider.focus()
        page.keyboard.press("Home")
        page.get_by_text("The client has sent this").wait_for()
        page.keyboard.press("End")
        page.get_by_text("The client has 60 of 60 tokens").wait_for()
