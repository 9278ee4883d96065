"""Turn messages into a prompt with the model's chat template, in Jinja.

Clients write messages in several ways: the content is a text, a list of parts or null, and the
arguments of a tool call are JSON. A template always gets the same form. It comes from a stranger's
model folder, so it runs in a sandbox: it sees the messages, and nothing else.

In vLLM v0.33.0: `vllm/renderers/hf.py`, `vllm/renderers/chat_utils/chat_template.py`,
`vllm/renderers/chat_utils/chat_message.py` (`parse_chat_messages`). Templates may call the same
functions as in the transformers library (its `chat_template_utils`).
"""

import asyncio
import ctypes
import json
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from functools import lru_cache
from pathlib import Path
from typing import Any, ClassVar

import jinja2
from jinja2.ext import Extension, loopcontrols
from jinja2.nodes import Node
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from minivllm.config.checks import check, encodable, require
from minivllm.config.model_files import optional_file, read_json_object
from minivllm.entrypoints.openai.settings import CONTENT_FORMAT
from minivllm.errors import MinivllmError
from minivllm.logger import init_logger

logger = init_logger(__name__)
FILENAME, TOKENIZER_CONFIG = "chat_template.jinja", "tokenizer_config.json"
SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
PLAIN = (
    "{% for m in messages %}{{ '### ' + m['role'] + '\\n' + (m['content'] or '') + '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '### assistant\\n' }}{% endif %}"
)
"""For the embedded model, which was not trained on conversations."""
NO_TEMPLATE = (
    "the model has no chat template, and there is no default one (transformers has none since v4.44): start the "
    "server with --chat-template, or give LLM.chat a chat_template"
)
PROBE = {"type": "text", "text": "the text of a part", "other": "another field of a part"}
RENDERING_ERRORS = (jinja2.TemplateError, TypeError, ValueError, LookupError, ArithmeticError, RecursionError)
TEXT_KEYS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal", "thinking": "thinking"}
"""The types of parts that are texts, and the key that each has its text under."""


def read_template(flag: str | None, model: str | Path) -> str | None:
    """Return the flag's template, else the model's own; None if the model has none.

    The flag is the template itself, or the name of a file. The model's own is not read then, so
    that a flag can replace one that is malformed.

    Raises:
        MinivllmError: the file does not exist, or the template is not valid.
    """
    template = _template_of(model) if flag is None else flag
    # A template has braces or lines, and no path has.
    if flag is not None and "{" not in flag and "\n" not in flag:
        template = _read(Path(flag))
    if template is not None:
        _compiled(template)
    return template


def special_tokens(model: str | Path) -> dict[str, str]:
    """Return the special tokens that templates may use, such as `bos_token`, from the tokenizer's
    config.
    """
    contents = _tokenizer_config(model)
    tokens = {name: contents[name] for name in SPECIAL_TOKENS if contents.get(name)}
    return {name: token["content"] if isinstance(token, dict) else token for name, token in tokens.items()}


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise MinivllmError(f"the chat template {path} cannot be read: {error}") from None


def _template_of(model: str | Path) -> str | None:
    if (path := optional_file(model, FILENAME)) is not None:
        return _read(path)
    template = _tokenizer_config(model).get("chat_template")
    if isinstance(template, list):
        # Older models have several, such as one for tools.
        named = [entry for entry in template if isinstance(entry, dict) and entry.get("name") == "default"]
        template = named[0].get("template") if named else None
    wrong = f"chat_template in {model}/{TOKENIZER_CONFIG} is {type(template).__name__}; it must be a template"
    require(template is None or isinstance(template, str), wrong)
    return template


def _tokenizer_config(model: str | Path) -> dict[str, Any]:
    path = optional_file(model, TOKENIZER_CONFIG)
    return {} if path is None else read_json_object(path)


