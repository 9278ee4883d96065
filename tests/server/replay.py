"""Compare a server's answers with recorded ones.

These may differ: ids, times, fingerprints, permissions, paths; a null field may be absent; log
probabilities by 0.002; several tokens of a stream may come in one event; the wording of errors, but
not their status, type, code and param. Where a tool must be called, vLLM's arguments are a string
that does not fit the tool's schema and is cut off; ours fit, so the call may be complete.
"""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

DATA = Path(__file__).parent / "data"
FILES = [DATA / f"{name}.json" for name in ("exchanges", "agent_exchanges")]
EXCHANGES: list[dict[str, Any]] = [entry for file in FILES for entry in json.loads(file.read_text())]
OWN = {
    "id", "created", "system_fingerprint", "permission", "root", "version", "service_tier", "kv_transfer_params",
    "ec_transfer_params", "metrics", "routed_experts", "prompt_tokens_details", "completion_tokens_details",
    "created_at", "call_id", "item_id", "cached_tokens",
}  # fmt: skip
FREE = {
    "text", "content", "tool", "tool_calls", "arguments", "tokens", "token", "bytes", "token_ids", "logprobs",
    "finish_reason", "stop_reason", "end", "completion_tokens", "total_tokens", "output", "output_tokens", "status",
    "incomplete_details",
}  # fmt: skip
ITEM_STATUS = re.compile(r"\.output\[\d+\]\.status$")
"""An item that is cut off is incomplete in vLLM 0.33, and completed in 0.32, like its last event."""
COUNTED = {"completion_tokens", "output_tokens", "total_tokens"}
"""With `free_usage`: two engines may spell a text that is prescribed in other tokens."""
FAMILIES = [
    "num_requests_running", "num_requests_waiting", "kv_cache_usage_perc", "prefix_cache_queries_total",
    "prefix_cache_hits_total", "prompt_tokens_total", "generation_tokens_total", "num_preemptions_total",
    "request_success_total", "time_to_first_token_seconds", "inter_token_latency_seconds",
    "request_time_per_output_token_seconds", "e2e_request_latency_seconds", "request_queue_time_seconds",
    "request_prefill_time_seconds", "request_decode_time_seconds", "request_inference_time_seconds",
    "request_prompt_tokens", "request_generation_tokens", "request_params_n", "request_params_max_tokens",
    "iteration_tokens_total", "cache_config_info",
]  # fmt: skip
"""What dashboards read, below `vllm:`."""
LABELS = {"model_name", "engine", "finished_reason", "le"}


def differences(entry: dict[str, Any], status: int, kind: str, body: str) -> list[str]:
    """Return where an answer differs from the recorded one, or nothing if it does not."""
    if status != entry["status"]:
        return [f"status {status} instead of {entry['status']}: {body[:200]}"]
    if kind.split(";")[0] != entry["content_type"].split(";")[0]:
        return [f"{kind!r} instead of {entry['content_type']!r}"]
    free = FREE if entry.get("free_text") else COUNTED if entry.get("free_usage") else set[str]()
    if entry["path"] == "/metrics":
        return list(_metrics(entry["response"], body))
    if "event-stream" in kind:
        return list(_values(_folded(entry["response"]), _folded(body), free))
    if not entry["response"]:
        return [] if not body else [f"a body: {body[:80]}"]
    wanted, result = json.loads(entry["response"]), json.loads(body)
    if "error" in wanted:
        if not result["error"]["message"]:
            return ["an error without a message"]
        keys = ("type", "param", "code")
        wanted, result = ({key: item["error"].get(key) for key in keys} for item in (wanted, result))
    return list(_values(wanted, result, free))


