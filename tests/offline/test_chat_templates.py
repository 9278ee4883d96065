"""Chat templates get messages in the form that vLLM passes: texts or parts, null, tool calls of any
kind.
"""

import asyncio
import json
from types import SimpleNamespace

import pytest
from refusals import assert_refused

from minivllm.entrypoints.openai.chat_template import read_template, render
from minivllm.entrypoints.openai.protocol import ChatCompletionRequest
from minivllm.entrypoints.openai.serving_engine import OpenAIServing
from minivllm.entrypoints.openai.settings import FrontendArgs

ADDS = "{% for m in messages %}{{ '<' + m.role + '>' + m.content }}{% endfor %}"
LOOPS = (
    "{% for m in messages %}<{{ m.role }}>"
    "{% if m.content is string %}{{ m.content }}!{% else %}{% for p in m['content'] | list %}[{{ p.text }}]{% endfor %}"
    "{% endif %}{% endfor %}"
)
MACRO = (
    "{% macro say(what) %}{% for p in what %}[{{ p.text }}]{% endfor %}{% endmacro %}"
    "{% for m in messages %}<{{ m.role }}>{{ say(m.content) }}{% endfor %}"
)
CALLS = (
    "{% for m in messages %}<{{ m.role }}>{% if 'tool_calls' in m %}{% for c in m.tool_calls %}{{ c.function.name }}("
    "{% for k, v in c.function.arguments.items() %}{{ k }}={{ v }}{% endfor %}){% endfor %}"
    "{% else %}{{ m.content }}{% endif %}{% endfor %}"
)


def call(**function):
    return {"id": "1", "type": "function", "function": {"name": "get", **function}}


def prompt(template, *messages, **options):
    return render(template, messages, {}, goes_on=False, **options)


CONTENTS = [
    (ADDS, "hi", "<assistant>hi"),
    (ADDS, None, "<assistant>"),
    (ADDS, [], "<assistant>"),
    (ADDS, ["a", {"type": "text", "text": "b"}, {"text": "c"}], "<assistant>a\nb\nc"),
    (ADDS, ["a", "", {"type": "text", "text": None}, "b"], "<assistant>a\nb"),
    (ADDS, [{"type": "refusal", "refusal": "no"}, {"type": "thinking", "thinking": "hm"}], "<assistant>no\nhm"),
    (LOOPS, "hi", "<assistant>[hi]"),
    (LOOPS, None, "<assistant>"),
    (LOOPS, ["a", "", {"type": "output_text", "text": "b"}], "<assistant>[a][][b]"),
    (MACRO, ["a", "b"], "<assistant>[a][b]"),
]  # fmt: skip


@pytest.mark.parametrize(("template", "content", "expected"), CONTENTS)
def test_a_content_is_a_text_or_for_templates_that_loop_over_parts_a_list(template, content, expected):
    assert prompt(template, {"role": "assistant", "content": content}) == expected


def test_a_tools_answer_is_always_a_text_and_a_missing_content_is_empty():
    assert prompt(LOOPS, {"role": "tool", "content": ["a", "b"]}) == "<tool>a\nb!"
    assert prompt(ADDS, {"role": "assistant"}) == "<assistant>"


def test_the_format_can_be_named():
    message = {"role": "user", "content": ["a", "b"]}
    assert prompt(LOOPS, message, content_format="string") == "<user>a\nb!"
    loops = LOOPS.replace("m['content'] | list", "m.get('content')")
    assert prompt(loops, message, content_format="openai") == "<user>[a][b]"
    assert_refused("one of auto, string, openai", prompt, LOOPS, message, content_format="parts")


@pytest.mark.parametrize("calls", [None, []])
def test_empty_tool_calls_are_none(calls):
    assert prompt(CALLS, {"role": "assistant", "content": "hi", "tool_calls": calls}) == "<assistant>hi"


ARGUMENTS = [
    ('{"a": 1}', "a=1", False), ({"a": 1}, "a=1", False), ("", "", False), ('{"a": 1', "", True),
    ("[" * 100_000, "", True), ("[1]", "", True), ([1], "", True),
]  # fmt: skip


@pytest.mark.parametrize(("arguments", "expected", "warned"), ARGUMENTS)
def test_arguments_are_an_object_or_become_an_empty_one(arguments, expected, warned, caplog):
    message = {"role": "assistant", "content": None, "tool_calls": [call(arguments=arguments)]}
    before = json.dumps(message)
    with caplog.at_level("WARNING"):
        assert prompt(CALLS, message) == f"<assistant>get({expected})"
    assert ("in their place" in caplog.text) == warned
    assert json.dumps(message) == before, "the message is left as it is"


