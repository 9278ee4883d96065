"""Prepare the site's page of one recorded request: its stops, and the numbers in its text.

Every number is read from the recording or counted from the model's configuration, so that the page
can't contradict the picture on it.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from inspect import signature
from pathlib import Path
from typing import Any

from minivllm.entrypoints.xray.page import RECORDED, script, style
from minivllm_lab.engines.page_engine import PageEngine
from minivllm_lab.engines.step_recording import read_recording

PAGE = "site/one_request.md"
OWN = "site/own_request.md"
"""The page on which the reader's own request runs."""
STOP = re.compile(r"^<!-- stop: (\w+) -->$", re.MULTILINE)
ENTRIES = ("admission", "first_token", "accepted", "returned", "back")
"""The stops of whose batch the text speaks."""
BYTES = 4
"""The size of a number in the cache: on a CPU the engine computes in float32."""


def place(name: str) -> str:
    """Return the place of a view of the engine's steps, and the scripts behind it."""
    scripts = ("xray", "recorded", name)
    return f'<div class="{name.replace("_", "-")}"></div><link rel="stylesheet" href="../_static/xray.css">' + "".join(
        f'<script src="../_static/{each}.js" defer></script>' for each in scripts
    )


def page(text: str, root: Path) -> str:
    """Return the page with its numbers, its stops and the picture's place."""
    facts, stops = told(root)
    text = text.replace("<!-- one request -->", place("one_request")).format(**facts)
    return STOP.sub(lambda stop: f'<div class="stop" data-step="{stops[stop[1]]}"></div>', text)


def own_page(text: str) -> str:
    """Return the page of the reader's own request."""
    defaults = {name: each.default for name, each in signature(PageEngine).parameters.items()}
    facts = {"budget": defaults["budget"], "blocks": defaults["num_blocks"] - 1}
    return text.replace("<!-- own request -->", place("own_request")).format(**facts)


def add(static: Path) -> None:
    """Write the view, its style and the recording to the site's static files."""
    body = script().replace("export default", "const anywidget =").replace("\nexport ", "\n")
    (static / "xray.js").write_text(f"(() => {{\n{body}\nwindow.xrayView = {{ mount, live }};\n}})();\n")
    (static / "xray.css").write_text(style())
    (static / "recorded.js").write_text(f"window.recorded = {json.dumps(RECORDED.read_text())};\n")


def told(root: Path) -> tuple[dict[str, Any], dict[str, int]]:
    """Return the facts that the page states, and the step of each of its stops."""
    header, *steps = read_recording(RECORDED)
    number = next(request["number"] for step in steps for request in step["running"] if "yours" in request["id"])
    entries = [(step, entry) for step in steps for entry in step["batch"] if entry[0] == number]
    stops = stops_of(steps, number, entries)
    facts = request_facts(header, steps, number, stops)
    return facts | model_facts(root, facts["prompt"], facts["prompt_blocks"], steps[0]["block_size"]), stops


def stops_of(steps: list[Any], number: int, entries: list[Any]) -> dict[str, int]:
    """Return the first step at which each thing happens to the request."""
    begun = entries[0][0]["step"]
    returned, back = (step["step"] for step, (*_, cached) in entries[1:] if cached >= 0)
    lost, lost_again = (step["step"] for step in steps if number in step["preempted"])
    tokens = [step["step"] for step, (_, _, _, sampled, _) in entries if sampled]
    drafted = [(step["step"], drafts, sampled - 1) for step, (_, _, drafts, sampled, _) in entries if drafts]
    return {
        "arrival": begun - 1,
        "admission": begun,
        "first_token": tokens[0],
        "decode": tokens[1],
        "rejected": next(step for step, _, accepted in drafted if not accepted),
        "accepted": next(step for step, drafts, accepted in drafted if accepted == drafts),
        "preempted": lost,
        "returned": returned,
        "preempted_again": lost_again,
        "back": back,
        "end": entries[-1][0]["step"],
    }


