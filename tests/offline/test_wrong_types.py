"""Values of wrong types are refused in one line, wherever a user can pass one: no raw Python
traceback.
"""

from dataclasses import fields

import numpy as np
import pytest
import torch

from minivllm import LLM, MinivllmError, SamplingParams, StructuredOutputsParams
from minivllm.config import EMBEDDED_MODEL
from minivllm.errors import UnsupportedModelError
from minivllm_simulate.workloads import poisson_arrivals

ONE = SamplingParams(max_tokens=1)
MESSAGES = [{"role": "user", "content": "x"}]
VALUES = [
    *(None, 3, -1, float("nan"), True, b"x", "x", [], {}, {1}, object(), int),
    *((1, 2), ["x"], [None], [[None]], [[1.5]], {"prompt": None}, {"text": 1}),
    *(np.array([1, 2]), np.int64(3), [np.int64(1)], [np.array([1, 2])], np.zeros((300, 2))),
    *(torch.tensor([1, 2]), torch.tensor(3), torch.zeros(2, 3)),
]
PROMPT_KEYS = ("prompt_token_ids", "cache_salt", "other")


@pytest.fixture(scope="module")
def llm():
    return LLM(EMBEDDED_MODEL, max_model_len=64, num_gpu_blocks_override=10)


def calls(llm, value):
    """Yield every call that takes a user's value, with this value in one place."""
    quiet = {"use_tqdm": False}
    yield from (lambda p=p: llm.generate(p, ONE, **quiet) for p in (value, [value], {"prompt": value}))
    yield from (lambda k=k: llm.generate({"prompt": "x", k: value}, ONE, **quiet) for k in PROMPT_KEYS)
    yield lambda: llm.generate("x", value, **quiet)
    for name in ("priority", "lora_request"):
        yield lambda name=name: llm.generate("x", ONE, **quiet, **{name: value})
    yield lambda: llm.chat(value, ONE, **quiet)
    yield from (lambda k=k: llm.chat([{**MESSAGES[0], k: value}], ONE, **quiet) for k in MESSAGES[0])
    names = ("tools", "chat_template", "chat_template_kwargs", "chat_template_content_format")
    yield from (lambda name=name: llm.chat(MESSAGES, ONE, **quiet, **{name: value}) for name in names)
    for field in fields(SamplingParams):
        yield lambda name=field.name: SamplingParams(**{name: value})
    for field in fields(StructuredOutputsParams):
        yield lambda name=field.name: StructuredOutputsParams(**{name: value})
    yield lambda: poisson_arrivals(value, 1)


@pytest.mark.parametrize("value", VALUES, ids=lambda value: f"{type(value).__name__} {str(value)[:20]}")
def test_a_value_is_taken_or_refused_in_one_line(llm, value):
    for call in calls(llm, value):
        refusal = None
        try:
            call()
        except MinivllmError as error:
            refusal = str(error)
        assert "\n" not in (refusal or "")


def test_a_message_is_one_line_and_not_too_long():
    assert str(MinivllmError("a  b")) == "a  b"
    assert str(MinivllmError("x is [[0, 0],\n       [0, 0]]; it must be a text\n")) == (
        "x is [[0, 0], [0, 0]]; it must be a text"
    )
    message = str(UnsupportedModelError("x is " + "9" * 10_000 + "; it must be a text"))
    assert len(message) < 1100
    assert message.startswith("x is 999")
    assert message.endswith("999; it must be a text")
