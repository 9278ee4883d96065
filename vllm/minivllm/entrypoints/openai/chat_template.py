"""Turn messages into a prompt with the model's chat template, in Jinja.

A template comes from a stranger's model folder, so it runs in a sandbox: it sees the messages, and
nothing else.

In vLLM v0.33.0: `vllm/renderers/hf.py`, `vllm/renderers/chat_utils/chat_template.py`. Templates may
call the same functions as in the transformers library (its `chat_template_utils`).
"""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import lru_cache
from pathlib import Path
from typing import Any, ClassVar, cast

import jinja2
from jinja2.ext import Extension, loopcontrols
from jinja2.nodes import Node
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from minivllm.config import EMBEDDED_MODEL
from minivllm.config.checks import check, encodable, require
from minivllm.config.model_files import local_path, optional_file, read_json_object
from minivllm.engine.arg_utils import EngineArgs
from minivllm.entrypoints.openai.chat_messages import ContentFormat, normalize, without_developers
from minivllm.entrypoints.openai.settings import CONTENT_FORMAT
from minivllm.errors import MinivllmError

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
        template = _text_of(Path(flag))
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


def _text_of(path: Path) -> str:
    try:
        return path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise MinivllmError(f"the chat template {path} cannot be read: {error}") from None


def _template_of(model: str | Path) -> str | None:
    if (path := optional_file(model, FILENAME)) is not None:
        return _text_of(path)
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
    form = _content_format(template) if content_format == "auto" else cast(ContentFormat, content_format)
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


def render_conversations(
    messages: Sequence[Any],
    template: object,
    args: EngineArgs,
    further: Mapping[str, Any],
    goes_on: bool,
    content_format: str,
) -> list[str]:
    """Return the prompts of one or more conversations, using this template or the model's own;
    everything else is as in `render`.

    Raises:
        MinivllmError: there is no template, or it rejects the messages.
    """
    is_list = isinstance(messages, Sequence) and not isinstance(messages, str)
    require(is_list, f"messages are {type(messages).__name__}; they must be a list of messages, or of lists")
    wrong = f"chat_template is {type(template).__name__}; it must be a template or a file's name"
    require(template is None or isinstance(template, str | Path), wrong)
    source = args.tokenizer or args.model
    plain = PLAIN if local_path(args.model) == EMBEDDED_MODEL else None
    text = read_template(None if template is None else str(template), source) or plain
    if text is None:
        raise MinivllmError(NO_TEMPLATE)
    conversations = [messages] if not messages or isinstance(messages[0], Mapping) else messages
    seen = {**special_tokens(source), **further}
    return [render(text, conversation, seen, goes_on, content_format) for conversation in conversations]


@lru_cache(maxsize=32)
def _content_format(template: str) -> ContentFormat:
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
        return _environment.from_string(template)
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


_environment = ImmutableSandboxedEnvironment(
    trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _Generation]
)
_environment.filters["tojson"] = _as_json
_environment.globals["raise_exception"] = _reject
_environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
