"""Send the same random requests to vLLM's CPU server and to ours, and list the differences by kind.

    make peers                                              # makes vLLM's own environment
    uv run python benchmarks/differential.py --requests 1200
    uv run python benchmarks/differential.py --requests 60 --seed 7 --show 3

A request is a body that works, with up to three fields set to values that are ordinary, at a limit,
of a wrong type, or not ASCII. Both servers answer greedily in fp32. What may differ: ids, times,
fields that are null, the wording of errors, log probabilities by 0.002, and the text of an answer
that a grammar constrains, since two engines write the same JSON with other spaces. A stream counts
as the order of its events' kinds and what they add up to.

vLLM's CPU build is 0.32.0; the course follows 0.33.0. They differ in the status of a response's item
that is cut off, and in the name of the last event then: these two do not count. With `--save FILE`,
the requests that differ are written there, with both answers.
"""

import argparse
import json
import random
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import vllm_cli
from serving import FLAGS, NAME, Serving

from minivllm.errors import MinivllmError
from minivllm_lab.cli import Parser, positive_int, run
from minivllm_lab.progress import track
from minivllm_lab.tables import table

TEMPLATE = (
    "{% for m in messages %}{{ '### ' + m['role'] + '\\n' + (m['content'] or '') + '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '### assistant\\n' }}{% endif %}"
)
FURTHER = ("--host", "127.0.0.1", "--chat-template", TEMPLATE)
TOOLS = ("--enable-auto-tool-choice", "--tool-call-parser", "hermes")
OWN = {
    "id", "item_id", "call_id", "created", "created_at", "system_fingerprint", "prompt_tokens_details", "permission",
    "cache_write_tokens", "cached_tokens", "detail",
}  # fmt: skip
FREE = {
    "text", "content", "arguments", "tool_calls", "tokens", "token_ids", "logprobs", "finish_reason", "stop_reason",
    "completion_tokens", "total_tokens", "output_tokens", "output", "status", "incomplete_details", "kinds",
}  # fmt: skip
"""Parts of an answer that a grammar leaves to the engine."""
QUESTION = "def add(a, b):\n    return"
SCHEMA = {"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"]}
PARAMETERS = {"type": "object", "properties": {"city": {"enum": ["Rome", "Oslo"]}}, "required": ["city"]}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'
WRONG: tuple[Any, ...] = (None, "x", 1.5, -1, [], {}, True, [None], {"a": 1})

