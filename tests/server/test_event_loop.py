"""Long bodies hold up nobody: the event loop goes on while they are worked on."""

import asyncio
from collections.abc import Coroutine
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest

from minivllm.config import EMBEDDED_MODEL
from minivllm.entrypoints.openai.protocol import DetokenizeRequest, TokenizeCompletionRequest
from minivllm.entrypoints.openai.serving_models import OpenAIServingModels
from minivllm.entrypoints.openai.serving_tokenization import OpenAIServingTokenization
from minivllm.entrypoints.openai.settings import FrontendArgs
from minivllm.models.tokenizer import load_tokenizer

LONG = 40_000


@pytest.fixture(scope="module")
def serving() -> OpenAIServingTokenization:
    """Tokenization needs no engine, only what one knows."""
    engine = SimpleNamespace(
        engine_args=SimpleNamespace(model=EMBEDDED_MODEL),
        input_processor=SimpleNamespace(limits=SimpleNamespace(max_model_len=512), vocab_size=4096),
        generation_config=SimpleNamespace(sampling={}),
        tokenizer=load_tokenizer(EMBEDDED_MODEL),
    )
    models = OpenAIServingModels(["tiny"], "tiny", 512)
    return OpenAIServingTokenization(engine, models, FrontendArgs(), None)


def answer_and_turns(work: Coroutine):
    """What the work returns, and how often somebody else had a turn of the loop meanwhile."""

    async def both():
        working, turns = asyncio.create_task(work), 0
        while not working.done():
            await asyncio.sleep(0.001)
            turns += 1
        return working.result(), turns

    with ThreadPoolExecutor(1) as thread:
        return thread.submit(asyncio.run, both()).result()


def test_a_long_text_is_tokenized_beside_the_loop_and_back(serving):
    text = "x = [1, 2]\n" * LONG
    found, turns = answer_and_turns(serving.create_tokenize(TokenizeCompletionRequest(prompt=text)))
    assert turns > 20
    again, turns = answer_and_turns(serving.create_detokenize(DetokenizeRequest(tokens=found.tokens)))
    assert again.prompt == text
    assert turns > 20


@pytest.mark.parametrize("text", ["x = 1", "x = 1\n" * 2000])
def test_short_and_long_texts_have_the_same_tokens(serving, text):
    found, _ = answer_and_turns(serving.create_tokenize(TokenizeCompletionRequest(prompt=text)))
    assert found.tokens == serving.tokenizer.encode(text).ids
