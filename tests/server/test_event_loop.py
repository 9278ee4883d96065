"""Long texts are tokenized like short ones, but beside the event loop, and not at all if they cannot fit."""

import asyncio
from types import SimpleNamespace
from unittest.mock import Mock

import pytest

from minivllm.config import EMBEDDED_MODEL
from minivllm.core.limits import RequestLimits
from minivllm.engine.input_processor import InputProcessor
from minivllm.entrypoints.openai.protocol import DetokenizeRequest, TokenizeCompletionRequest
from minivllm.entrypoints.openai.serving_engine import OpenAIServing
from minivllm.entrypoints.openai.settings import FrontendArgs
from minivllm.entrypoints.openai.stream import as_event
from minivllm.errors import MinivllmError
from minivllm.models.tokenizer import load_tokenizer
from minivllm.sampling_params import SamplingParams


@pytest.fixture(scope="module")
def serving() -> OpenAIServing:
    """Make the serving class without an engine: tokenization needs only its settings."""
    tokenizer, limits = load_tokenizer(EMBEDDED_MODEL), RequestLimits(512, 16, 100)
    processor = InputProcessor(SimpleNamespace(vocab_size=4096), tokenizer, limits, (0,), 0)
    own = {"engine_args": SimpleNamespace(model=EMBEDDED_MODEL), "generation_config": SimpleNamespace(sampling={})}
    engine = SimpleNamespace(input_processor=processor, tokenizer=tokenizer, **own)
    return OpenAIServing(engine, FrontendArgs(served_model_name=["tiny"]), None)


@pytest.mark.parametrize(("text", "num_beside"), [("x = 1", 0), ("x = [1, 2]\n" * 20_000, 2)], ids=["short", "long"])
def test_long_texts_are_tokenized_like_short_ones_and_back_beside_the_loop(serving, monkeypatch, text, num_beside):
    monkeypatch.setattr(asyncio, "to_thread", beside := Mock(wraps=asyncio.to_thread))
    tokens = asyncio.run(serving.create_tokenize(TokenizeCompletionRequest(prompt=text)))["tokens"]
    assert tokens == serving.tokenizer.encode(text).ids
    assert asyncio.run(serving.create_detokenize(DetokenizeRequest(tokens=tokens)))["prompt"] == text
    assert beside.call_count == num_beside


def test_a_text_that_cannot_fit_is_refused_before_it_is_tokenized(serving, monkeypatch):
    most = serving.engine.input_processor.max_prompt_characters
    assert most == 512 * 45
    monkeypatch.setattr(serving, "tokenize", None)
    with pytest.raises(MinivllmError, match="maximum context length is 512 tokens") as error:
        asyncio.run(serving.tokenize_prompt("x" * (most + 1), True))
    assert error.value.parameter == "input_text"
    with pytest.raises(MinivllmError, match="23,041 characters"):
        serving.engine.input_processor.process_inputs("a", "x" * (most + 1), SamplingParams())
    serving.engine.input_processor.check_length("x" * most)


def test_a_number_that_json_does_not_have_is_null():
    event = {"logprob": float("nan"), "top": [float("inf"), 1.5]}
    assert as_event(event) == b'data: {"logprob":null,"top":[null,1.5]}\n\n'