def _values(wanted: Any, actual: Any, free: set[str], path: str = "") -> Iterator[str]:
    if path.rsplit(".", 1)[-1] in free or ITEM_STATUS.search(path):
        return
    if isinstance(wanted, dict) and isinstance(actual, dict):
        for key in sorted(wanted.keys() | actual.keys(), key=str):
            if key not in OWN:
                yield from _values(wanted.get(key), actual.get(key), free, f"{path}.{key}")
    elif isinstance(wanted, list) and isinstance(actual, list) and len(wanted) == len(actual):
        for index, (event, other) in enumerate(zip(wanted, actual, strict=True)):
            yield from _values(event, other, free, f"{path}[{index}]")
    elif isinstance(wanted, float) and isinstance(actual, int | float):
        if abs(wanted - actual) > 0.002:
            yield f"{path}: {actual} instead of {wanted}"
    elif wanted != actual:
        yield f"{path}: {str(actual)[:200]!r} instead of {str(wanted)[:200]!r}"


def _folded(body: str) -> dict[str, Any]:
    """Reduce a stream to the order of its event kinds and each choice with its deltas joined."""
    order: list[str] = []
    choices: dict[int, dict[str, Any]] = {}
    usage, ids, response = None, set(), None
    for line in body.splitlines():
        if not line.startswith("data: "):
            assert not line or line.startswith("event: response."), f"no event: {line!r}"
            continue
        event = {"last": True} if line == "data: [DONE]" else json.loads(line[len("data: ") :])
        kinds = [_take_in(choices, choice) for choice in event.get("choices", ())]
        kind = "+".join(kinds) or event.get("type") or next(key for key in ("last", "error", "usage") if key in event)
        kind = "response.completed" if kind == "response.incomplete" else kind
        order += [kind] if order[-1:] != [kind] else []
        usage, response = event.get("usage") or usage, event.get("response") or response
        if "choices" in event:
            ids.add((event["id"], event["object"], event["model"]))
    return {"order": order, "choices": choices, "usage": usage, "response": response, "several": len(ids) > 1}


def _take_in(choices: dict[int, dict[str, Any]], choice: dict[str, Any]) -> str:
    delta = choice.get("delta", choice)
    empty = {"text": "", "tool": "", "role": None, "end": [], "logprobs": [], "token_ids": [], "prompt_token_ids": None}
    known = choices.setdefault(choice["index"], empty)
    text = delta.get("text") or delta.get("content") or ""
    known["text"] += text
    for call in delta.get("tool_calls") or []:
        known["tool"] += (call.get("function") or {}).get("arguments") or ""
    known["role"] = known["role"] or delta.get("role")
    known["token_ids"] += choice.get("token_ids") or []
    known["prompt_token_ids"] = known["prompt_token_ids"] or choice.get("prompt_token_ids")
    if choice.get("finish_reason"):
        known["end"].append([choice["finish_reason"], choice.get("stop_reason")])
    logprobs = choice.get("logprobs")
    if logprobs and "content" in logprobs:
        known["logprobs"] += logprobs["content"]
    elif logprobs:
        columns = (logprobs[name] for name in ("tokens", "token_logprobs", "top_logprobs"))
        known["logprobs"] += [list(row) for row in zip(*columns, strict=True)]
    return "role" if delta.get("role") and not text else "delta"


def _metrics(wanted: str, actual: str) -> Iterator[str]:
    for name in (f"vllm:{name}" for name in FAMILIES):
        if _kind(actual, name) != _kind(wanted, name):
            yield f"{name}: {_kind(actual, name)} instead of {_kind(wanted, name)}"
        elif missing := _labels(wanted, name) & LABELS - _labels(actual, name):
            yield f"{name}: no labels {sorted(missing)}"


def _kind(text: str, name: str) -> str | None:
    result = re.search(rf"^# TYPE {re.escape(name)} (\w+)$", text, re.MULTILINE)
    return result and result[1]


def _labels(text: str, name: str) -> set[str]:
    rows = re.findall(rf"^{re.escape(name)}(?:_bucket|_sum|_count)?\{{(.*)\}} ", text, re.MULTILINE)
    return {label for row in rows for label in re.findall(r'(\w+)="', row)}