SHARED: dict[str, tuple[Any, ...]] = {
    "temperature": (0, 0.0, 2, 2.1, -0.1, "0", float(10**9)), "top_p": (1, 0.5, 0, 1.1), "top_k": (0, 1, -1, -2, 5000),
    "min_p": (0, 1, 1.5), "seed": (0, 42, -1, 2**63, 2**63 - 1), "stream": (True, False, None), "user": ("me", 5),
    "presence_penalty": (2, -2, 2.5), "frequency_penalty": (0.5, 3), "repetition_penalty": (1.1, 0, -1),
    "stop": ("\n", ["\n", "a"], ["a"] * 4, ["a"] * 5, "", [""], "日"), "stop_token_ids": ([1], [-1], [10**6], ["a"]),
    "ignore_eos": (True, "yes"), "logit_bias": ({"5": 100}, {"5": -100, "6": 3.5}, {"a": 1}, {"99999": 1}),
    "cache_salt": ("s", "", "a/b", "s" * 128, "s" * 129), "model": (NAME, "nope", "", None, 7),
    "priority": (0, 3, 2**70), "include_stop_str_in_output": (True,), "structured_outputs": (
        {"choice": ["yes", "no"]}, {"regex": "[ab]+"}, {"json": SCHEMA}, {"json": SCHEMA, "regex": "a"}, {},
        {"choice": []},
    ),
}  # fmt: skip
GENERATING: dict[str, tuple[Any, ...]] = SHARED | {
    "n": (1, 2, 0, 20000), "max_tokens": (1, 0, 5, 511, 513, None), "min_tokens": (2, 9),
    "bad_words": (["a"], [""], ["b"] * 129),
    "allowed_token_ids": ([5, 6], [], [10**6]), "return_token_ids": (True,), "return_tokens_as_token_ids": (True,),
    "prompt_logprobs": (0, 2, -1, 21), "echo": (True,), "stream_options": ({"include_usage": True}, {}),
    "response_format": ({"type": "json_object"}, {"type": "text"}, {"type": "json_schema"}, {"type": "yaml"},
                        {"type": "json_schema", "json_schema": {"name": "s", "schema": SCHEMA}}),
}  # fmt: skip
FUNCTION = {"name": "weather", "parameters": PARAMETERS}
TOOL = {"type": "function", "function": FUNCTION}
MESSAGES = (
    [{"role": "user", "content": "日本語 😀 é"}],
    [{"role": "developer", "content": "short"}, {"role": "user", "content": "x = 1"}],
    [{"role": "system", "content": [{"type": "text", "text": "a"}]}, {"role": "user", "content": "b"}],
    [{"role": "user", "content": [{"type": "input_text", "text": "a"}, {"type": "refusal", "refusal": "no"}]}],
    [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}],
    [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}, {"role": "user", "content": ""}],
    [{"role": "assistant"}], [{}], [], [{"role": "user", "content": 5}],
)  # fmt: skip
CALLED = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Rome"}'}}
TWO_TURNS = [
    {"role": "user", "content": "weather?"}, {"role": "assistant", "content": None, "tool_calls": [CALLED]},
    {"role": "tool", "tool_call_id": "c1", "content": "sunny"},
]  # fmt: skip
ITEMS = [
    {"role": "user", "content": "weather?"},
    {"type": "function_call", "call_id": "c1", "name": "weather", "arguments": '{"city": "Rome"}'},
    {"type": "function_call_output", "call_id": "c1", "output": "sunny"},
]
BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": QUESTION},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": QUESTION}]},
    "/v1/responses": {"input": QUESTION},
    "/tokenize": {"prompt": QUESTION},
    "/detokenize": {"tokens": [100, 200, 300]},
}
FIELDS: dict[str, dict[str, tuple[Any, ...]]] = {
    "/v1/completions": GENERATING | {
        "prompt": ("日本語 😀", ["a", "b"], [5, 6], [[5], [6, 7]], "", [], [-1], [10**6], ["a"] * 1025, [[]], [""]),
        "logprobs": (0, 1, 5, 21, -1, "1"), "suffix": ("x",), "add_special_tokens": (False,),
    },
    "/v1/chat/completions": GENERATING | {
        "messages": (*MESSAGES, TWO_TURNS), "logprobs": (True,), "top_logprobs": (0, 2, 21, -1),
        "tools": ([TOOL], [], [{"type": "function"}]), "parallel_tool_calls": (False,),
        "max_completion_tokens": (1, 5, 600),
        "tool_choice": ("auto", "none", "required", {"type": "function", "function": {"name": "weather"}}, "other"),
        "add_generation_prompt": (False,), "continue_final_message": (True,), "reasoning_effort": ("low", "huge"),
    },
    "/v1/responses": SHARED | {
        "input": (ITEMS, *MESSAGES, [{"type": "item_reference", "id": "x"}]), "instructions": ("short", 5),
        "max_output_tokens": (1, 5, 600, 0),
        "tools": ([{"type": "function", **FUNCTION}], [{"type": "web_search"}], []),
        "tool_choice": ("auto", "none", "required", {"type": "function", "name": "weather"}),
        "text": ({"format": {"type": "text"}}, {"format": {"type": "json_schema", "name": "s", "schema": SCHEMA}}),
        "include": (["message.output_text.logprobs"], ["nope"]), "top_logprobs": (1, 21), "store": (False, True),
        "previous_response_id": ("resp_1",), "background": (True,), "metadata": ({"a": "b"}, {"a": 1}),
        "truncation": ("auto", "disabled", "other"), "parallel_tool_calls": (False,),
    },
    "/tokenize": {
        "prompt": ("", "日本語 😀", 5), "return_token_strs": (True,), "add_special_tokens": (False,),
        "model": ("nope",),
    },
    "/detokenize": {"tokens": ([], [10**6], [-1], ["a"], [2**70]), "model": ("nope",)},
}  # fmt: skip
WEIGHTS = (4, 5, 4, 1, 1)
LOST = 599


