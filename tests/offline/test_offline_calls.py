"""Test the calls of vLLM's offline examples on one engine: chat, tokenizer, a loop of steps."""

from types import SimpleNamespace

import pytest
from refusals import assert_refused

from minivllm import LLM, EngineArgs, SamplingParams, TokensPrompt, cleanup_dist_env_and_memory
from minivllm.config import EMBEDDED_MODEL
from minivllm.entrypoints.llm import _answers

SPECULATION = {"method": "ngram", "num_speculative_tokens": 3}
SETTINGS = {"device": "cpu", "max_model_len": 256, "num_gpu_blocks_override": 65}
GREEDY = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
CONVERSATION = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "def add(a, b):"}]


@pytest.fixture(scope="module")
def llm():
    return LLM(EMBEDDED_MODEL, **SETTINGS, speculative_config=SPECULATION)


@pytest.fixture
def idle(llm):
    yield llm
    assert not llm.llm_engine.has_unfinished_requests()
    assert llm.reset_prefix_cache(), "some request still holds a block"


def tokens(outputs):
    return [output.outputs[0].token_ids for output in outputs]


def test_a_conversation_is_its_prompt_by_the_template_without_special_tokens_added(idle):
    [answer] = idle.chat(CONVERSATION, GREEDY)
    text = "### system\nBe brief.\n### user\ndef add(a, b):\n### assistant\n"
    ids = idle.llm_engine.tokenizer.encode(text, add_special_tokens=False).ids
    assert (answer.prompt, answer.prompt_token_ids) == (text, ids)
    assert tokens([answer]) == tokens(idle.generate([ids], GREEDY))
    both = idle.chat([CONVERSATION, CONVERSATION[1:]], [GREEDY, SamplingParams(max_tokens=2, ignore_eos=True)])
    assert [len(token) for token in tokens(both)] == [6, 2]
    assert tokens(both[:1]) == tokens([answer])


def test_a_template_sees_tools_and_keywords_and_may_leave_the_last_message_open(idle):
    template = "{{ bos_token }}{{ tools[0].name }} {{ mood }} {% for m in messages %}{{ m.content }}!{% endfor %}"
    tools, kwargs = [{"name": "look"}], {"mood": "glad"}
    options = {"chat_template": template, "tools": tools, "chat_template_kwargs": kwargs}
    options["add_generation_prompt"] = False
    [output] = idle.chat([{"role": "user", "content": "a"}], GREEDY, **options)
    assert output.prompt == "<|endoftext|>look glad a!"
    [output] = idle.chat([{"role": "user", "content": "a"}], GREEDY, **options, continue_final_message=True)
    assert output.prompt == "<|endoftext|>look glad a"
    for messages, said in ((5, "messages are int"), ([], "no messages"), ([{}, 5], "a message is int")):
        assert_refused(said, idle.chat, messages, GREEDY)


def test_the_tokenizer_is_transformers_own_and_says_what_the_engines_says(idle):
    tokenizer = idle.get_tokenizer()
    text = "def add(a, b):\n    return 'ä'"
    assert tokenizer is idle.get_tokenizer()
    assert tokenizer.encode(text) == idle.llm_engine.tokenizer.encode(text).ids
    assert tokenizer(text)["input_ids"] == tokenizer.encode(text)
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.eos_token_id == idle.llm_engine.generation_config.eos_token_ids[0]


def test_the_caches_of_running_requests_can_be_reset_and_their_tokens_stay_the_same(idle):
    engine, long = idle.llm_engine, "import os\n" * 20
    wanted = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True, prompt_logprobs=0)
    [plain] = idle.generate(long, wanted)
    assert engine.add_request("a", long, wanted) == "a"
    result, steps = [], 0
    while engine.has_unfinished_requests():
        steps += 1
        if steps == 3:
            assert not engine.reset_prefix_cache()
            assert engine.reset_prefix_cache(reset_running_requests=True)
        result += [output for output in engine.step() if output.finished]
    assert tokens(result) == tokens([plain])
    assert result[0].prompt_logprobs == plain.prompt_logprobs


def test_what_a_request_does_not_read_from_the_cache_is_computed(idle):
    prompt = TokensPrompt(prompt_token_ids=list(range(40)), prompt="named")
    idle.generate(prompt, GREEDY)
    fresh = GREEDY.clone()
    fresh.skip_reading_prefix_cache = True
    outputs = idle.generate([prompt, prompt], [GREEDY, fresh])
    assert [output.num_cached_tokens for output in outputs] == [32, 0]
    assert {output.prompt for output in outputs} == {"named"}
    assert tokens(outputs[:1]) == tokens(outputs[1:])


def test_an_engine_from_its_arguments():
    llm = LLM.from_engine_args(EngineArgs(model=EMBEDDED_MODEL, **SETTINGS))
    assert repr(llm) == f"LLM({str(EMBEDDED_MODEL)!r})"
    del llm
    cleanup_dist_env_and_memory()


def completion(error: str | None) -> SimpleNamespace:
    return SimpleNamespace(error=error)


def test_one_completion_that_failed_loses_none_of_its_siblings():
    outputs = [SimpleNamespace(outputs=[completion(None), completion("NaN")])]
    assert _answers(outputs) is outputs, "one of two is an answer"
    assert_refused("prompt 0: NaN", _answers, [SimpleNamespace(outputs=[completion("NaN"), completion("NaN")])] * 2)
    assert _answers([]) == []