NO_MESSAGES = [
    ("hi", "a message is str"),
    ({"role": "user", "content": 3}, "content is int"),
    ({"role": "user", "content": {"type": "text", "text": "a"}}, "content is dict"),
    ({"role": "user", "content": [{"type": "image_url"}]}, "'image_url'; only text parts are served"),
    ({"role": "user", "content": [{"type": ["text"]}]}, "only text parts are served"),
    ({"role": "user", "content": [{"type": "text", "text": 3}]}, "is int"),
    ({"role": "assistant", "tool_calls": 3}, "tool_calls are int"),
    ({"role": "assistant", "tool_calls": ["get"]}, "a message's tool call must be"),
    ({"role": "assistant", "tool_calls": [{"type": "custom", "function": {}}]}, "a message's tool call must be"),
]


@pytest.mark.parametrize(("message", "refusal"), NO_MESSAGES)
def test_what_is_no_message_is_refused(message, refusal):
    assert_refused(refusal, prompt, ADDS, message)


def test_an_open_message_ends_with_its_last_part():
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": ["b", "c "]}]
    assert render(LOOPS, messages, {}, goes_on=True) == "<user>[a]<assistant>[b][c "


def test_what_marks_an_answer_for_training_leaves_no_trace_in_a_prompt():
    from transformers.utils.chat_template_utils import _compile_jinja_template

    template = (
        "{% for m in messages %}\n{%- if m.role == 'assistant' %}\n  {% generation %}\n<{{ m.content }}>\n"
        "{%- set last = m.content %}{{ last }}\n  {% endgeneration %}\n{% endif %}{% endfor %}end"
    )
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    expected = _compile_jinja_template(template).render(messages=messages)
    assert render(template, messages, {}, goes_on=False) == expected
    assert "<b>b" in expected


@pytest.mark.parametrize(
    ("form", "seen"), [("auto", "a"), ("string", "a"), ("openai", "[{'type': 'text', 'text': 'a'}]")]
)
def test_a_server_may_say_which_content_a_template_gets(form, seen):
    settings = FrontendArgs(chat_template_content_format=form)
    serving = SimpleNamespace(settings=settings, template="{{ messages[0].content }}", _special_tokens={})
    request = ChatCompletionRequest.model_validate({"messages": [{"role": "user", "content": "a"}]})
    assert asyncio.run(OpenAIServing.rendered(serving, request)) == seen


NAMED = [{"name": "rag", "template": "rag {{ messages[0].content }}"}, {"name": "tool_use", "template": "tools"}]


def model_with(folder, chat_template):
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": chat_template}))
    return folder


def test_of_several_templates_the_default_one_is_used(tmp_path):
    assert read_template(None, model_with(tmp_path, NAMED)) is None
    assert read_template(None, model_with(tmp_path, [*NAMED, {"name": "default", "template": "d"}])) == "d"
    assert read_template(None, model_with(tmp_path, "only")) == "only"
    assert read_template("{{ 1 }}", model_with(tmp_path, NAMED)) == "{{ 1 }}"
    assert_refused("rag cannot be read", read_template, "rag", tmp_path)


MALFORMED = {
    "not UTF-8": ("chat_template.jinja", b"\xff\xfe"),
    "no Jinja": ("chat_template.jinja", b"{% for %}"),
    "no template": ("tokenizer_config.json", b'{"chat_template": 3}'),
}


@pytest.mark.parametrize("name", MALFORMED)
def test_a_file_of_the_users_stands_in_for_a_models_malformed_template(tmp_path, name):
    filename, contents = MALFORMED[name]
    (folder := tmp_path / "model").mkdir()
    (folder / filename).write_bytes(contents)
    (mine := tmp_path / "mine.jinja").write_text("{{ 1 }}")
    assert_refused(r"chat.template", read_template, None, folder)
    assert read_template(str(mine), folder) == "{{ 1 }}"
    assert read_template("{{ 2 }}", folder) == "{{ 2 }}"


@pytest.mark.parametrize("wrong", [3, [{"name": "default", "template": 3}], {"a": "b"}])
def test_templates_in_another_form_are_refused(tmp_path, wrong):
    assert_refused(r"chat_template in .* must be a template", read_template, None, model_with(tmp_path, wrong))


def test_a_developers_messages_are_the_systems_unless_the_template_knows_developers():
    developer = {"role": "developer", "content": "be brief"}
    system = {"role": "system", "content": "be kind"}
    user = {"role": "user", "content": "hi"}
    assert prompt(ADDS, developer, user) == "<system>be brief<user>hi"
    assert prompt(ADDS, system, user, developer) == "<system>be kind\n\nbe brief<user>hi"
    assert prompt(LOOPS, user, {**developer, "content": ["a", "b"]}) == "<system>a\nb!<user>[hi]"
    assert prompt(ADDS, user, system) == "<user>hi<system>be kind", "without a developer all stay where they are"
    assert prompt(ADDS + "{# 'developer' #}", developer, user) == "<developer>be brief<user>hi"