def render(
    template: str, messages: Sequence[Any], further: Mapping[str, Any], goes_on: bool, content_format: str = "auto"
) -> str:
    """Render the messages with the template, and return the prompt.

    Args:
        template: the template, in Jinja.
        messages: as clients write them.
        further: further variables for the template.
        goes_on: leave the last message open.
        content_format: "string", "openai", or "auto" for what the template expects.

    Raises:
        MinivllmError: there are no messages, or the template rejects them.
    """
    check("chat_template_content_format", content_format, CONTENT_FORMAT)
    is_list = isinstance(messages, Sequence) and not isinstance(messages, str | bytes)
    require(is_list, f"a conversation is {type(messages).__name__}; it must be a list of messages")
    require(len(messages) > 0, "there are no messages; a conversation needs at least one")
    is_closed = goes_on and further.get("add_generation_prompt")
    require(not is_closed, "continue_final_message needs `add_generation_prompt: false`")
    form = _content_format(template) if content_format == "auto" else content_format
    conversation = [normalize(message, form) for message in messages]
    if "'developer'" not in template and '"developer"' not in template:
        conversation = without_developers(conversation)
    try:
        text = _compiled(template).render(messages=conversation, **further)
    except RENDERING_ERRORS as error:
        raise MinivllmError(f"the chat template rejects the messages: {error}") from None
    if goes_on:
        # The template has added its end of turn behind the last message: cut it off.
        content = conversation[-1]["content"]
        last = (content if isinstance(content, str) else content[-1]["text"] if content else "").lstrip()
        if (start := text.rfind(last.rstrip())) >= 0:
            # A template may strip the spaces at the message's end.
            text = text[: start + len(last if text.startswith(last, start) else last.rstrip())]
    return encodable(text, "the prompt")


async def render_in_thread(seconds: float, *arguments: Any) -> str:
    """Return what `render` returns. While it runs, other tasks get their turns of the event loop.

    Raises:
        MinivllmError: also if it runs for longer than `seconds`.
    """
    lock = threading.Lock()
    running: list[int] = []

    def run() -> str:
        running.append(threading.get_ident())
        try:
            return render(*arguments)
        finally:
            with lock:
                running.clear()

    work = asyncio.get_running_loop().run_in_executor(None, run)
    # More than once: it may wait for a thread, or catch the exception.
    while not (await asyncio.wait({work}, timeout=seconds))[0]:
        with lock:  # so that the exception reaches this function, and not the thread's next one
            for thread in running:
                ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), ctypes.py_object(TimeoutError))
    try:
        return work.result()
    except TimeoutError:
        raise MinivllmError(f"the chat template ran for more than {seconds:g} seconds") from None


# Messages


def normalize(message: Any, content_format: str) -> dict[str, Any]:
    """Return the message with its content in this format ("string": one text; "openai": a list of
    parts), the arguments of tool calls as dictionaries, and no empty lists.

    Raises:
        MinivllmError: the message, a part of its content or a tool call has a form that is not
            served.
    """
    require(isinstance(message, Mapping), f"a message is {type(message).__name__}; it must be a dictionary")
    parts = _parts(message.get("content"))
    normalized = {**message, "content": parts}
    if content_format == "string":
        normalized["content"] = "\n".join(part["text"] for part in parts if part["text"])
    elif message.get("role") == "tool":  # most templates that loop over parts expect a text here
        normalized["content"] = _text_of(parts)
    calls = normalized.pop("tool_calls", None)
    if calls and message.get("role") == "assistant":
        require(isinstance(calls, list | tuple), f"a message's tool_calls are {type(calls).__name__}, and no list")
        normalized["tool_calls"] = [_normalize_call(call) for call in calls]
    return normalized


