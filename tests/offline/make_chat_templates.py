"""Render the chat templates of vLLM's `examples/` with transformers, and keep a hash of each
prompt.

    uv run python tests/offline/make_chat_templates.py path/to/vllm-0.33.0/examples

The messages are written here by hand as vLLM v0.33.0 passes them to a template
(`parse_chat_messages`), and vLLM's own code says which of the two formats each template gets. The
templates are vLLM's and are not kept.
"""

import hashlib
import json
import sys
from collections import deque
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jinja2
from transformers.utils.chat_template_utils import _compile_jinja_template

RESULTS = Path(__file__).with_name("vllm_chat_templates.json")
SEEN = {"add_generation_prompt": True, "bos_token": "<s>", "eos_token": "</s>", "tools": None}
CALL = {"id": "abcdefgh1", "type": "function", "function": {"name": "get", "arguments": {"city": "Köln"}}}
ANSWER = {"role": "tool", "content": "12 °C", "tool_call_id": "abcdefgh1"}
CONVERSATIONS: dict[str, list[dict[str, Any]]] = {
    "plain": [{"role": "user", "content": ["Hi"]}, {"role": "assistant", "content": ["Yes?"]}],
    "tool call": [{"role": "user", "content": ["Weather?"]}, {"role": "assistant", "content": ["I'll look."]}],
    "null": [{"role": "user", "content": ["Weather?"]}, {"role": "assistant", "content": []}],
    "parts": [{"role": "user", "content": ["One.", "Two."]}, {"role": "assistant", "content": ["Three.", "Four."]}],
}
for name in ("tool call", "null"):
    CONVERSATIONS[name] += [ANSWER]
    CONVERSATIONS[name][1]["tool_calls"] = [CALL]
for conversation in CONVERSATIONS.values():
    conversation += [{"role": "user", "content": ["Thanks"]}]


def now(form: str) -> str:
    """Return the current time as templates see it; no prompt may depend on it."""
    return "Wednesday" if form == "%A" else f"<{form}>"


def as_given(content: Any, content_format: str) -> Any:
    """Return a message's content as vLLM passes it to a template of this format."""
    if isinstance(content, str):
        return content
    return "\n".join(content) if content_format == "string" else [{"type": "text", "text": text} for text in content]


def expected(template: str, conversation: list[dict[str, Any]], content_format: str) -> str | None:
    """Return transformers' prompt; None if the template rejects the messages."""
    messages = [{**message, "content": as_given(message["content"], content_format)} for message in conversation]
    compiled = _compile_jinja_template(template)
    compiled.globals["strftime_now"] = now
    try:
        return compiled.render(messages=messages, **SEEN)
    except (jinja2.TemplateError, TypeError):
        return None


def digest(prompt: str | None) -> str | None:
    """Return enough of a prompt's hash to tell prompts apart, or None if there is no prompt."""
    return None if prompt is None else hashlib.sha256(prompt.encode()).hexdigest()[:16]


def vllms_detection(source: str) -> Any:
    """Return vLLM's own functions that detect a template's format, from the source of its
    `renderers/hf.py`.
    """
    names: dict[str, Any] = {"jinja2": jinja2, "deque": deque}
    exec(source[source.index("def _is_var_access") : source.index("def _try_extract_ast")], names)
    return SimpleNamespace(**names)


def main() -> None:
    """Render all templates and write the results file."""
    examples = Path(sys.argv[1])
    detection = vllms_detection((examples.parent / "vllm/renderers/hf.py").read_text())
    results = {}
    for path in sorted(examples.glob("*.jinja")):
        template = path.read_text()
        tree = _compile_jinja_template(template).environment.parse(template)
        loop = next(detection._iter_nodes_assign_content_item(tree), None)
        content_format = "string" if loop is None else "openai"
        prompts = {n: digest(expected(template, messages, content_format)) for n, messages in CONVERSATIONS.items()}
        results[path.name] = {"format": content_format, **prompts}
    RESULTS.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