def random_request(draw: random.Random) -> tuple[str, dict[str, Any]]:
    """Return a path and a body."""
    [path] = draw.choices([*BODIES], WEIGHTS)
    body = dict(BODIES[path])
    if "tokenize" not in path:
        body |= {"temperature": 0, "max_output_tokens" if "responses" in path else "max_tokens": draw.randint(1, 8)}
    if path == "/v1/chat/completions" and draw.random() < 0.1:
        # The model is made to call the tool freely.
        body |= {"tools": [TOOL], "structured_outputs": {"choice": [f"I look. {CALL}"]}, "max_tokens": 120}
    for name in draw.sample([*FIELDS[path]], draw.randint(0, min(3, len(FIELDS[path])))):
        body[name] = draw.choice(WRONG if draw.random() < 0.15 else FIELDS[path][name])
    return path, body


def is_free(body: dict[str, Any]) -> bool:
    """Return whether a grammar constrains the answer, or chance does."""
    free = any(body.get(name) for name in ("structured_outputs", "response_format", "text"))
    return free or body.get("tool_choice") not in (None, "auto", "none") or body.get("temperature") != 0


def differences(theirs: httpx.Response, ours: httpx.Response, free: bool) -> Iterator[tuple[str, str]]:
    """Yield the place and the kind of each difference."""
    if theirs.status_code == LOST:
        return
    if theirs.status_code != ours.status_code:
        yield "status", f"{ours.status_code} instead of {theirs.status_code}"
        return
    if theirs.status_code >= 500:
        return
    yield from _unequal(_value(theirs), _value(ours), free, "")


def _value(reply: httpx.Response) -> Any:
    if "event-stream" not in reply.headers.get("content-type", ""):
        return reply.json()
    kinds: list[str] = []
    texts: defaultdict[str, str] = defaultdict(str)
    last: dict[str, Any] = {}
    for line in reply.text.splitlines():
        if not line.startswith("data: {"):
            continue
        event = json.loads(line[len("data: ") :])
        kind = event.get("type") or ("choices" if event.get("choices") else "usage")
        kinds += [kind] if kinds[-1:] != [kind] else []
        for choice in event.get("choices", ()):
            delta = choice.get("delta", choice)
            for key in ("text", "content"):
                texts[f"{key} {choice['index']}"] += delta.get(key) or ""
            for call in delta.get("tool_calls") or ():
                texts[f"arguments {choice['index']}"] += call["function"].get("arguments") or ""
            last |= {f"end {choice['index']}": choice["finish_reason"]} if choice.get("finish_reason") else {}
        last |= {key: event[key] for key in ("usage", "response", "error") if event.get(key)}
    if kinds[-1:] == ["response.incomplete"]:
        kinds[-1] = "response.completed"
    return {"kinds": kinds, "text": dict(texts), **last}


def _unequal(wanted: Any, actual: Any, free: bool, path: str) -> Iterator[tuple[str, str]]:
    name = path.rpartition(".")[2]
    if name in OWN or path.endswith("output[].status") or path == ".error.message" or (free and name in FREE):
        return
    if isinstance(wanted, dict) and isinstance(actual, dict):
        for key in sorted(wanted.keys() | actual.keys(), key=str):
            yield from _unequal(wanted.get(key), actual.get(key), free, f"{path}.{key}")
    elif isinstance(wanted, list) and isinstance(actual, list) and len(wanted) == len(actual):
        for one, other in zip(wanted, actual, strict=True):
            yield from _unequal(one, other, free, f"{path}[]")
    elif isinstance(wanted, int | float) and isinstance(actual, int | float):
        if abs(wanted - actual) > (0.002 if isinstance(wanted, float) else 0):
            yield path, "another number"
    elif wanted != actual and (wanted or actual):  # an absent field, null and an empty list are the same
        yield path, f"{_short(actual)} instead of {_short(wanted)}"


