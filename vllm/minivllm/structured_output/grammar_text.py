"""Turn a constraint into a grammar in llguidance's own syntax, and validate it.

The library follows references recursively, in native code: a long enough chain of them would
overflow the stack, and end the process. So texts are bounded, and read in threads whose stacks are
deep enough for that bound.

In vLLM v0.33.0: `vllm/v1/structured_output/backend_guidance.py` (`serialize_guidance_grammar`,
`validate_guidance_grammar`), `vllm/v1/structured_output/utils.py` (`choice_as_grammar`).
"""

import functools
import json
import re
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

from minivllm.config import StructuredOutputsParams
from minivllm.errors import MinivllmError

MOST_CHARACTERS = 1 << 18
# This is address space; only what is used becomes memory: 5 kB for each reference in a chain.
STACK_BYTES = 256 << 20
MOST_ERROR_CHARACTERS = 400
ABOVE, BELOW = -(1 << 63), 1 << 64
"""Bounds of a schema's numbers: llguidance 1.9.1 ends the process at -2^63, and no message carries 2^64."""
NEGATIVE = re.compile(r"-\d[\d.]*(?:[eE]\+?\d+)?")
ONE_SPACE = "[ ]?"
STAYS_OPEN = frozenset(("allOf", "if", "then", "else", "not", "enum", "const", "default", "examples"))
NAMED_SCHEMAS = frozenset(("properties", "patternProperties", "dependentSchemas", "$defs", "definitions"))
"""Keys whose value is a map from names to schemas."""
SAYS_MORE = frozenset(("additionalProperties", "unevaluatedProperties", "patternProperties", "allOf", "$ref", "if"))
"""Keys with which a schema describes further properties."""

Result = TypeVar("Result")


def grammar_text(params: StructuredOutputsParams) -> str:
    """Return the grammar in the syntax of llguidance, the library that enforces it. It is not
    validated yet.

    Raises:
        MinivllmError: it is too long, or cannot be expressed in that syntax.
    """
    try:
        text = _written(params)
    except Exception as error:  # the converter from GBNF raises plain Exception
        raise MinivllmError(_one_line("the constraint cannot be read", str(error))) from None
    if len(text) > MOST_CHARACTERS:
        raise MinivllmError(f"the grammar has {len(text):,} characters; at most {MOST_CHARACTERS:,} are served")
    return text


def check_grammar(params: StructuredOutputsParams) -> None:
    """Compile the grammar without a vocabulary. Results are cached.

    Raises:
        MinivllmError: the grammar is invalid; the message is the library's.
    """
    message = _validated(grammar_text(params))
    if message:
        raise MinivllmError(_one_line("the grammar is not valid", message))


class DeepThreads:
    """A pool of threads with large stacks."""

    def __init__(self, max_workers: int) -> None:
        self._pool = ThreadPoolExecutor(max_workers, "grammar")
        self._starting = threading.Lock()

    def submit(self, call: Callable[..., Result], *arguments: Any) -> Future[Result]:
        """Run a call in one of the threads."""
        # The size is set for the whole process, and a new thread takes the one that is set when it
        # starts.
        with self._starting:
            usual = threading.stack_size(STACK_BYTES)
            try:
                return self._pool.submit(call, *arguments)
            finally:
                threading.stack_size(usual)


@functools.lru_cache(maxsize=32)
def _validated(text: str) -> str:
    return _checkers().submit(_validate, text).result()  # in a deep thread, since the library recurses


@functools.cache
def _checkers() -> DeepThreads:
    return DeepThreads(1)


def _validate(text: str) -> str:
    from llguidance import LLMatcher, LLParserLimits  # loaded late: it takes a while

    is_error, messages = LLMatcher.validate_grammar_with_warnings(text, limits=LLParserLimits(verbose_errors=False))
    return messages[0] if is_error else ""


def _written(params: StructuredOutputsParams) -> str:
    from llguidance import LLMatcher

    if params.choice is not None:
        # Not a rule, which may have 2,000 options only.
        return LLMatcher.grammar_from_regex("|".join(map(_literal, params.choice)))
    if params.regex is not None:
        return LLMatcher.grammar_from_regex(params.regex)
    if params.grammar is not None:
        if "%json" in params.grammar:
            _check_numbers(list(map(float, NEGATIVE.findall(params.grammar))))
        return LLMatcher.grammar_from_lark(_lark(params.grammar))
    schema = {"type": "object"} if params.json is None else params.json
    defaults: Any = {"whitespace_pattern": params.whitespace_pattern or ONE_SPACE}
    if params.disable_any_whitespace:
        defaults = {"whitespace_flexible": False}
    schema = json.loads(schema) if isinstance(schema, str) else schema
    _check_numbers(schema)
    return LLMatcher.grammar_from_json_schema(json.dumps(_closed(schema)), defaults=defaults)


def _check_numbers(schema: Any) -> None:
    parts = [schema]
    while parts:
        part = parts.pop()
        if isinstance(part, dict | list):
            parts += part.values() if isinstance(part, dict) else part
        elif isinstance(part, int | float) and (float(part) <= ABOVE or (isinstance(part, int) and part >= BELOW)):
            raise ValueError(f"its numbers must be above -2^63, and integers below 2^64; {part:.3g} is not")


def _closed(schema: Any) -> Any:
    """Return the schema with objects that have no properties but those it names, unless it says
    otherwise.

    JSON Schema leaves objects open, and a small model then adds properties until its tokens run out.
    vLLM's default backend, xgrammar in its strict mode, closes them too. What several schemas
    describe together (`allOf`) stays open, because each names only some of the properties.
    """
    if isinstance(schema, list):
        return [_closed(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    closed = {}
    for key, part in schema.items():
        if key in NAMED_SCHEMAS and isinstance(part, dict):
            closed[key] = {name: _closed(named) for name, named in part.items()}
        else:
            closed[key] = part if key in STAYS_OPEN else _closed(part)
    if isinstance(schema.get("properties"), dict) and not SAYS_MORE & schema.keys():
        closed["additionalProperties"] = False
    return closed


@functools.lru_cache(maxsize=32)
def _lark(grammar: str) -> str:
    from llguidance.gbnf_to_lark import any_to_lark

    return any_to_lark(grammar)


def _literal(text: str) -> str:
    """Return the regular expression that matches exactly this text."""
    return "".join(char if char.isalnum() else f"\\x{{{ord(char):x}}}" for char in text)


def _one_line(what: str, message: str) -> str:
    return f"{what}: {' '.join(message.split())[:MOST_ERROR_CHARACTERS]}"
