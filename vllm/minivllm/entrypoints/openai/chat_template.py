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
from minivllm.config.checks import encodable
from minivllm.config.model_files import hub_file, local_path, read_json_object
from minivllm.engine.arg_utils import EngineArgs
from minivllm.entrypoints.openai.chat_messages import ContentFormat, detect_content_format, normalize
from minivllm.entrypoints.openai.settings import check_content_format
from minivllm.errors import MinivllmError

FILENAME, TOKENIZER_CONFIG, DEFAULT = "chat_template.jinja", "tokenizer_config.json", "default"
SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
PLAIN = (
    "{% for m in messages %}{{ '### ' + m['role'] + '\\n' + (m['content'] or '') + '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '### assistant\\n' }}{% endif %}"
)
"""For the embedded model, which was not trained on conversations."""


def read_template(given: str | None, model: str | Path) -> str | None:
    """Return the flag's template, else the model's own; None if the model has none, or several and
    no default.

    The flag is the template itself, or the name of a file, or of one of the model's templates. The
    model's own are read for nothing but that name, so that a flag can replace one that is
    malformed.

    Raises:
        MinivllmError: the file does not exist, or the template is not valid.
    """
    template = _of_flag(given, model) if given else _templates_of(model).get(DEFAULT)
    if template is not None:
        _compiled(template)
    return template


def no_template(model: str | Path) -> str:
    """Return a message that explains why this model has no chat template, and what to do about it."""
    names = ", ".join(map(repr, _templates_of(model)))
    if names:
        return (
            f"the model has several chat templates, {names}, and no default: choose one by its name, with "
            "--chat-template NAME for a server, or chat_template=NAME for LLM(...) or LLM.chat"
        )
    return (
        "the model has no chat template, and there is no default one (transformers has none since v4.44): start the "
        "server with --chat-template, or give LLM.chat a chat_template"
    )


def special_tokens(model: str | Path) -> dict[str, str]:
    """Return the special tokens that templates may use, such as `bos_token`, from the tokenizer's
    config.
    """
    path = _file_of(model, TOKENIZER_CONFIG)
    contents = {} if path is None else read_json_object(path)
    tokens = {name: contents[name] for name in SPECIAL_TOKENS if contents.get(name)}
    return {name: token["content"] if isinstance(token, dict) else token for name, token in tokens.items()}


def _of_flag(given: str, model: str | Path) -> str:
    # A template has braces or lines, and no path has.
    if "{" in given or "\n" in given:
        return given
    path = Path(given)
    # A file goes before a template of the same name.
    if path.is_dir() or not path.exists():
        named = _templates_of(model)
        if given in named:
            return named[given]
    return _text_of(path)


def _text_of(path: Path) -> str:
    try:
        return path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise MinivllmError(f"the chat template {path} cannot be read: {error}") from None


def _templates_of(model: str | Path) -> dict[str, str]:
    """Return the model's own templates by name; a single template is the default."""
    if (path := _file_of(model, FILENAME)) is not None:
        return {DEFAULT: _text_of(path)}
    if (path := _file_of(model, TOKENIZER_CONFIG)) is None:
        return {}
    written = read_json_object(path).get("chat_template") or []
    # Older models have several templates in a list, such as one for tools.
    named = [{"name": DEFAULT, "template": written}] if isinstance(written, str) else written
    try:
        templates = {entry["name"]: entry["template"] for entry in named}
    except (TypeError, LookupError):
        templates = {"": None}
    if not all(isinstance(text, str) for pair in templates.items() for text in pair):
        raise MinivllmError(f'chat_template in {path} must be a template, or a list of {{"name": …, "template": …}}')
    return templates


def _file_of(model: str | Path, filename: str) -> Path | None:
    directory = local_path(model)
    try:
        path = directory / filename if directory.is_dir() else hub_file(str(model), filename)
    except MinivllmError:
        return None
    return path if path.is_file() else None


def render(
    template: str,
    messages: Sequence[Mapping[str, Any]],
    further: Mapping[str, Any],
    goes_on: bool,
    content_format: str = "auto",
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
    check_content_format(content_format)
    if not isinstance(messages, Sequence) or isinstance(messages, str | bytes):
        raise MinivllmError(f"a conversation is {type(messages).__name__}; it must be a list of messages")
    if not messages:
        raise MinivllmError("there are no messages; a conversation needs at least one")
    if goes_on and further.get("add_generation_prompt"):
        raise MinivllmError("continue_final_message needs `add_generation_prompt: false`")
    conversation = normalize(
        messages, _content_format(template) if content_format == "auto" else cast(ContentFormat, content_format)
    )
    try:
        text = _compiled(template).render(messages=conversation, **further)
    except (jinja2.TemplateError, TypeError, ValueError, LookupError, ArithmeticError, RecursionError) as error:
        raise MinivllmError(f"the chat template rejects the messages: {error}") from None
    if goes_on:
        # The template has added its end of turn behind the last message: cut it off.
        last = _last_text(conversation[-1]["content"]).strip()
        text = text[: text.rindex(last) + len(last)] if last in text else text
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
    if not isinstance(messages, Sequence) or isinstance(messages, str):
        raise MinivllmError(f"messages are {type(messages).__name__}; they must be a list of messages, or of lists")
    if template is not None and not isinstance(template, str | Path):
        raise MinivllmError(f"chat_template is {type(template).__name__}; it must be a template or a file's name")
    source = args.tokenizer or args.model
    text = read_template(template and str(template), source)
    if text is None and local_path(args.model) == EMBEDDED_MODEL:
        text = PLAIN
    if text is None:
        raise MinivllmError(no_template(source))
    conversations = [messages] if not messages or isinstance(messages[0], Mapping) else messages
    seen = {**special_tokens(source), **further}
    return [render(text, conversation, seen, goes_on, content_format) for conversation in conversations]


def _last_text(content: str | list[dict[str, Any]]) -> str:
    if isinstance(content, str):
        return content
    return content[-1]["text"] if content else ""


@lru_cache(maxsize=32)
def _content_format(template: str) -> ContentFormat:
    try:
        return detect_content_format(_environment.parse(template))
    except jinja2.TemplateError as error:
        raise MinivllmError(f"the chat template is not valid Jinja: {error}") from None


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