def _short(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)[:40] if isinstance(value, str | bool | None) else type(value).__name__


def _answer(client: httpx.Client, url: str, content: bytes, headers: dict[str, str]) -> httpx.Response:
    """Return the reply; a connection that ends without one counts as a status of its own."""
    try:
        return client.post(url, content=content, headers=headers)
    except httpx.TransportError as error:
        return httpx.Response(LOST, text=str(error))


def compare(vllm: str, ours: str, requests: int, seed: int) -> tuple[list[dict[str, Any]], int]:
    """Send random requests to both addresses. Return those that differ, and how many of our answers
    were a fault of the server's.
    """
    draw = random.Random(seed)
    found: list[dict[str, Any]] = []
    num_faults = 0
    with httpx.Client(timeout=120) as client:
        for _ in track(range(requests), "requests"):
            path, body = random_request(draw)
            content = json.dumps(body).encode()
            headers = {"content-type": "application/json"}
            theirs, own = (_answer(client, url + path, content, headers) for url in (vllm, ours))
            num_faults += own.status_code >= 500
            if kinds := [*differences(theirs, own, is_free(body))]:
                answers = {"vllm": theirs.text[:4000], "ours": own.text[:4000], "status": own.status_code}
                found.append({"path": path, "body": body, "kinds": kinds, **answers})
    return found, num_faults


def main(arguments: argparse.Namespace) -> None:
    """Start both servers, compare them, and print the differences."""
    if not vllm_cli.ENVIRONMENT.exists():
        raise MinivllmError(f"vLLM has no environment at {vllm_cli.ENVIRONMENT}: run make peers")
    with tempfile.TemporaryDirectory() as name, ExitStack() as running:
        flags = (*FLAGS, *FURTHER, *TOOLS)
        environment = vllm_cli.variables(Path(name))
        command = [str(vllm_cli.ENVIRONMENT / "bin" / "vllm")]
        vllm = running.enter_context(Serving("vllm", command, environment, Path(name), (*flags, "--enforce-eager")))
        own = {key: value for key, value in environment.items() if key != "PYTHONPATH"}
        ours = running.enter_context(
            Serving("minivllm", [sys.executable, "-P", "-m", "minivllm"], own, Path(name), flags)
        )
        found, num_faults = compare(vllm.url, ours.url, arguments.requests, arguments.seed)
    kinds: defaultdict[tuple[str, str, str], list[dict[str, Any]]] = defaultdict(list)
    for one in found:
        for place, kind in one["kinds"][: arguments.per_request]:
            kinds[one["path"], place, kind].append(one)
    rows = [(*kind, str(len(examples))) for kind, examples in sorted(kinds.items(), key=lambda pair: -len(pair[1]))]
    table("Differences", ("path", "where", "ours", "requests"), rows[: arguments.show])
    equal = arguments.requests - len(found)
    print(f"{equal} of {arguments.requests} answers are equal; {num_faults} of ours are 5xx")
    if arguments.save:
        arguments.save.write_text(json.dumps(found, ensure_ascii=False, indent=1))


def parser() -> Parser:
    """Return the command-line parser."""
    flags = Parser(description=__doc__)
    flags.add_argument("--requests", type=positive_int, default=1200, help="how many; default: 1200")
    flags.add_argument("--seed", type=int, default=0, help="of the random requests; default: 0")
    flags.add_argument("--show", type=positive_int, default=60, help="how many kinds of differences to list")
    flags.add_argument("--per-request", type=positive_int, default=1, help="differences that count for each request")
    flags.add_argument("--save", type=Path, help="write the requests that differ, and both answers, to this file")
    return flags


if __name__ == "__main__":
    run(main, parser())