def without_developers(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the messages with developers' as the system's, all of them merged into the first: most
    templates know no developer, and take a system message at the beginning only.
    """
    # A role may be of any type, such as an array, which no `==` compares.
    roles = [role if isinstance(role := message.get("role"), str) else None for message in messages]
    if "developer" not in roles:
        return messages
    instructions = [each for each, role in zip(messages, roles, strict=True) if role in ("developer", "system")]
    others = [each for each, role in zip(messages, roles, strict=True) if role not in ("developer", "system")]
    if len(instructions) == 1 and instructions[0] is messages[0]:
        return [{**instructions[0], "role": "system"}, *others]
    texts = [text for message in instructions if (text := _text_of(message["content"]))]
    return [{"role": "system", "content": "\n\n".join(texts)}, *others]


def _text_of(content: str | list[dict[str, Any]]) -> str:
    return content if isinstance(content, str) else "\n".join(part["text"] for part in content)


def _parts(content: Any) -> list[dict[str, Any]]:
    content = [content] if isinstance(content, str) else [] if content is None else content
    wrong = f"a message's content is {type(content).__name__}; it must be a string, a list of parts or null"
    require(isinstance(content, list | tuple), wrong)
    return [part for entry in content if (part := _part(entry)) is not None]


def _part(part: Any) -> dict[str, Any] | None:
    """Return the part's text; None if it has none."""
    part = {"text": part} if isinstance(part, str) else part
    kind = part.get("type", "text") if isinstance(part, Mapping) else type(part).__name__
    is_text = isinstance(part, Mapping) and isinstance(kind, str) and kind in TEXT_KEYS
    require(is_text, f"a part of a message's content is {str(kind)[:100]!r}; only text parts are served")
    text = part.get(TEXT_KEYS[kind])
    require(isinstance(text, str | None), f"the text of a message's content part is {type(text).__name__}, no string")
    # Templates may read further keys, such as cache hints.
    others = {key: value for key, value in part.items() if key not in TEXT_KEYS}
    return None if text is None else {**others, "type": "text", "text": text}


def _normalize_call(call: Any) -> dict[str, Any]:
    function: Any = call.get("function") if isinstance(call, Mapping) else None
    is_call = isinstance(function, Mapping) and call.get("type", "function") == "function"
    require(is_call, 'a message\'s tool call must be {"type": "function", "function": {"name": …}}', "messages")
    return {**call, "function": {**function, "arguments": _arguments(function.get("arguments"))}}


def _arguments(arguments: Any) -> Mapping[str, Any]:
    """Return a tool call's arguments as a dictionary.

    Arguments that do not parse become an empty dictionary: the call is part of the conversation's
    history, so refusing it would break every later turn.
    """
    with suppress(ValueError, RecursionError):
        parsed = json.loads(arguments or "{}") if isinstance(arguments, str | None) else arguments
        if isinstance(parsed, Mapping):
            return parsed
    logger.warning("A tool call's arguments are no JSON object; using {} in their place")
    return {}


# Jinja


@lru_cache(maxsize=32)
def _content_format(template: str) -> str:
    """Return "openai" if the template reads the texts out of a message's parts, "string" if it
    rejects parts or prints them as they are.
    """
    try:
        prompt = _compiled(template).render(messages=[{"role": "user", "content": [PROBE]}])
    except RENDERING_ERRORS:
        return "string"
    return "openai" if PROBE["text"] in prompt and PROBE["other"] not in prompt else "string"


@lru_cache(maxsize=32)
def _compiled(template: str) -> jinja2.Template:
    try:
        return _jinja.from_string(template)
    except jinja2.TemplateError as error:
        raise MinivllmError(f"the chat template is not valid Jinja: {error}") from None


def _reject(message: str) -> None:
    raise jinja2.TemplateError(message)


def _as_json(value: Any, ensure_ascii: bool = False, indent: int | None = None, **options: Any) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **options)


class _Generation(Extension):
    """The tag `{% generation %} … {% endgeneration %}`, which marks the assistant's text for
    training; a prompt keeps what is inside.
    """

    tags: ClassVar = {"generation"}

    def parse(self, parser: Parser) -> list[Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


_jinja = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _Generation])
_jinja.filters["tojson"] = _as_json
_jinja.globals["raise_exception"] = _reject
_jinja.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
