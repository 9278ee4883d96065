"""The page's engine gives the tokens of `minivllm`, shows its steps, and refuses what does not fit."""

from pathlib import Path

import pytest
from e2e.browser import Visit
from playwright.sync_api import Page

from minivllm import LLM, SamplingParams

pytestmark = pytest.mark.browser
MAX_TOKENS = 24
PROMPTS = [
    "def add(a, b):\n",
    "class Stack:\n    def push(self, item):\n",
    "import os\n\n\ndef walk(path):\n    for",
    '    """Return the sum of two numbers.\n',
    "for i in range(10):\n    ",
    "x = [1, 2, 3]\nprint(",
    "def fib(n):\n    if n < 2:\n        return n\n    return",
    "try:\n    value = int(text)\nexcept",
    "with open(path) as file:\n    ",
    "# 中文 comment é\nname = 'ünïcode'\n",
    "@property\ndef name(self):\n    return",
    "if __name__ == '__main__':\n",
    "return {key: value for key, value in",
    'raise ValueError(f"{name!r} is not',
    "while True:\n\n\n    pass\n  \n",
    "a = 1234567890 + 0x1F\tb\nassert it's",
]


@pytest.fixture(scope="module")
def page(visit: Visit) -> Page:
    """Open the page once, and wait until its engine is ready."""
    visit.page.goto(f"{visit.address}/site/own_request.html")
    visit.page.get_by_text("Ready.").wait_for()
    return visit.page


def send(page: Page, prompt: str, max_tokens: int = MAX_TOKENS) -> None:
    page.get_by_label("Your prompt").fill(prompt)
    page.get_by_label("Maximum number of tokens").fill(str(max_tokens))
    page.get_by_role("button", name="Send").click()


def test_answers_are_those_of_minivllm(page: Page) -> None:
    for prompt in PROMPTS:
        send(page, prompt)
    answers = page.locator(".answers .client")
    answers.get_by_text(", done").nth(len(PROMPTS) - 1).wait_for(timeout=120_000)
    texts = answers.locator("pre").all_text_contents()[::-1]
    told = [text.removeprefix(prompt) for text, prompt in zip(texts, PROMPTS, strict=True)]
    llm = LLM(str(Path(__file__).parents[2] / "vllm" / "models" / "tiny-python"), max_model_len=512)
    outputs = llm.generate(PROMPTS, SamplingParams(max_tokens=MAX_TOKENS, temperature=0), use_tqdm=False)
    assert told == [output.outputs[0].text for output in outputs]


def test_the_steps_of_the_scheduler_are_shown(page: Page) -> None:
    text = "def shared_prefix(of, two, requests):\n    return of + two + requests\n" * 2
    answers = page.locator(".answers .client")
    for _ in range(2):
        done = answers.get_by_text(", done").count()
        send(page, text, 2)
        answers.get_by_text(", done").nth(done).wait_for()
    page.get_by_role("button", name="Step back").click()
    # The second request finds the first one's blocks; the picture follows within a frame.
    page.get_by_label("Batch of this step").get_by_label("more were cached").wait_for()


def test_what_does_not_fit_is_refused_and_the_engine_goes_on(page: Page) -> None:
    send(page, "")
    page.locator(".says").filter(has_text="is empty").wait_for()
    send(page, "x = 1\n" * 300)
    page.locator(".says").filter(has_text="640").wait_for()
    before = page.locator(".answers .client").count()
    send(page, "y = ", 400)
    page.wait_for_function("before => document.querySelectorAll('.answers .client').length > before", arg=before)
    page.get_by_role("button", name="Stop all").click()
    send(page, "z = ", 2)
    page.locator(".answers .client").first.get_by_text(", done").wait_for()