def request_facts(header: Mapping[str, Any], steps: list[Any], number: int, stops: Mapping[str, int]) -> dict[str, Any]:
    """Return what the recording says of the request."""
    sent, events = header["request"], [json.loads(event) for event in header["request"]["events"][:-1]]
    admission, first, before_loss = (
        steps[stops["admission"]],
        steps[stops["first_token"]],
        steps[stops["preempted"] - 1],
    )
    entry = {name: entry_of(steps[stops[name]], number) for name in ENTRIES}
    mine, lost = (described(step, number) for step in (admission, before_loss))
    block_size, prompt = admission["block_size"], mine["prompt"]
    hit = entry["admission"][-1]
    choice = events[0]["choices"][0]
    others = {request["number"]: request["adapter"] for request in first["running"] if request["number"] != number}
    first_other, second_other = others
    assert [*others.values()] == ["", "stubs"], "the page says so"
    return {
        "steps": stops["end"] - stops["arrival"],
        "first_other": first_other,
        "second_other": second_other,
        "adapter": mine["adapter"],
        "other_adapter": others[second_other],
        "characters": len(sent["body"]["prompt"]),
        "prompt": prompt,
        "max_tokens": sent["body"]["max_tokens"],
        "hit": hit,
        "hit_blocks": hit // block_size,
        "last_hit_block": hit // block_size - 1,
        "first_new_block": mine["blocks"][hit // block_size],
        "second_new_block": mine["blocks"][hit // block_size + 1],
        "budget": admission["max_num_batched_tokens"],
        "chunk": entry["admission"][1],
        "missing": prompt - hit,
        "rest": entry["first_token"][1],
        "first_text": choice["text"],
        "first_percent": round(100 * math.exp(choice["logprobs"]["token_logprobs"][0])),
        "prompt_blocks": len(described(first, number)["blocks"]),
        "drafts": entry["accepted"][2],
        "accepted_tokens": entry["accepted"][3],
        "pool": admission["num_blocks"],
        "usable": admission["num_blocks"] - 1,
        "lost_blocks": len(lost["blocks"]),
        "return_hit": entry["returned"][-1],
        "return_tokens": lost["tokens"],
        "return_computed": entry["returned"][1],
        "steps_of_waiting": stops["back"] - stops["preempted_again"],
        "back_hit": entry["back"][-1],
        "lost_of_cache": described(steps[stops["returned"]], number)["computed"] // block_size
        - entry["back"][-1] // block_size,
    }


def model_facts(root: Path, prompt: int, prompt_blocks: int, block_size: int) -> dict[str, Any]:
    """Return what the model's configuration says of its cache."""
    folder = root / "vllm" / "models" / "tiny-python"
    config = json.loads((folder / "config.json").read_text())
    layers, heads, kv_heads = (
        config[f"num_{kind}"] for kind in ("hidden_layers", "attention_heads", "key_value_heads")
    )
    token_bytes = 2 * layers * kv_heads * config["head_dim"] * BYTES
    parameters = json.loads((folder / "training.json").read_text())["parameters"]
    return {
        "layers": layers,
        "heads": heads,
        "kv_heads": kv_heads,
        "group": heads // kv_heads,
        "token_bytes": f"{token_bytes:,}",
        "mha_bytes": f"{token_bytes * heads // kv_heads:,}",
        "prompt_kilobytes": round(prompt * token_bytes / 1000),
        "transfer_kilobytes": round(prompt_blocks * block_size * token_bytes / 1000),
        "parameters": f"{parameters / 1e6:.1f} million",
    }


def entry_of(step: Mapping[str, Any], number: int) -> list[int]:
    """Return a request's tokens, drafts, samples and cached tokens in a step, after its number."""
    return next(entry for entry in step["batch"] if entry[0] == number)


def described(step: Mapping[str, Any], number: int) -> dict[str, Any]:
    """Return a running request's state after a step."""
    return next(request for request in step["running"] if request["number"] == number)
